"""A file of JSON lines that long jobs add to, and that is whole after every line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Self

from dspine.errors import TrainingError, UsageError
from dspine.files.atomic import reason

_SYNC_LINES = 32


class LineFile:
    """Adds lines to a file; a full disk becomes a sentence, what is complete stays."""

    def __init__(self, path: Path, what: str) -> None:
        """`what` the lines are, in the plural."""
        self._path, self._what = path, what
        self._file: BinaryIO
        self._lines = 0

    def __enter__(self) -> Self:
        self._file = self._path.open("ab", buffering=0)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file, self._explained():
            # After an error there is one to report already, and the lines are with the system.
            if kind is None:
                os.fsync(self._file.fileno())

    def append(self, line: str) -> None:
        """Add a line, which ends with its line feed."""
        data = line.encode()
        with self._explained():
            written = self._file.write(data)
            if written < len(data):
                # A short write is a disk that is nearly full; the rest says what is wrong.
                self._file.write(data[written:])
            self._lines += 1
            if self._lines % _SYNC_LINES == 0:
                os.fsync(self._file.fileno())

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"{self._what} could not be added to {self._path} ({error.strerror}): make room "
                f"and start again, the complete lines are kept"
            ) from error


def make_ready(path: Path, what: str) -> None:
    """Make the file if it is not there; TrainingError or UsageError where lines cannot be
    added to it."""
    if path.is_dir():
        raise TrainingError(f"{what} cannot be written to {path}: name a file in it")
    if path.suffix == ".gz":
        raise UsageError(f"{path} cannot be added to: name a file without .gz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise TrainingError(
            f"{what} cannot be written to {path} ({error.strerror}): choose another file"
        ) from error


def cut_incomplete_line(path: Path, what: str, is_begun: Callable[[bytes], bool]) -> None:
    """Remove a last line that lacks its line feed, if `is_begun` knows it as one of ours."""
    try:
        with path.open("rb+") as file:
            data = file.read()
            complete = data.rfind(b"\n") + 1
            if not complete and not is_begun(data):
                raise TrainingError(f"{path} holds no {what}: name another file to write them to")
            if complete < len(data):
                file.truncate(complete)
    except OSError as error:
        raise TrainingError(f"{path} cannot be continued: {reason(error)}") from error
