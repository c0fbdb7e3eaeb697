"""Facts about this machine: its processor and cores, and the folders where something is kept."""

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


def state_folder() -> Path:
    """Where the traces of a person's work are kept, such as what was typed."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".local" / "state") / "dspine"


def cpu_model() -> str:
    """Name of this machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Logical cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_cores() -> int:
    """Physical cores that this process may use: threads of one core share its arithmetic."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    cores = set()
    for cpu in usable:
        shared = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(shared.read_text().strip())
        except OSError:
            return usable_cores()
    return len(cores) or usable_cores()


def cpu_flags() -> frozenset[str]:
    """Features of this machine's processor by Linux's names, such as avx2; empty elsewhere."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def available_bytes() -> int | None:
    """Memory that can be taken without swapping, or None when the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
