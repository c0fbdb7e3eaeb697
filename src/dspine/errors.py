"""The errors dspine raises on purpose: each message says what is wrong and what to do about it."""

from __future__ import annotations


class DspineError(Exception):
    """Base of every error that a user can cause or cure; the CLI prints it as one line."""

    exit_code = 2


class UsageError(DspineError):
    """An option, argument or request is wrong: the message names it and the accepted values."""


class FileError(DspineError):
    """A file is missing, damaged, or of a kind that cannot be used here."""


class PairError(FileError):
    """A drafter and a target do not belong together: names the field, expected and found."""


class LibraryError(DspineError):
    """The llama.cpp library is missing, of another version, or fails its probe."""

    exit_code = 3


class CapacityError(DspineError):
    """Something does not fit: context, batch or memory; the message has the numbers."""


class ClosedError(DspineError):
    """An object that owned native memory was used after `close()`."""


class TrainingError(DspineError):
    """Training cannot go on; what was written so far stays valid."""

    exit_code = 4
