"""Mapping a file into memory for reading, giving that memory back, and safe texts from files."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.errors import FileError
from dspine.files.atomic import reason

_LONGEST = 300


def map_file(path: Path, *, private: bool = False) -> mmap.mmap:
    """Map a whole file read-only; raises FileError when it is missing, empty or unreadable.

    With `private` the memory may be written to without changing the file (torch asks for that).
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FileError(f"{path} is not a file: name the file itself")
        with path.open("rb") as stream:
            access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
            return mmap.mmap(stream.fileno(), 0, access=access)
    except FileNotFoundError as error:
        raise FileError(f"{path} does not exist: check the path") from error
    except ValueError as error:
        raise FileError(f"{path} is empty: copy or download it again") from error
    except OSError as error:
        raise FileError(f"cannot read {path}: {reason(error)}") from error


def release(array: npt.NDArray[Any]) -> None:
    """Tell the system that the values of a read-only mapped array were used.

    Pages of a mapped file count as memory of the process until then; they are read again when
    they are needed again. Arrays that are not mapped, or may be written to, are left alone.
    """
    owner: object = array
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    if not array.flags.c_contiguous:
        return
    first = _address(array) - _address(np.frombuffer(owner, np.uint8))
    last = first + array.nbytes
    # Whole pages only, so what lies beside the array stays.
    start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        owner.madvise(mmap.MADV_DONTNEED, start, end - start)


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def printable(text: str) -> str:
    """A text from a file in one line without control characters, safe in messages."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def shown(text: str) -> str:
    """The same, cut where a hostile file would make a message of megabytes."""
    return printable(text[:_LONGEST] + "..." if len(text) > _LONGEST else text)
