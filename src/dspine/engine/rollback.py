"""Takes rejected positions back out of the target's memory."""

from __future__ import annotations

from typing import Protocol

from dspine.engine.target import Target


class Rollback(Protocol):
    """Keeps the memory in step with the confirmed tokens, whatever kind of memory it is."""

    @property
    def held(self) -> int:
        """Positions in memory; confirmed tokens beyond it go in front of the next batch."""

    def start(self, length: int) -> None:
        """The prompt was decoded up to `length`."""

    def before_verify(self) -> None:
        """A batch with drafts is about to be decoded."""

    def settle(self, decoded: int, keep: int) -> None:
        """Of `decoded` positions the first `keep` are confirmed: forget the rest."""


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
        return None

    def settle(self, decoded: int, keep: int) -> None:
        if keep < decoded:
            self._target.trim(keep)
        self._held = keep
