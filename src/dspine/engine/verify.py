"""Decides row by row which drafts stay: the lossless part of speculation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspine.engine.emit import Emitter
from dspine.engine.events import FinishReason


@dataclass(frozen=True, slots=True)
class Verdict:
    """`tokens` to emit, of which the first `accepted` were drafted; `reason` if it ends here."""

    tokens: tuple[int, ...]
    accepted: int
    reason: FinishReason | None


def accept_rows(drafts: Sequence[int], choose: Callable[[int], int], emitter: Emitter) -> Verdict:
    """Take the target's choice of row 0, 1, ... as long as it confirms the draft after it.

    Row i is the target's answer after the anchor and i accepted drafts. `choose(i)` picks the
    token there (arg-max, or the request's sampler) and is asked for no row beyond the first
    mismatch. An end token, a stop string or `max_tokens` ends the step at once, so that no
    later draft is emitted or kept.
    """
    tokens: list[int] = []
    row = 0
    while True:
        token = choose(row)
        tokens.append(token)
        reason = emitter.push(token)
        matches = row < len(drafts) and drafts[row] == token
        row += matches
        if reason is not None or not matches:
            return Verdict(tuple(tokens), row, reason)
