"""Writing files so that the final name only ever shows a complete file."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dspine.errors import FileError

_REASONS = {
    errno.ENOSPC: "the disk is full: free some space or choose another folder",
    errno.EDQUOT: "your disk quota is used up: free some space or choose another folder",
    errno.EFBIG: "the file would be larger than this system allows: choose another folder",
    errno.EACCES: "the system does not permit it: check the permissions",
    errno.EPERM: "the system does not permit it: check the permissions",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOENT: "its folder does not exist: create it first",
    errno.ENOTDIR: "part of its path is a file, not a folder: correct the path",
    errno.EISDIR: "it is a folder: name a file in it",
    errno.ENAMETOOLONG: "the name is too long: choose a shorter one",
}


def reason(error: OSError) -> str:
    """What an operating system error means for the user, as the second half of a sentence."""
    known = _REASONS.get(error.errno or 0)
    return known or f"the system says '{error.strerror or error}'"


def refuse_existing(path: Path, overwrite: bool) -> None:
    """Raise FileError when `path` exists and may not be replaced."""
    if path.is_dir():
        raise FileError(f"cannot write {path}: {_REASONS[errno.EISDIR]}")
    if not overwrite and path.exists():
        raise FileError(f"{path} exists already: choose another name, or replace it with --force")


@contextmanager
def atomic_write(path: Path, *, overwrite: bool = False) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; rename it there only when the block succeeds.

    On any error the temporary file is removed and `path` is as it was. Operating system errors
    become FileError with the reason (full disk, no permission, ...).
    """
    refuse_existing(path, overwrite)
    partial = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.partial")
    try:
        try:
            with partial.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise FileError(f"cannot write {path}: {reason(error)}") from error
