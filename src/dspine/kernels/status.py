"""Decides whether the CPU kernels are used in this process, and says why."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dspine.errors import DspineError, LibraryError, UsageError
from dspine.ggml import kernels as plug_in
from dspine.ggml import library as ggml_library
from dspine.kernels.build import build, is_supported, library_path
from dspine.kernels.verdict import ANY, Tester, run_test, verdict
from dspine.machine import cache_folder

SWITCH = "DSPINE_KERNELS"
BUILD = "python -m dspine.kernels"
_OFF = ("off", "0", "no", "false")
_ON = ("", "on", "1", "yes", "true", ANY)


@dataclass(frozen=True, slots=True)
class Status:
    """What computes on the CPU: our kernels' `family`, or ggml (None) and the `reason`.

    `note` says why this family, where there was a choice.
    """

    family: str | None = None
    reason: str = "not loaded"
    note: str = ""

    @property
    def active(self) -> bool:
        """Whether our kernels compute; logits of a row then do not depend on its batch."""
        return self.family is not None

    @property
    def text(self) -> str:
        """One line for `dspine doctor`."""
        if self.family is not None:
            return f"dspine ({self.family}), row-invariant"
        return f"stock: {self.reason}"


NOT_LOADED = Status()


def enable(folder: Path, cache: Path | None = None, tester: Tester | None = None) -> Status:
    """Plug the kernels into the ggml library loaded from `folder`, where that is possible.

    They must have been built (`prepare`). The first time on a machine a child process tests them;
    the verdict is kept beside them. Never raises for anything that kernels can do wrong, but
    UsageError and LibraryError for a family asked for by DSPINE_KERNELS that does not exist or
    cannot run here.
    """
    present = plug_in.installed()
    if present is not None:
        return Status(present.family, "")
    unusable = _unusable()
    if unusable is not None:
        return unusable
    family = wanted_family()
    path = library_path(cache or cache_folder(), ggml_library.functions().ggml_version().decode())
    if not path.exists():
        return Status(reason=f"the CPU kernels are not built ({BUILD} does it)")
    if family is not None:
        _check_runs(path, family)
    try:
        found = verdict(path, folder, family or ANY, tester or run_test)
        if found.complaint:
            return Status(reason=f"the CPU kernels failed their self-test ({found.complaint})")
        if found.family is None:
            return Status(reason=found.note)
        return Status(plug_in.install(path, found.family).family, "", found.note)
    except (DspineError, OSError) as error:
        return Status(reason=str(error))


def prepare(folder: Path, cache: Path | None = None) -> Status:
    """Build the kernels for the loaded library where they are missing, then `enable` them."""
    unusable = _unusable()
    if unusable is not None:
        return unusable
    path = library_path(cache or cache_folder(), ggml_library.functions().ggml_version().decode())
    try:
        if not path.exists():
            build(path)
    except (DspineError, OSError) as error:
        return Status(reason=str(error))
    return enable(folder, cache)


def wanted_family(environment: Mapping[str, str] = os.environ) -> str | None:
    """Key of the family that DSPINE_KERNELS asks for; None for the fastest, or for none at all.

    UsageError for anything else than a family, on or off.
    """
    value = environment.get(SWITCH, "").strip().lower()
    if value in _ON or switched_off(environment):
        return None
    if value not in plug_in.FAMILIES:
        choices = ", ".join(plug_in.FAMILIES)
        raise UsageError(f"{SWITCH} is {value!r}: use {choices}, on or off")
    return value


def switched_off(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether DSPINE_KERNELS leaves everything to ggml."""
    return environment.get(SWITCH, "").strip().lower() in _OFF


def _check_runs(path: Path, family: str) -> None:
    try:
        plug_in.choose(plug_in.families(path), family)
    except LibraryError as error:
        raise LibraryError(
            f"{SWITCH}={family}: {error}; {SWITCH}=off computes with ggml's kernels"
        ) from error


def _unusable() -> Status | None:
    """A reason that needs no look at the kernels themselves."""
    if switched_off():
        return Status(reason=f"switched off by {SWITCH}")
    if not is_supported():
        return Status(reason="there are CPU kernels for Linux on x86-64 only")
    version = ggml_library.functions().ggml_version().decode()
    if not plug_in.fits(version):
        return Status(reason=f"the CPU kernels do not fit ggml {version}")
    return None
