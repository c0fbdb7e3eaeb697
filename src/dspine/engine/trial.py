"""What asking the drafter has brought in fact, and how much it may lose while that is little.

Chances and prices are guesses. Afterwards it is known what a step gave and took, and what it
would have given with the drafts that were to be had without asking.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspine.engine.acceptance import Reliability

LOSS = 3.0
"""Tokens that asking may have lost against not asking, at the start and beyond what it gained."""

TRUST = 20.0
"""Most tokens of gain that count: what suited the last answers need not suit the next."""

FORGIVEN = 0.002
"""Share of each token by which a loss is forgiven, so that it is tried again."""


class Trial:
    """The account of one policy over all its answers, in tokens at the rate reached."""

    def __init__(self) -> None:
        self.left = LOSS
        """What asking may lose now."""

    def gained(self, tokens: float) -> None:
        """A step that used what was asked for gave so many tokens more than one without."""
        self.left = min(TRUST, self.left + tokens)

    def emitted(self, tokens: int) -> None:
        """So many tokens were confirmed, whoever proposed them."""
        if self.left < LOSS:
            self.left = min(LOSS, self.left + FORGIVEN * tokens)


def would_have(
    drafts: Sequence[int],
    slots: Sequence[int],
    confirmed: Sequence[int],
    source: Reliability,
) -> tuple[float, bool]:
    """(tokens, right): what verifying `drafts` would have given where `confirmed` came instead.

    Beyond what was confirmed the chances of their `slots` at `source` count. `right` is whether
    none of the drafts turned out wrong.
    """
    tokens = 1.0
    for draft, token in zip(drafts, confirmed, strict=False):
        if draft != token:
            return tokens, False
        tokens += 1.0
    for reached in source.reaches(slots[len(confirmed) : len(drafts)]):
        tokens += reached
    return tokens, True
