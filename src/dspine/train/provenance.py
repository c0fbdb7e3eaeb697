"""Where a drafter comes from: the command, the versions and the commit that made it."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath

PACKAGES = ("dspine", "torch", "llama-cpp-python", "numpy")


def provenance(arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Facts for a training record; folders are left out, so that no machine's paths show."""
    return {
        "command": command(sys.argv if arguments is None else arguments),
        "commit": commit(Path(__file__).parent),
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def command(arguments: Sequence[str]) -> str:
    """The command line with every path cut to its name."""
    return " ".join(PurePath(text).name if "/" in text else text for text in arguments)


def commit(folder: Path) -> str | None:
    """Commit of the checkout around `folder`, `-modified` behind it when sources differ."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-modified" if changed else head


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
