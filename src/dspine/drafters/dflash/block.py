"""What DFlash makes of the backbone's states: scores of each slot that know nothing of the others.

Tensor shapes in comments are in ggml order (fastest first); n drafted slots, K candidates.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.drafters.backbone.block import BlockGraph, Scores
from dspine.ggml import Graph, Tensor

CANDIDATES = 16
"""Tokens of a slot that a draw chooses from, and that a draft's probability is relative to."""


class DFlashBlockGraph(BlockGraph):
    """The backbone's block; the head decides."""

    def _score(self, g: Graph, hidden: Tensor) -> list[Tensor]:
        n, k = (self.width - 1) * self._count, self._kept()
        ids, rows = self._candidates_of(g, hidden, k)
        scores = self._logits_of(g, rows, hidden, k)
        return [
            g.output(g.reshape(ids, k, n), "candidates"),
            g.output(g.reshape(scores, k, n), "scores"),
        ]

    def _unpack(self, results: list[npt.NDArray[Any]]) -> list[Scores]:
        count, n, k = self._count, self.width - 1, self._kept()
        ids, scores = results[0].reshape(count, n, k), results[1].reshape(count, n, k)
        # Whatever was chosen before, a slot's row is the same.
        return [
            (ids[i], scores[i, 0], np.broadcast_to(scores[i, 1:, None, :], (n - 1, k, k)))
            for i in range(count)
        ]

    def _kept(self) -> int:
        return min(CANDIDATES, self._config.draft_vocab_size or self._config.vocab_size)
