"""What the memory holds between two answers, and how much of it the next prompt can use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dspine.engine.proposal import Proposer
from dspine.engine.sequence import common_prefix
from dspine.engine.target import Snapshot, Target
from dspine.errors import LibraryError, UsageError

MAX_CHECKPOINTS = 8
"""States of a recurrent target kept at most."""

SAVED_CHECKPOINTS = 2
"""Of these as many go to disk: the states around the end of the last prompt."""

MARGIN = 32
"""Tokens before the end of a prompt where a recurrent state is kept as well: templates often
render the last few tokens of a prompt differently once the answer is part of the history."""

WORTH_KEEPING = 64
"""Tokens decoded again, from which the point that made it necessary gets a state of its own."""


@dataclass(frozen=True, slots=True)
class HeldFacts:
    """What is held now; `checkpoint_bytes` are in host memory, for recurrent targets only."""

    tokens: int
    checkpoints: int
    checkpoint_bytes: int


class HeldContext:
    """The tokens in the target's memory, with whatever the proposer knows of them.

    `begin` keeps the longest prefix that the new prompt shares with them and forgets the rest in
    target and proposer alike, so that neither ever holds a position of another text. A recurrent
    state cannot be cut: `checkpoint` keeps states where texts are likely to part. After an error
    nothing counts as held.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        *,
        is_recurrent: bool = False,
        max_checkpoints: int = MAX_CHECKPOINTS,
    ) -> None:
        """`proposer` is told what is forgotten, also by answers that do not draft."""
        self._target = target
        self._proposer = proposer
        self._is_recurrent = is_recurrent
        self._max = max_checkpoints
        self._tokens: list[int] = []
        self._kept: list[Snapshot] = []  # the one used longest ago first
        self._pauses: set[int] = set()
        self._began = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The first tokens in memory that are certain, position by position."""
        return tuple(self._tokens)

    @property
    def facts(self) -> HeldFacts:
        return HeldFacts(len(self._tokens), len(self._kept), sum(s.size for s in self._kept))

    def begin(
        self,
        prompt: Sequence[int],
        usable: Callable[[int], int] = lambda common: common,
        *,
        reuse: bool = True,
    ) -> int:
        """Keep what `prompt` shares with the memory; how many of its positions stay.

        Never all of them: the last token is the anchor and is decoded by the first step.
        `usable(common)` says how many of `common` positions the proposer can do with.
        """
        self._began = False
        end = len(prompt) - 1
        common = min(common_prefix(self._tokens, prompt), end) if reuse else 0
        self._forget_proposals(common)
        kept = self._return_to(usable(common))
        del self._tokens[kept:]
        self._kept = [s for s in self._kept if s.position <= kept]
        self._pauses = set()
        if self._is_recurrent and self._max:
            parted = {common} if common - kept > WORTH_KEEPING else set()
            self._pauses = {p for p in (end - MARGIN, end, *parted) if p > kept}
            self.checkpoint(kept)
        self._began = True
        return kept

    def pause(self, position: int, limit: int) -> int:
        """End of a prompt chunk that starts at `position` and may go to `limit`."""
        return min((p for p in self._pauses if position < p < limit), default=limit)

    def reached(self, position: int) -> None:
        """The prompt is decoded up to here."""
        if position in self._pauses:
            self.checkpoint(position)

    def checkpoint(self, position: int) -> None:
        """Keep the state of a recurrent target, whose memory holds `position` positions."""
        if position < 1:
            return
        again = next((s for s in self._kept if s.position == position), None)
        if again is not None:
            self._kept.remove(again)
        elif len(self._kept) >= self._max:
            del self._kept[0]
        self._kept.append(again or self._target.snapshot())

    def save(self) -> tuple[tuple[int, ...], bytes, tuple[Snapshot, ...]]:
        """The tokens that are held, the target's memory of them, and its latest states."""
        length = len(self._tokens)
        if self._proposer is not None:
            self._proposer.flush(length)
        latest = sorted(self._kept, key=lambda s: s.position)[-SAVED_CHECKPOINTS:]
        return self.tokens, self._target.save() if length else b"", tuple(latest)

    def load(
        self, tokens: Sequence[int], state: bytes, checkpoints: Sequence[Snapshot] = ()
    ) -> None:
        """Replace what is held by what `save` gave.

        Raises UsageError for a state of another kind or length; what was held stays then.
        """
        before = self._target.save() if self._tokens else b""
        try:
            length = self._target.load(state)
            if length != len(tokens):
                raise UsageError(f"the saved memory has {length} tokens, its text {len(tokens)}")
        except UsageError:
            self._target.clear()
            if before:
                self._target.load(before)
            raise
        self._tokens = list(tokens)
        self._kept = [s for s in checkpoints if 0 < s.position <= len(tokens)]
        self._forget_proposals(0)

    def end(self, tokens: Sequence[int]) -> None:
        """An answer is over: the memory holds the first of `tokens`, as many as it has."""
        if self._began:
            self._tokens = list(tokens[: self._target.length()])
        else:
            self.forget()

    def forget(self) -> None:
        """Nothing is certain any more; the next prompt starts with an empty memory."""
        self._tokens = []
        self._kept = []
        self._began = False

    def _return_to(self, wanted: int) -> int:
        """Cut the target's memory back to `wanted` positions or as few more as it can."""
        target = self._target
        if wanted == 0:
            target.clear()
            return 0
        if target.length() == wanted:
            return wanted
        if target.trim(wanted):
            return wanted
        usable = [s for s in self._kept if s.position <= wanted]
        if usable:
            with suppress(LibraryError):  # then it starts with an empty memory
                return target.put_back(max(usable, key=lambda s: s.position))
        target.clear()
        return 0

    def _forget_proposals(self, positions: int) -> None:
        if self._proposer is not None:
            self._proposer.truncate(positions + 1)
