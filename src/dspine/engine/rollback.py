"""Takes rejected positions back out of the target's memory, in one of three ways."""

from __future__ import annotations

from time import perf_counter
from typing import Literal, Protocol

from dspine.engine.target import Target
from dspine.engine.waiting import Copies
from dspine.errors import LibraryError, UsageError

RollbackMode = Literal["trim", "snapshots", "checkpoint"]
ROLLBACK_CHOICES = ("auto", "trim", "snapshots", "checkpoint")

MAX_REPLAY = 16
"""Confirmed tokens carried in front of a block; with more, the next step has no drafts."""

SNAPSHOTS_ONLY = frozenset({"deepseek4"})
"""Attention caches that compress what they hold: the library cuts them within snapshots only."""


class Rollback(Protocol):
    """Keeps the memory in step with the confirmed tokens, whatever kind of memory it is."""

    @property
    def held(self) -> int:
        """Positions in memory; confirmed tokens beyond it go in front of the next batch."""

    @property
    def copies(self) -> Copies | None:
        """What a block with drafts costs now besides its rows; None where nothing is copied."""

    def start(self, length: int) -> None:
        """The memory holds `length` confirmed positions."""

    def before_verify(self, drafts: int) -> None:
        """A batch with `drafts` drafts at its end is about to be decoded.

        Raises DspineError where the memory cannot be saved; nothing has changed then.
        """

    def settle(self, decoded: int, keep: int) -> None:
        """Of `decoded` positions the first `keep` are confirmed: forget the rest."""

    def undo(self, length: int) -> None:
        """A step was interrupted: only the first `length` positions count. The anchor's, which
        is next and confirmed, may stay as well; then only a longer text can go on.
        """


class TrimRollback:
    """Attention-only targets: positions can be cut off at will, nothing is copied.

    That holds for sliding windows too: while a block is decoded, they keep what its first row
    sees.
    """

    copies: Copies | None = None

    def __init__(self, target: Target) -> None:
        self._target = target
        self.held = 0

    def start(self, length: int) -> None:
        self.held = length

    def before_verify(self, drafts: int) -> None:
        """Nothing to save."""

    def settle(self, decoded: int, keep: int) -> None:
        if keep < decoded and not self._target.trim(keep):
            raise LibraryError(
                f"the library cannot cut its memory back to {keep} of {decoded} positions: "
                f"run without drafts (--proposer none)"
            )
        self.held = keep

    def undo(self, length: int) -> None:
        if self._target.length() > length and not self._target.trim(length):
            self._target.clear()
        self.held = min(length, self._target.length())


class SnapshotRollback(TrimRollback):
    """Recurrent state of which the library keeps a copy after each of the last rows.

    Cutting back within one block is free; the copies are held all the time. The state before
    the block is not among them, so an interrupted step keeps the anchor, which is confirmed.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._decoding: int | None = None
        """Positions after the decode that is under way and not yet settled."""

    def before_verify(self, drafts: int) -> None:
        self._decoding = self.held + 1 + drafts

    def settle(self, decoded: int, keep: int) -> None:
        super().settle(decoded, keep)
        self._decoding = None

    def undo(self, length: int) -> None:
        target = self._target
        present, decoded = target.length(), self._decoding
        # Whole blocks alone are cut: one that was cut already has other states behind it.
        whole = present == decoded and present > length and self.held == length
        if present != length and not (whole and (present == length + 1 or target.trim(length + 1))):
            target.clear()
        self.held = target.length()
        self._decoding = None


class CheckpointRollback:
    """Targets with recurrent layers: one saved state and deferred replay.

    The state cannot be trimmed, so it is saved before a verify with drafts. When drafts are
    rejected the saved state comes back, and the confirmed tokens since then are decoded again
    in front of the next batch: one extra copy of the state, and never a pass without a token.
    How long they are carried there is the width policy's choice (`engine/waiting.py`).
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.held = 0
        self._saved: int | None = None
        """Length at the checkpoint that belongs to the present tokens."""
        self._settled = True
        self._save_ms = self._restore_ms = 0.0

    @property
    def copies(self) -> Copies | None:
        """As measured so far; the state of the last restore is not saved again."""
        return Copies(0.0 if self._saved == self.held else self._save_ms, self._restore_ms)

    def start(self, length: int) -> None:
        self.held = length
        self._saved = None
        self._settled = True

    def before_verify(self, drafts: int) -> None:
        # What was restored last is still saved: the same state need not be copied again.
        if drafts and self._saved != self.held:
            self._saved = None
            started = perf_counter()
            self._target.checkpoint()
            self._save_ms = _smooth(self._save_ms, started)
            self._saved = self.held
        self._settled = False

    def settle(self, decoded: int, keep: int) -> None:
        if keep == decoded:
            self.held = keep
        else:
            started = perf_counter()
            self.held = self._target.restore()
            self._restore_ms = _smooth(self._restore_ms, started)
        self._settled = True

    def undo(self, length: int) -> None:
        if not self._settled or self._target.length() > length:
            self._return(length)
        self.held = self._target.length()
        self._settled = True

    def _return(self, length: int) -> None:
        """Back to the checkpoint, which may be some steps old, or to nothing."""
        if self._saved is not None and self._saved <= length:
            try:
                self._target.restore()
            except (LibraryError, UsageError):
                self._target.clear()  # an interrupt hit the copying itself
                self._saved = None
        else:
            self._target.clear()
            self._saved = None


def _smooth(usual: float, started: float) -> float:
    """Milliseconds since `started` mixed into the usual ones; a stall counts as twice those."""
    spent = (perf_counter() - started) * 1000.0
    return usual + 0.25 * (min(spent, 2.0 * usual) - usual) if usual else spent


def choose_rollback(wanted: str, *, is_recurrent: bool, architecture: str) -> RollbackMode:
    """The mode that `wanted` means for a target; UsageError where it cannot work.

    Whether the library keeps snapshots of an architecture is known with its context only
    (`check_snapshots`).
    """
    if wanted not in ROLLBACK_CHOICES:
        raise UsageError(f"rollback is {wanted!r}: choose one of {', '.join(ROLLBACK_CHOICES)}")
    snapshots_only = architecture in SNAPSHOTS_ONLY
    if wanted == "auto":
        if snapshots_only:
            return "snapshots"
        return "checkpoint" if is_recurrent else "trim"
    if wanted == "trim" and (is_recurrent or snapshots_only):
        raise UsageError(
            f"rollback is trim, which cannot work on architecture {architecture}: its memory is "
            f"not one of separate positions; use --rollback auto"
        )
    if wanted == "snapshots" and not (is_recurrent or snapshots_only):
        raise UsageError(
            f"rollback is snapshots, which are copies of recurrent state, and architecture "
            f"{architecture} has none: use --rollback auto"
        )
    if wanted == "checkpoint" and snapshots_only:
        raise UsageError(
            f"rollback is checkpoint, which cannot work on architecture {architecture}: use "
            f"--rollback auto"
        )
    return "trim" if wanted == "trim" else "snapshots" if wanted == "snapshots" else "checkpoint"


def check_snapshots(wanted: int, kept: int, architecture: str) -> None:
    """UsageError where the library keeps fewer snapshots than were asked of it."""
    if kept < wanted:
        raise UsageError(
            f"rollback is snapshots, and this llama.cpp library keeps {kept} of {wanted} for "
            f"architecture {architecture}: use --rollback checkpoint or auto"
        )


def make_rollback(mode: RollbackMode, target: Target) -> Rollback:
    """The implementation of `mode` on `target`."""
    match mode:
        case "trim":
            return TrimRollback(target)
        case "snapshots":
            return SnapshotRollback(target)
        case "checkpoint":
            return CheckpointRollback(target)
