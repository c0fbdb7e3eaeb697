"""What DSpine adds to the block graph: the injection after every layer, and the transition table.

Tensor shapes in comments are in ggml order (fastest first); w is the width, n = w - 1 the drafted
slots, K the candidates, m the message size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.drafters.backbone.block import BlockGraph, DraftTrace, Scores
from dspine.drafters.backbone.context import ContextCache
from dspine.drafters.backbone.weights import BackboneWeights
from dspine.drafters.dspine.weights import InjectionWeights
from dspine.files.schema import DSpineConfig
from dspine.ggml import Backend, Graph, Tensor

_UNIT_EPS = 1e-24
"""For rms_norm as an L2 normalisation: below any real mean square, above 0 for a zero row."""


@dataclass(frozen=True, slots=True)
class DSpineTrace(DraftTrace):
    """A trace with what the injection of the last layer was given."""

    pre_injection: npt.NDArray[np.float32]
    """(n, H): the last layer's output before its injection."""


@dataclass(frozen=True, slots=True)
class _Written:
    """What the refinement needs from the last layer's injection."""

    before: Tensor
    """(H, n) states before the write."""
    receiver: Tensor
    """(m, n) receiver gate plus bias."""
    strength: Tensor
    """(1, n) root mean square of each state."""
    after: Tensor
    """(H, n) states after the write."""


class DSpineBlockGraph(BlockGraph):
    """The backbone's block with adjacent injection."""

    def __init__(
        self,
        backend: Backend,
        config: DSpineConfig,
        weights: BackboneWeights,
        injection: InjectionWeights,
        cache: ContextCache,
        width: int,
        context_rows: int,
    ) -> None:
        self._config: DSpineConfig = config
        self._injection = injection
        super().__init__(backend, config, weights, cache, width, context_rows)

    def trace(self, anchor: int) -> DSpineTrace:
        """The draft with everything in between."""
        trace = super().trace(anchor)
        before = self.graph.get(self._before).reshape(self.width - 1, -1)
        return DSpineTrace(
            trace.draft, trace.hidden, trace.candidates, trace.first_row, trace.table, before
        )

    def _build(self, g: Graph) -> list[Tensor]:
        self._anchor_code = self._codes(g, g.view(self._input, (1,)))
        return super()._build(g)

    def _layer(self, g: Graph, index: int, h: Tensor, positions: Tensor, skip: int) -> Tensor:
        h = super()._layer(g, index, h, positions, skip)
        last = index + 1 == self._config.num_layers
        self._written = self._inject(g, index, h if last else g.rows(h, 1, self.width - 1))
        return self._written.after if last else g.concat(g.rows(h, 0, 1), self._written.after, 1)

    def _inject(self, g: Graph, index: int, h: Tensor) -> _Written:
        """h_i + rms(h_i) * Write(gate_i * Message(pred_i)) for slots 1 ... n, all at once.

        pred_1 is the anchor's code, pred_i the feature of slot i - 1 before this write.
        """
        m, n, injection = self._config.message_size, self.width - 1, self._injection
        feature = g.rms_norm(injection.readouts[index] @ h, _UNIT_EPS)
        maps = injection.shared.product(g, g.concat(self._anchor_code, feature, 1))
        message = g.view(maps, (m, n))
        predecessor = g.view(maps, (m, n), offset=m * 4)
        receiver = g.view(maps, (m, n), offset=2 * m * 4 + maps.nb[1])
        receiver = receiver + injection.bias
        strength = g.sqrt(g.mean(g.sqr(h)))
        gated = g.sigmoid(receiver + predecessor) * message
        # The write is linear, so its strength may scale the shorter side.
        after = injection.writes[index] @ (gated * strength) + h
        return _Written(h, receiver, strength, after)

    def _score(self, g: Graph, hidden: Tensor) -> list[Tensor]:
        """Candidates of each slot, and S[k][j] = <state of the slot after candidate k of the slot
        before, head row of candidate j>. Slot 1's state after the anchor is `hidden` itself.
        """
        c, weights, written = self._config, self._weights, self._written
        k, size, rest = c.top_k, c.hidden_size, self.width - 2
        ids, rows = self._candidates_of(g, hidden, k)
        self._before = g.output(written.before, "pre_injection")
        first_row = g.rows(rows, 0, k) @ g.rows(hidden, 0, 1)
        outputs = [g.output(ids, "candidates"), g.output(first_row, "first_row")]
        if not rest:
            return outputs
        m = c.message_size
        codes = self._codes(g, g.view(ids, (k * rest,)))
        maps = self._injection.shared.product(g, codes, last=2)
        steps = (maps.nb[1], k * maps.nb[1])
        message = g.view(maps, (m, k, rest), steps)
        predecessor = g.view(maps, (m, k, rest), steps, m * 4)
        gate = g.sigmoid(predecessor + self._slots_from_2(g, written.receiver))
        gated = gate * message * self._slots_from_2(g, written.strength)
        write = self._injection.writes[-1] @ g.reshape(gated, m, k * rest)
        state = g.reshape(write, size, k, rest) + self._slots_from_2(g, written.before)
        state = g.rms_norm(state, c.rms_norm_eps) * weights.output_norm
        later = g.view(rows, (size, k, rest), (rows.nb[1], k * rows.nb[1]), k * rows.nb[1])
        return [*outputs, g.output(later @ state, "table")]

    def _unpack(self, results: list[npt.NDArray[Any]]) -> Scores:
        slots, k = self.width - 1, self._config.top_k
        table = results[2] if slots > 1 else np.empty(0, dtype=np.float32)
        return (
            results[0].reshape(slots, k),
            results[1].reshape(k),
            table.reshape(slots - 1, k, k),
        )

    def _slots_from_2(self, g: Graph, x: Tensor) -> Tensor:
        """Columns of slots 2 ... n of (a, n) as (a, 1, n - 1), to repeat over candidates."""
        return g.view(x, (x.ne[0], 1, self.width - 2), (x.nb[1], x.nb[1]), x.nb[1])

    def _codes(self, g: Graph, ids: Tensor) -> Tensor:
        """sqrt(r) * code of each id."""
        return g.get_rows(self._injection.codes, ids) * math.sqrt(self._config.transfer_rank)
