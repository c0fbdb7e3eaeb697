"""GGUF files of the Hugging Face hub, by llama.cpp's way of naming them: user/repo[:quant].

Files lie in the hub's own cache, which other programs share. Nothing is asked of the network when
HF_HUB_OFFLINE is set; the package huggingface_hub is needed and imported on use only.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dspine.errors import FileError, UsageError
from dspine.files.atomic import reason
from dspine.files.split import split_names

PREFIX = "hf:"
DEFAULT_TAGS = ("Q4_K_M", "Q8_0")
"""Looked for in this order when no quant is named, as llama.cpp does; then the first GGUF."""

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_TAG = re.compile(r"[\w.-]+", re.ASCII)
_COMPANIONS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
"""In names of files that are no model by themselves, by llama.cpp's own list."""
_DRAFTERS = ("dspine", "dflash")
"""In names of drafters that dspine runs, the preferred first."""
_PATIENCE_SECONDS = 10.0
_WITHOUT = "or download the file yourself and name it with -m (drafters: -md)"


@dataclass(frozen=True, slots=True)
class HubName:
    """What was asked for; `tag` picks among the files where no `file` is named."""

    repo: str
    tag: str = ""
    file: str = ""


def parse_repo(text: str, file: str | None = None) -> HubName:
    """`user/repo` or `user/repo:quant`; UsageError for anything else."""
    repo, colon, tag = text.partition(":")
    if _REPO.fullmatch(repo) is None or (colon and _TAG.fullmatch(tag) is None):
        raise UsageError(f"{text!r} names no hub repository: write user/repo or user/repo:Q4_K_M")
    if file is not None and tag:
        raise UsageError(f"{text!r} names a quant, and --hf-file a file: leave one of them out")
    return HubName(repo, tag, file or "")


def parse_path(path: str | Path) -> HubName | None:
    """`hf:user/repo/file.gguf` (in folders too) or `hf:user/repo[:quant]`; None for other paths."""
    text = str(path)
    if not text.startswith(PREFIX):
        return None
    repo, file = "/".join(text[len(PREFIX) :].split("/")[:2]), text[len(PREFIX) :].split("/")[2:]
    if not file:
        return parse_repo(repo)
    if _REPO.fullmatch(repo) is None or not file[-1].endswith(".gguf") or ".." in file:
        raise UsageError(f"{text!r} names no file of the hub: write hf:user/repo/file.gguf")
    return HubName(repo, file="/".join(file))


def local_file(path: Path, *, drafter: bool = False) -> Path:
    """The path itself, or the file in the hub's cache when it begins with `hf:`."""
    name = parse_path(path)
    return path if name is None else fetch(name, drafter=drafter)


def fetch(name: HubName, *, drafter: bool = False) -> Path:
    """The file in the hub's cache, downloaded when it is not there; of a split model all parts,
    and the path of the first. An n-gram table beside a drafter comes with it.

    Progress is on stderr. Raises UsageError without huggingface_hub, and FileError when the
    repository or file does not exist or cannot be had.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(
            f"models of the hub need huggingface_hub, which is not installed: run `pip install "
            f"'dspine[hub]'`, in a clone `pip install -e '.[hub]'`, {_WITHOUT}"
        ) from error
    with _told(name):
        files, place = _listed(name.repo)
        chosen = choose_file(name, files, drafter=drafter, place=place)
        wanted = list(split_names(PurePosixPath(chosen).name))
        folder = PurePosixPath(chosen).parent
        table = str(PurePosixPath(chosen).with_suffix(".ngram.npz"))
        if drafter and table in files:
            wanted.append(PurePosixPath(table).name)
        with warnings.catch_warnings():
            # A full disk ends in a sentence of ours.
            warnings.filterwarnings("ignore", message="Not enough free disk space")
            got = [
                Path(huggingface_hub.hf_hub_download(name.repo, str(folder / part)))
                for part in wanted
            ]
    return got[0]


def choose_file(
    name: HubName, files: Sequence[str], *, drafter: bool = False, place: str = "the hub's"
) -> str:
    """The file that is named, or the one that llama.cpp would take; FileError lists what there is.

    `place` says whose list `files` is. Files with "dspine" or "dflash" in their name are drafters:
    the first of these kinds that is there is taken for one, and for a target they are left out
    unless there is nothing else.
    """
    models = [file for file in files if is_model(file, drafter=drafter)]
    if name.file:
        found = next((file for file in files if file.lower() == name.file.lower()), None)
        if found is not None:
            return found
        raise _no_such_file(f"{place} {name.repo} has no file {name.file}", models)
    kinds = [_kind(file) for file in models]
    wanted = min(kinds, default=0) if drafter else len(_DRAFTERS)
    models = [f for f, kind in zip(models, kinds, strict=True) if kind == wanted] or models
    for tag in (name.tag,) if name.tag else DEFAULT_TAGS:
        pattern = re.compile(re.escape(tag) + "[.-]", re.IGNORECASE)
        found = next((file for file in models if pattern.search(file)), None)
        if found is not None:
            return found
    if models and not name.tag:
        return models[0]
    what = f"of quant {name.tag}" if name.tag else "model"
    raise _no_such_file(f"{place} {name.repo} has no GGUF {what}", models)


def _no_such_file(complaint: str, models: Sequence[str]) -> FileError:
    shown = ", ".join(models[:8]) + (", ..." if len(models) > 8 else "")
    cure = f", only {shown}: name one of these" if models else f": name another, {_WITHOUT}"
    return FileError(complaint + cure)


def is_model(file: str, *, drafter: bool = False) -> bool:
    """Whether a file is a GGUF model, or the first part of one; or a drafter that dspine runs."""
    base = PurePosixPath(file).name
    others = [word for word in _COMPANIONS if not (drafter and word == "dflash-")]
    if not base.endswith(".gguf") or any(word in base for word in others):
        return False
    return split_names(base)[0] == base


def _kind(file: str) -> int:
    """Place of a file's kind in _DRAFTERS, by its name; their number for other models."""
    base = PurePosixPath(file).name.lower()
    return next((i for i, word in enumerate(_DRAFTERS) if word in base), len(_DRAFTERS))


def _listed(repo: str) -> tuple[list[str], str]:
    """Files of a repository, and whose list that is: the hub's, or when it cannot be asked what
    the cache has."""
    import httpx2
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        # Not list_repo_files, which tries again for half a minute where there is no network.
        found = huggingface_hub.HfApi().model_info(repo, timeout=_PATIENCE_SECONDS).siblings
        return sorted(file.rfilename for file in found or ()), "the hub's"
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        cached = None if isinstance(error, HfHubHTTPError) else _cached(repo)
        if not cached:
            raise
        return cached, f"{_why_unreachable()}, and in the cache"


def _cached(repo: str) -> list[str]:
    """Files of the newest revision of a repository in the cache."""
    import huggingface_hub
    from huggingface_hub.errors import CacheNotFound

    try:
        found = huggingface_hub.scan_cache_dir().repos
    except CacheNotFound:
        return []
    revisions = [
        r for c in found if c.repo_id == repo and c.repo_type == "model" for r in c.revisions
    ]
    revisions.sort(key=lambda r: ("main" in r.refs, r.last_modified))
    if not revisions:
        return []
    newest = revisions[-1]
    return sorted(f.file_path.relative_to(newest.snapshot_path).as_posix() for f in newest.files)


@contextmanager
def _told(name: HubName) -> Iterator[None]:
    """The hub's errors as one sentence each."""
    import httpx2
    from huggingface_hub import constants, errors

    what = f"{name.file} of {name.repo}" if name.file else name.repo
    try:
        yield
    except errors.GatedRepoError as error:
        raise FileError(
            f"the hub's {name.repo} asks for an agreement: accept it on {constants.ENDPOINT} and "
            f"log in with `hf auth login`, {_WITHOUT}"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileError(
            f"the hub has no repository {name.repo}, or it is private: check the name, log in "
            f"with `hf auth login`, {_WITHOUT}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise FileError(_unreachable(what)) from error
    except errors.EntryNotFoundError as error:
        raise FileError(f"the hub's {name.repo} has not all of {what}: check the name") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        raise FileError(
            f"the hub answered {status} when asked for {what}: try again later, {_WITHOUT}"
        ) from error
    except (httpx2.ReadError, httpx2.ReadTimeout, httpx2.RemoteProtocolError) as error:
        raise FileError(
            f"the connection to {constants.ENDPOINT} broke off while {what} was on its way: run "
            f"the same command again, {_WITHOUT}"
        ) from error
    except (httpx2.HTTPError, errors.OfflineModeIsEnabled) as error:
        raise FileError(_unreachable(what)) from error
    except OSError as error:
        raise FileError(
            f"{what} cannot be kept in {constants.HF_HUB_CACHE}: {reason(error)}; the variable "
            f"HF_HUB_CACHE names another place"
        ) from error


def _unreachable(what: str) -> str:
    return f"{what} is not in the hub's cache and {_why_unreachable()}: connect once, {_WITHOUT}"


def _why_unreachable() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return f"{constants.ENDPOINT} is not reachable"
