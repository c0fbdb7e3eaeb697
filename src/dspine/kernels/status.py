"""Decides whether the CPU kernels are used in this process, and says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dspine.errors import DspineError
from dspine.ggml import kernels as plug_in
from dspine.ggml import library as ggml_library
from dspine.kernels.build import build, is_supported, library_path
from dspine.machine import cache_folder, cpu_model

SWITCH = "DSPINE_KERNELS"
BUILD = "python -m dspine.kernels"
_OFF = ("off", "0", "no", "false")
_TEST_SECONDS = 120
Tester = Callable[[Path, Path], str]


@dataclass(frozen=True, slots=True)
class Status:
    """What computes on the CPU: our kernels' `family`, or ggml (None) and the `reason`."""

    family: str | None = None
    reason: str = "not loaded"

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
    the verdict is kept beside them. Never raises for anything that kernels can do wrong.
    """
    present = plug_in.installed()
    if present is not None:
        return Status(present.family, "")
    unusable = _unusable()
    if unusable is not None:
        return unusable
    path = library_path(cache or cache_folder(), ggml_library.functions().ggml_version().decode())
    if not path.exists():
        return Status(reason=f"the CPU kernels are not built ({BUILD} does it)")
    try:
        complaint = _verdict(path, folder, tester or run_test)
        if complaint:
            return Status(reason=f"the CPU kernels failed their self-test ({complaint})")
        return Status(plug_in.install(path).family, "")
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


def run_test(path: Path, folder: Path) -> str:
    """Test the kernels `path` with the library in `folder` in a child; "" or what is wrong."""
    command = [sys.executable, "-m", "dspine.kernels.selftest", str(path), str(folder)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TEST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"the process was ended by signal {-done.returncode}"
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def _unusable() -> Status | None:
    """A reason that needs no look at the kernels themselves."""
    if os.environ.get(SWITCH, "").strip().lower() in _OFF:
        return Status(reason=f"switched off by {SWITCH}")
    if not is_supported():
        return Status(reason="there are CPU kernels for Linux on x86-64 only")
    version = ggml_library.functions().ggml_version().decode()
    if not plug_in.fits(version):
        return Status(reason=f"the CPU kernels do not fit ggml {version}")
    return None


def _verdict(path: Path, folder: Path, tester: Tester) -> str:
    """What the self-test found, from the last time on this machine and library or from now."""
    facts = _facts(path, folder)
    file = path.with_suffix(".json")
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(file.read_text())
        if known["facts"] == facts and isinstance(known["complaint"], str):
            return str(known["complaint"])
    complaint = tester(path, folder)
    _write(file, {"facts": facts, "complaint": complaint})
    return complaint


def _facts(path: Path, folder: Path) -> list[str | int]:
    found: list[str | int] = [cpu_model(), str(folder.resolve())]
    for file in (path, folder / "libggml-cpu.so", folder / "libggml-base.so"):
        stat = file.stat()
        found += [stat.st_size, stat.st_mtime_ns]
    return found


def _write(file: Path, content: Mapping[str, object]) -> None:
    """Keep a verdict; a folder that cannot be written only costs the next self-test."""
    with suppress(OSError):
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as out:
            json.dump(content, out)
        Path(out.name).replace(file)
