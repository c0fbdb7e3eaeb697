"""Takes rejected positions back out of the target's memory."""

from __future__ import annotations

from typing import Protocol

from dspine.engine.target import Target
from dspine.errors import LibraryError

MAX_REPLAY = 16
"""Confirmed tokens carried in front of a verify before they get a decode of their own."""


class Rollback(Protocol):
    """Keeps the memory in step with the confirmed tokens, whatever kind of memory it is."""

    @property
    def held(self) -> int:
        """Positions in memory; confirmed tokens beyond it go in front of the next batch."""

    def start(self, length: int) -> None:
        """The memory holds `length` confirmed positions."""

    def before_verify(self) -> None:
        """A batch with drafts is about to be decoded."""

    def settle(self, decoded: int, keep: int) -> None:
        """Of `decoded` positions the first `keep` are confirmed: forget the rest."""

    def undo(self, length: int) -> None:
        """A step was interrupted: only the first `length` positions count."""


class TrimRollback:
    """Attention-only targets: positions can be cut off at will, nothing is copied."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._held = 0

    @property
    def held(self) -> int:
        return self._held

    def start(self, length: int) -> None:
        self._held = length

    def before_verify(self) -> None:
        """Nothing to save."""

    def settle(self, decoded: int, keep: int) -> None:
        if keep < decoded and not self._target.trim(keep):
            raise LibraryError(
                f"the library cannot cut its memory back to {keep} of {decoded} positions: "
                f"run without drafts (--proposer none)"
            )
        self._held = keep

    def undo(self, length: int) -> None:
        if self._target.length() > length:
            self._target.trim(length)
        self._held = length


class CheckpointRollback:
    """Targets with recurrent layers: one saved state and deferred replay.

    The state cannot be trimmed, so it is saved before every verify with drafts. When drafts are
    rejected the saved state comes back, and the confirmed tokens since then are decoded again
    in front of the next batch: no extra pass, one extra copy of the state.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._held = 0
        self._saved = False

    @property
    def held(self) -> int:
        return self._held

    def start(self, length: int) -> None:
        self._held = length
        self._saved = False

    def before_verify(self) -> None:
        self._target.checkpoint()
        self._saved = True

    def settle(self, decoded: int, keep: int) -> None:
        if keep == decoded:
            self._held = keep
        else:
            self._held = self._target.restore()
        self._saved = False

    def undo(self, length: int) -> None:
        if self._saved:
            self._held = self._target.restore()
            self._saved = False
        self._held = min(self._held, length, self._target.length())
