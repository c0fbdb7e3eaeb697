"""Repeats a generation's decodes on the target alone: same rows, same batches, no drafter.

Stock kernels round a row differently when it is decoded alone or with others, so greedy texts
can part at near-ties. What the target alone says in the same batches settles whether a
difference comes from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dspine.engine.choose import Chooser
from dspine.engine.rollback import Rollback
from dspine.engine.target import Target
from dspine.engine.trace import Trace


@dataclass(frozen=True, slots=True)
class Replayed:
    """`tokens` the target chose; logits of `pair` where token number `until` was chosen."""

    tokens: tuple[int, ...]
    pair_logits: tuple[float, float] | None


def replay(
    target: Target,
    trace: Trace,
    emitted: Sequence[int],
    chooser: Chooser,
    rollback: Rollback,
    *,
    until: int | None = None,
    pair: tuple[int, int] | None = None,
) -> Replayed:
    """Decode what `trace` recorded and choose again after every row that gave a token.

    Ends with the batch in which token number `until` (from 0) was chosen. The tokens of the
    trace are fed, and those `emitted` then are accepted, whatever the target says now.
    """
    target.clear()
    position = 0
    for chunk in trace.chunks:
        target.decode(chunk, position, "none")
        position += len(chunk)
    rollback.start(position)
    chosen: list[int] = []
    logits: tuple[float, float] | None = None
    for step in trace.steps:
        rollback.before_verify(max(0, len(step.tokens) - step.first_row - 1))
        rows = len(step.tokens) - step.first_row
        target.decode(step.tokens, step.position, rows if step.emitted else "none")
        for row in range(step.first_row, step.first_row + step.emitted):
            if pair is not None and len(chosen) == until:
                values = target.logits(row)
                logits = float(values[pair[0]]), float(values[pair[1]])
            chosen.append(chooser.choose(row))
            chooser.accept(emitted[len(chosen) - 1])
        if until is not None and len(chosen) > until:
            break
        rollback.settle(step.position + len(step.tokens), step.keep)
    return Replayed(tuple(chosen), logits)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ, None when they are equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
