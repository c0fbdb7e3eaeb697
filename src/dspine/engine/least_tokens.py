"""An answer of at least so many tokens: none of them ends it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from dspine.engine.choose import Logits
from dspine.text.forced import NOT_FORCED, Forced


class LeastTokens:
    """A `Constraint` that forbids end tokens until `least` tokens were emitted."""

    def __init__(self, least: int, ends: Collection[int]) -> None:
        """`ends` are the tokens that end an answer."""
        self._left = least
        self._ends = frozenset(ends)
        self._ids = np.array(sorted(self._ends), np.intp)

    def mask(self, logits: Logits) -> None:
        if self._left > 0:
            logits[self._ids] = -np.inf

    def accept(self, token: int) -> None:  # noqa: ARG002 - any token counts
        self._left -= 1

    def allowed(self, drafts: Sequence[int]) -> int:
        for slot, token in enumerate(drafts[: max(0, self._left)]):
            if token in self._ends:
                return slot
        return len(drafts)

    def forced(self) -> Forced:
        return NOT_FORCED

    def mark(self) -> object:
        return self._left

    def restore(self, mark: object) -> None:
        assert isinstance(mark, int)
        self._left = mark
