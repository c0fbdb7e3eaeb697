"""Which files the options name: a path, or a repository of the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from dspine.cli.options import Options
from dspine.errors import UsageError


def named_pair(options: Options, *, drafter: bool = True) -> tuple[Path | None, Path | None]:
    """Target and drafter as the options name them, those of the hub downloaded.

    Without `drafter` that of the hub is left alone.
    """
    target = named_file(options, "model", "hf_repo", options.text("hf_file"))
    if options.text("hf_file") is not None and options.text("hf_repo") is None:
        raise UsageError("--hf-file needs --hf-repo: name the repository that has the file")
    if not drafter:
        return target, None
    return target, named_file(options, "model_draft", "hf_repo_draft", None, drafter=True)


def named_file(
    options: Options, path_name: str, repo_name: str, file: str | None, *, drafter: bool = False
) -> Path | None:
    """One of both: the path of an option, or what another names on the hub."""
    path, repo = options.path(path_name), options.text(repo_name)
    if repo is None:
        return path
    if path is not None:
        flags = [f"--{name.replace('_', '-')}" for name in (path_name, repo_name)]
        raise UsageError(f"{flags[0]} and {flags[1]} exclude each other: give one of them")
    from dspine.files.hub import fetch, parse_repo

    return fetch(parse_repo(repo, file), drafter=drafter)
