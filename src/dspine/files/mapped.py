"""Mapping a file into memory for reading, and making its texts safe to show."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path

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


def printable(text: str) -> str:
    """A text from a file in one line without control characters, safe in messages."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def shown(text: str) -> str:
    """The same, cut where a hostile file would make a message of megabytes."""
    return printable(text[:_LONGEST] + "..." if len(text) > _LONGEST else text)
