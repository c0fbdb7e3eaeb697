"""A training record names command, commit and versions, and no folder of a machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

from dspine.train.provenance import command, commit, provenance


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_paths_in_the_command_become_names() -> None:
    assert command(["/usr/bin/dspine", "train", "fit", "-o", "/home/me/run", "--minutes", "5"]) == (
        "dspine train fit -o run --minutes 5"
    )


def test_commit_of_a_checkout_and_its_changes(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("1\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "one")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit(tmp_path) == head
    (tmp_path / "a.py").write_text("2\n")
    assert commit(tmp_path) == f"{head}-modified"


def test_no_checkout_has_no_commit(tmp_path: Path) -> None:
    assert commit(tmp_path) is None


def test_versions_are_named() -> None:
    versions = provenance(["dspine"])["versions"]
    assert isinstance(versions, dict)
    assert versions["torch"].startswith("2.")
    assert versions["llama-cpp-python"] == "0.3.36"
