"""The chain: one path through a block's transition table, the best one or one that is drawn."""

from __future__ import annotations

from math import exp, inf, log
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.drafters.base import Draft, Draw, Drawn
from dspine.errors import UsageError
from dspine.ggml import kernels
from dspine.ggml.walk import NativeWalk


class Chain:
    """The walk over arrays that are written anew for each block.

    `candidates` (n, K) are token ids of slots 1 ... n. `first_row` (K,) scores the candidates of
    slot 1 after the anchor. `table` (n - 1, K, K) scores, for slots 2 ... n, candidate j (last
    axis) after candidate k of the slot before. Rows must be contiguous.
    """

    def __init__(
        self,
        candidates: npt.NDArray[np.int32],
        first_row: npt.NDArray[np.float32],
        table: npt.NDArray[np.float32],
    ) -> None:
        slots, k = candidates.shape
        if first_row.shape != (k,) or table.shape != (slots - 1, k, k):
            raise UsageError(
                f"{slots} slots of {k} candidates need a first row of ({k},) and a table of "
                f"({slots - 1}, {k}, {k}), not {first_row.shape} and {table.shape}: give arrays "
                "of these shapes"
            )
        self.candidates, self.first_row, self.table = candidates, first_row, table
        plug_in, arrays = kernels.installed(), (candidates, first_row, table)
        self._native: NativeWalk | None = None
        if plug_in is not None and all(array.flags.c_contiguous for array in arrays):
            self._native = NativeWalk(plug_in.library, *arrays)
        # Plain views of the rows: right after a decode a NumPy call costs more than a loop.
        self._ids = [_bytes(row).cast("i") for row in candidates]
        self._first = _bytes(first_row).cast("f")
        self._later = [[_bytes(row).cast("f") for row in rows] for rows in table]

    def after(self, count: int, row: npt.NDArray[np.float32]) -> Chain:
        """What follows `count` tokens that somebody else chose, whether candidates or not: `row`
        (K,) scores the candidates of the next slot after the last of them.
        """
        return Chain(self.candidates[count:], row, self.table[count:])

    def walk(self, draw: Draw | None = None) -> Draft:
        """Follow the best candidate of each slot, or one drawn, given the one chosen before.

        Only the scores decide: the logits that chose the candidates are not added. Ties go to
        the lower index. The draft's own scores are those of the best path also where another
        one is drawn: they may decide how much is verified, which must not depend on what was
        drawn. Raises FloatingPointError for scores that are not numbers.
        """
        tokens, scores = self._best() if self._native is None else self._native.best()
        if draw is None:
            return Draft(tokens, scores)
        drawn = _draw(self.candidates, self.first_row, self.table, draw)
        kept = drawn if draw.with_distributions else ()
        return Draft(tuple(one.token for one in drawn), scores, kept)

    def _best(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        tokens: list[int] = []
        scores: list[float] = []
        numbers, rest = self._first, iter(self._later)
        for ids in self._ids:
            row = numbers.tolist()
            best = max(row)
            column = row.index(best)
            tokens.append(ids[column])
            # The best entry has exponent 0, so its softmax probability is one over the row's sum.
            total = sum([exp(score - best) for score in row])
            if not total >= 1.0:
                raise FloatingPointError("the drafter's scores are not numbers")
            scores.append(1.0 / total)
            later = next(rest, None)
            if later is not None:
                numbers = later[column]
        return tuple(tokens), tuple(scores)


def _bytes(row: npt.NDArray[Any]) -> memoryview:
    return row.data.cast("B")


def _draw(
    candidates: npt.NDArray[np.int32],
    first_row: npt.NDArray[np.float32],
    table: npt.NDArray[np.float32],
    draw: Draw,
) -> tuple[Drawn, ...]:
    """The path that `draw` picks, with the distribution of each slot."""
    least = log(draw.min_p) if draw.min_p > 0 else -inf
    noise: list[list[float]] = draw.noise(candidates).tolist()
    drawn: list[Drawn] = []
    row: list[float] = first_row.tolist()
    for slot, own_noise in enumerate(noise):
        best = max(row)
        scaled = [
            (score - best) / draw.temperature if score - best >= least else -inf for score in row
        ]
        noisy = [score + extra for score, extra in zip(scaled, own_noise, strict=True)]
        column = noisy.index(max(noisy))
        odds = [exp(score) for score in scaled]
        total = sum(odds)
        drawn.append(
            Drawn(
                candidates.item(slot, column),
                candidates[slot].copy(),
                np.array([chance / total for chance in odds]),
            )
        )
        if slot + 1 < len(noise):
            row = table[slot, column].tolist()
    return tuple(drawn)
