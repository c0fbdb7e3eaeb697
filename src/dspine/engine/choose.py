"""Chooses the token after a row: the one seam of arg-max, sampling, masks and log-probabilities.

Plain and speculative decoding ask the same chooser, row by row and in the order of the text, and
emit every token they get. So its state is always that of the tokens before the row, also inside
a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dspine.drafters.base import Draw, Drawn
from dspine.engine.target import Target
from dspine.text.forced import NOT_FORCED, Forced

Logits = npt.NDArray[np.float32]


class Constraint(Protocol):
    """Which tokens may come next, e.g. what a grammar permits after the tokens so far."""

    def mask(self, logits: Logits) -> None:
        """Set the logits of forbidden tokens to -inf, in place; at least one must stay."""

    def accept(self, token: int) -> None:
        """The token was emitted."""

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many of these drafts it permits in a row; its state stays as it is."""

    def forced(self) -> Forced:
        """Drafts for what must come next, if it leaves no choice; its state stays as it is."""

    def mark(self) -> object:
        """State to return to with `restore`."""

    def restore(self, mark: object) -> None:
        """Undo everything accepted since `mark`."""


class ChoiceListener(Protocol):
    """Hears of every choice, e.g. to note log-probabilities."""

    def chosen(self, logits: Logits, token: int) -> None:
        """`token` was chosen after a row with these logits (vocab,), before any mask; the array
        is valid during the call only.
        """

    def mark(self) -> object:
        """State to return to with `restore`."""

    def restore(self, mark: object) -> None:
        """Forget the choices since `mark`."""


class Chooser(Protocol):
    """One request's way from rows to tokens."""

    def follow(self, row: int, drafts: Sequence[int]) -> Sequence[int] | None:
        """All choices of a verify at once, where each depends on its row alone; None where they
        are to be asked for one by one.

        They are those after row `row` and after the rows behind it as long as each is the draft
        there: 1 to len(drafts) + 1. They need not be accepted.
        """

    def choose(self, row: int, drawn: Drawn | None = None) -> int:
        """The token after row `row` of the last decode, given every token accepted so far.

        `drawn` is the draft for that place and the distribution it was drawn from, None where
        there is no draft or it was not drawn. Each token chosen must be accepted before the next
        one is asked for.
        """

    def accept(self, token: int) -> None:
        """The token was emitted."""

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many of these drafts can be right at all; more need not be verified."""

    def forced(self) -> Forced:
        """Drafts that a constraint suggests, none without one."""

    def draw(self) -> Draw | None:
        """How a drafter is to pick among its candidates now; None: the best ones."""

    def mark(self) -> object:
        """State to return to with `restore`."""

    def restore(self, mark: object) -> None:
        """Undo everything since `mark` (an interrupted step)."""

    def close(self) -> None:
        """Free what it owns; the answer is complete."""


class GreedyChooser:
    """The most likely token; among equals the one with the lowest id."""

    def __init__(
        self,
        target: Target,
        *,
        constraint: Constraint | None = None,
        listener: ChoiceListener | None = None,
    ) -> None:
        self._target = target
        self._constraint = constraint
        self._listener = listener

    def follow(self, row: int, drafts: Sequence[int]) -> Sequence[int] | None:
        if self._constraint is None and self._listener is None:
            return self._target.follow(row, drafts)
        return None

    def choose(self, row: int, drawn: Drawn | None = None) -> int:  # noqa: ARG002 - a draft changes nothing
        token = self._target.argmax(row)
        if self._constraint is not None and not self._constraint.allowed((token,)):
            # Most choices are permitted; only the others need a mask over the vocabulary.
            permitted = self._target.logits(row).copy()
            self._constraint.mask(permitted)
            token = int(permitted.argmax())
        if self._listener is not None:
            self._listener.chosen(self._target.logits(row), token)
        return token

    def accept(self, token: int) -> None:
        if self._constraint is not None:
            self._constraint.accept(token)

    def allowed(self, drafts: Sequence[int]) -> int:
        return len(drafts) if self._constraint is None else self._constraint.allowed(drafts)

    def forced(self) -> Forced:
        return NOT_FORCED if self._constraint is None else self._constraint.forced()

    def draw(self) -> Draw | None:
        return None

    def mark(self) -> object:
        return marks(self._constraint, self._listener)

    def restore(self, mark: object) -> None:
        restore(mark, self._constraint, self._listener)

    def close(self) -> None:
        """Nothing is owned."""


def marks(constraint: Constraint | None, listener: ChoiceListener | None) -> object:
    """The marks of both, for choosers that hold them."""
    if constraint is None and listener is None:
        return None
    return tuple(part.mark() if part is not None else None for part in (constraint, listener))


def restore(mark: object, constraint: Constraint | None, listener: ChoiceListener | None) -> None:
    """Take both back to what `marks` gave."""
    if not isinstance(mark, tuple):
        return
    for part, own in zip((constraint, listener), mark, strict=True):
        if part is not None:
            part.restore(own)
