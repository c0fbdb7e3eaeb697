"""Gives back pages of a mapped model file that were needed only while it was loaded."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_DONT_NEED = 4
"""MADV_DONTNEED of madvise(2). Of a shared, read-only mapping it takes nothing away: a page that
is used again comes back from the file."""


def forget_pages(path: Path) -> None:
    """Take the pages of all read-only mappings of `path` and the files beside it out of this
    process. Only Linux maps files in a way that this knows; elsewhere nothing happens.
    """
    if sys.platform != "linux":
        return
    folder = f"{os.path.realpath(path.parent)}/"
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or fields[1] != "r--s" or not fields[5].startswith(folder):
            continue
        start, end = (int(text, 16) for text in fields[0].split("-"))
        madvise(start, end - start, _DONT_NEED)
