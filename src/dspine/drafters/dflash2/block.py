"""What DFlash2 adds to the block graph: convolutions around every sublayer, and the selector.

Tensor shapes in comments are in ggml order (fastest first); w is the width, n = w - 1 the drafted
slots, K the candidates, H hidden, T taps, G groups of channels, r the selector's rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.drafters.backbone.block import BlockGraph, Scores
from dspine.drafters.backbone.context import ContextCache
from dspine.drafters.backbone.weights import BackboneWeights
from dspine.drafters.dflash2.weights import ConvWeights, DFlash2Weights
from dspine.files.schema import DFlash2Config
from dspine.ggml import Backend, Graph, Tensor

_NODES_PER_TAP = 40
"""Graph nodes of a layer for each tap: both sides of two convolutions, views counted."""


class DFlash2BlockGraph(BlockGraph):
    """The backbone's block with grouped dynamic convolutions and a table from the selector."""

    skips_anchor = False
    """Slot 1 reads slot 0 in the convolution behind the last sublayer."""

    def __init__(
        self,
        backend: Backend,
        config: DFlash2Config,
        weights: BackboneWeights,
        own: DFlash2Weights,
        caches: Sequence[ContextCache],
        width: int,
        context_rows: int,
    ) -> None:
        self._config: DFlash2Config = config
        self._own = own
        self.max_layer_nodes = 96 + _NODES_PER_TAP * config.conv_kernel_size
        super().__init__(backend, config, weights, caches, width, context_rows)

    def _attention(self, g: Graph, index: int, h: Tensor, positions: Tensor, skip: int) -> Tensor:
        conv = self._own.attention[index]
        x = g.rms_norm(h, self._config.rms_norm_eps) * self._weights.layers[index].attn_norm
        by_row = conv.projection @ x
        x = self._convolve(g, x, conv, by_row, 0)
        return self._convolve(g, self._attend(g, index, x, positions, skip), conv, by_row, 1) + h

    def _feed_forward(self, g: Graph, index: int, h: Tensor) -> Tensor:
        conv, layer = self._own.feed_forward[index], self._weights.layers[index]
        x = g.rms_norm(h, self._config.rms_norm_eps) * layer.ffn_norm
        by_row = conv.projection @ x
        x = self._convolve(g, x, conv, by_row, 0)
        return self._convolve(g, self._feed(g, layer, x), conv, by_row, 1) + h

    def _convolve(
        self, g: Graph, x: Tensor, conv: ConvWeights, by_row: Tensor, side: int
    ) -> Tensor:
        """y_t[c] = sum over taps j of (base[c, j, side] + by_row_t[side, j, c div g]) x_{t-j}[c],
        for x (H, w); values before the block are 0. Both sides share `by_row` (2 T G, w).
        """
        c, width = self._config, self.width
        size, taps, groups, members = (
            c.hidden_size,
            c.conv_kernel_size,
            c.conv_groups,
            c.conv_group_size,
        )
        result: Tensor | None = None
        for tap in range(min(taps, width)):
            number = side * taps + tap
            base = g.view(conv.base, (size,), offset=number * size * 4)
            extra = g.view(by_row, (1, groups, width), (4, by_row.nb[1]), number * groups * 4)
            values = x
            if tap:
                before = g.rows(self._own.before_block, 0, tap)
                values = g.concat(before, g.rows(x, 0, width - tap), 1)
            grouped = g.reshape(values, members, groups, width) * extra
            term = values * base + g.reshape(grouped, size, width)
            result = term if result is None else result + term
        assert result is not None  # a kernel has at least one tap
        return result

    def _score(self, g: Graph, hidden: Tensor) -> list[Tensor]:
        """S[p][c] = logit of c + sum over j of predecessor[p]_j gate_j successor[c]_j, for the
        candidates c of a slot after the anchor, or after those of the slot before.
        """
        c, own, n, k = self._config, self._own, self.width - 1, self._config.top_k
        rank, rest = c.selector_rank, n - 1
        ids, rows = self._candidates_of(g, hidden, k)
        logits = self._logits_of(g, rows, hidden, k)
        gate = own.selector @ hidden
        successor = g.get_rows(own.successors, ids)
        anchor = g.get_rows(own.predecessors, self._anchors) * g.rows(gate, 0, 1)
        first = g.rows(successor, 0, k) @ anchor + g.view(logits, (k, 1))
        outputs = [g.output(ids, "candidates"), g.output(first, "first_row")]
        if not rest:
            return outputs
        before = g.get_rows(own.predecessors, g.view(ids, (k * rest,)))
        before = g.reshape(before, rank, k, rest)
        before = before * g.view(gate, (rank, 1, rest), (gate.nb[1], gate.nb[1]), gate.nb[1])
        step = k * successor.nb[1]
        after = g.view(successor, (rank, k, rest), (successor.nb[1], step), step)
        later = g.view(logits, (k, 1, rest), (k * 4, k * 4), k * 4)
        return [*outputs, g.output(after @ before + later, "table")]

    def _unpack(self, results: list[npt.NDArray[Any]]) -> list[Scores]:
        n, k = self.width - 1, self._config.top_k
        table = results[2] if n > 1 else np.empty(0, dtype=np.float32)
        return [(results[0].reshape(n, k), results[1].reshape(k), table.reshape(n - 1, k, k))]
