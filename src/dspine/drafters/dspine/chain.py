"""The chain: one greedy path through a block's transition table."""

from __future__ import annotations

from math import exp

import numpy as np
import numpy.typing as npt

from dspine.drafters.base import Draft
from dspine.errors import UsageError


def walk_chain(
    candidates: npt.NDArray[np.int32],
    first_row: npt.NDArray[np.float32],
    table: npt.NDArray[np.float32],
) -> Draft:
    """Follow the best candidate of each slot, given the one chosen before.

    `candidates` (n, K) are token ids of slots 1 ... n. `first_row` (K,) scores the candidates of
    slot 1 after the anchor. `table` (n - 1, K, K) scores, for slots 2 ... n, candidate j (last
    axis) after candidate k of the slot before. Only these scores decide: the logits that chose
    the candidates are not added. Ties go to the lower index.
    """
    slots, k = candidates.shape
    if first_row.shape != (k,) or table.shape != (slots - 1, k, k):
        raise UsageError(
            f"{slots} slots of {k} candidates need a first row of ({k},) and a table of "
            f"({slots - 1}, {k}, {k}), not {first_row.shape} and {table.shape}"
        )
    # Only the rows on the path, as lists: NumPy calls on so few numbers take longer than a loop.
    tokens: list[int] = []
    scores: list[float] = []
    row: list[float] = first_row.tolist()
    for slot in range(slots):
        best = max(row)
        column = row.index(best)
        tokens.append(candidates.item(slot, column))
        # The best entry has exponent 0, so its softmax probability is one over the row's sum.
        scores.append(1.0 / sum([exp(score - best) for score in row]))
        if slot + 1 < slots:
            row = table[slot, column].tolist()
    return Draft(tuple(tokens), tuple(scores))
