"""At most so many tokens of thoughts: then the mark that ends them is all that may follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dspine.engine.choose import Logits
from dspine.engine.prompt import TokenizerLike
from dspine.errors import UsageError
from dspine.text.forced import NOT_FORCED, Forced
from dspine.text.reasoning import CLOSE, OPEN

CERTAIN = 0.99
"""Score of the mark as a draft: nothing else can come."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The tokens around thoughts."""

    opening: int
    closing: int

    @classmethod
    def of(cls, tokenizer: TokenizerLike, template: str) -> Marks | None:
        """None where neither vocabulary nor chat template know thoughts: any limit holds then.

        UsageError where only the template does: the marks are several tokens, or other ones.
        """
        found = [tokenizer.encode(mark, parse_special=True) for mark in (OPEN, CLOSE)]
        if all(len(tokens) == 1 for tokens in found):
            return cls(found[0][0], found[1][0])
        if OPEN not in template:
            return None
        raise UsageError(
            f"this target writes {OPEN} and {CLOSE} with several tokens, so that its thoughts "
            f"cannot be limited: leave the limit out"
        )


class ThoughtLimit:
    """A `Constraint` for answers that may begin with thoughts; after them it permits anything."""

    def __init__(
        self, limit: int, marks: Marks, is_blank: Callable[[int], bool], prompt: Sequence[int]
    ) -> None:
        """`is_blank` says which tokens may stand before an opening mark; where `prompt` ends with
        one, the thoughts have begun.
        """
        self._limit = limit
        self._marks = marks
        self._is_blank = is_blank
        end = len(prompt)
        while end and is_blank(prompt[end - 1]):
            end -= 1
        begun = bool(end) and prompt[end - 1] == marks.opening
        self._left: int | None = limit if begun else None
        """Tokens that the thoughts may still have; None while there are none."""
        self._is_over = False

    def mask(self, logits: Logits) -> None:
        if self._must_close:
            own = logits[self._marks.closing]
            logits[:] = -np.inf
            logits[self._marks.closing] = own if np.isfinite(own) else 0.0

    def accept(self, token: int) -> None:
        if self._is_over:
            return
        if self._left is not None:
            self._left -= 1
            self._is_over = token == self._marks.closing
        elif token == self._marks.opening:
            self._left = self._limit
        else:
            self._is_over = not self._is_blank(token)

    def allowed(self, drafts: Sequence[int]) -> int:
        mark = self.mark()
        try:
            for slot, token in enumerate(drafts):
                if self._must_close and token != self._marks.closing:
                    return slot
                self.accept(token)
            return len(drafts)
        finally:
            self.restore(mark)

    def forced(self) -> Forced:
        return Forced((self._marks.closing,), (CERTAIN,)) if self._must_close else NOT_FORCED

    def mark(self) -> object:
        return self._left, self._is_over

    def restore(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        self._left, self._is_over = mark

    @property
    def _must_close(self) -> bool:
        return self._left is not None and self._left <= 0 and not self._is_over
