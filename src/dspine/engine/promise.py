"""Says once where a drafter is right far less often than its file promises."""

from __future__ import annotations

import logging

log = logging.getLogger("dspine")

TRIES = 48
"""First drafts of a block that are looked at before anything is said."""

SHARE = 0.25
"""Of the promised share, from which on a text that suits the drafter badly is no explanation."""


class Promise:
    """Compares the first draft of each block with the token that came, verified or not; one for
    all sequences of an engine.
    """

    def __init__(self, promised: float | None = None) -> None:
        """`promised`: the share of first drafts that are right, None where nobody said."""
        self._promised = promised
        self._tries = self._right = 0

    def compare(self, draft: int, token: int) -> None:
        """`token` stands where `draft` was the first of a block that was not drawn."""
        promised = self._promised
        if promised is None:
            return
        self._tries += 1
        self._right += token == draft
        if self._tries < TRIES:
            return
        share = self._right / self._tries
        self._tries = self._right = 0
        if share < SHARE * promised:
            self._promised = None
            log.warning(
                "only %.0f%% of the drafter's first drafts are right, and its file says %.0f%%: "
                "either this text does not suit it, or it was made for another target or another "
                "way of answering; `dspine eval` measures it on known tasks",
                100.0 * share,
                100.0 * promised,
            )
