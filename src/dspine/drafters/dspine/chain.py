"""The chain: one greedy path through a block's transition table. Pure NumPy."""

from __future__ import annotations

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
    rows = np.concatenate((first_row[None, :], table.reshape(-1, k)))
    best = rows.argmax(axis=1)
    peak = rows.max(axis=1, keepdims=True)
    # The best entry has exponent 0, so its softmax probability is one over the row's sum.
    scores = (1.0 / np.exp(rows - peak).sum(axis=1)).tolist()
    choice = best.tolist()
    ids = candidates.tolist()
    tokens: list[int] = []
    chosen_scores: list[float] = []
    row = 0
    for slot in range(slots):
        column = choice[row]
        tokens.append(ids[slot][column])
        chosen_scores.append(scores[row])
        row = 1 + slot * k + column
    return Draft(tuple(tokens), tuple(chosen_scores))
