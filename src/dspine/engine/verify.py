"""Decides row by row which drafts stay: the lossless part of speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dspine.drafters.base import Drawn
from dspine.engine.choose import Chooser
from dspine.engine.emit import Emitter
from dspine.engine.events import FinishReason


class Verdict(NamedTuple):
    """`tokens` to emit, of which the first `accepted` were drafted; `reason` if it ends here."""

    tokens: tuple[int, ...]
    accepted: int
    reason: FinishReason | None


def accept_rows(
    drafts: Sequence[int],
    chooser: Chooser,
    emitter: Emitter,
    *,
    first_row: int = 0,
    drawn: Sequence[Drawn] = (),
) -> Verdict:
    """Take the chooser's tokens row by row as long as they confirm the draft after them.

    Row `first_row` + i is the target's answer after the anchor and i accepted drafts. No row
    beyond the first mismatch counts. An end token, a stop string or `max_tokens` ends the
    step at once, so that no later draft is emitted or kept. `drawn` are the drafts that were
    drawn; it may have one more than `drafts`, the next one, which the bonus row then judges.
    """
    followed = chooser.follow(first_row, drafts)
    if followed is not None:
        for row, token in enumerate(followed):
            reason = emitter.push(token)
            if reason is not None:
                matches = row < len(drafts) and drafts[row] == token
                return Verdict(tuple(followed[: row + 1]), row + matches, reason)
        return Verdict(tuple(followed), len(followed) - 1, None)
    tokens: list[int] = []
    row = 0
    while True:
        token = chooser.choose(first_row + row, drawn[row] if row < len(drawn) else None)
        tokens.append(token)
        reason = emitter.push(token)
        chooser.accept(token)
        matches = row < len(drafts) and drafts[row] == token
        row += matches
        if reason is not None or not matches:
            return Verdict(tuple(tokens), row, reason)
