"""How many processor cores this process may use: the default of every thread count."""

from __future__ import annotations

import os
from pathlib import Path


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
