"""Facts about this machine that results are kept under, and the folder they are kept in."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Where small measured facts are kept between runs."""
    chosen = os.environ.get("DSPINE_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "dspine"


def cpu_model() -> str:
    """Name of this machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
