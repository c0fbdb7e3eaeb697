"""Says once where a drafter is right far less often than its file promises."""

from __future__ import annotations

import logging

log = logging.getLogger("dspine")

TRIES = 48
"""First drafts of a block that are looked at before anything is said."""

SHARE = 0.25
"""Of the promised share, from which on a text that suits the drafter badly is no explanation."""


class Promise:
    """Compares the first draft of each block with the token that came, verified or not."""

    def __init__(self, promised: float | None) -> None:
        """`promised`: the share of first drafts that are right, None where nobody said."""
        self._promised = promised
        self._draft: int | None = None
        self._tries = self._right = 0

    def drafted(self, token: int) -> None:
        """The first draft of a block that was not drawn."""
        self._draft = token

    def confirmed(self, token: int) -> None:
        """What stands in its place."""
        draft, self._draft = self._draft, None
        if draft is None or self._promised is None:
            return
        self._tries += 1
        self._right += token == draft
        if self._tries < TRIES:
            return
        share, promised = self._right / self._tries, self._promised
        self._promised = None if share < SHARE * promised else promised
        self._tries = self._right = 0
        if self._promised is None:
            log.warning(
                "only %.0f%% of the drafter's first drafts are right, and its file says %.0f%%: "
                "either this text does not suit it, or it was made for another target or another "
                "way of answering; `dspine eval` measures it on known tasks",
                100.0 * share,
                100.0 * promised,
            )

    def forget(self) -> None:
        """The step was taken back."""
        self._draft = None
