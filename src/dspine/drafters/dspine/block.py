"""What DSpine adds to the block graph: the injection after every layer, and the transition table.

Tensor shapes in comments are in ggml order (fastest first); w is the width, n = w - 1 the drafted
slots, K the candidates, m the message size, S the sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.drafters.backbone.block import BlockGraph, DraftTrace, Scores
from dspine.drafters.backbone.chain import Chain
from dspine.drafters.backbone.context import ContextCache
from dspine.drafters.backbone.weights import BackboneWeights
from dspine.drafters.base import Draft, Draw
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
    """(H, n S) states before the write."""
    receiver: Tensor
    """(m, n S) receiver gate plus bias."""
    strength: Tensor
    """(1, n S) root mean square of each state."""
    after: Tensor
    """(H, n S) states after the write."""


class DSpineBlockGraph(BlockGraph):
    """The backbone's block with adjacent injection."""

    def __init__(
        self,
        backend: Backend,
        config: DSpineConfig,
        weights: BackboneWeights,
        injection: InjectionWeights,
        caches: Sequence[ContextCache],
        width: int,
        context_rows: int,
    ) -> None:
        self._config: DSpineConfig = config
        self._injection = injection
        self._led: dict[tuple[int, int], Chain] = {}
        """Chains after a lead, by sequence and the lead's length."""
        super().__init__(backend, config, weights, caches, width, context_rows)

    def trace(self, anchor: int) -> DSpineTrace:
        """The draft with everything in between."""
        trace = super().trace(anchor)
        before = self.graph.get(self._before).reshape(self.width - 1, -1)
        return DSpineTrace(
            trace.draft, trace.hidden, trace.candidates, trace.first_row, trace.table, before
        )

    def _build(self, g: Graph) -> list[Tensor]:
        self._anchor_code: Tensor | None = None
        return super()._build(g)

    def _layer(self, g: Graph, index: int, h: Tensor, positions: Tensor, skip: int) -> Tensor:
        h = super()._layer(g, index, h, positions, skip)
        last = index + 1 == self._config.num_layers
        self._written = self._inject(g, index, h if last else self._slots(g, h, 1))
        if last:
            return self._written.after
        size, count, width = h.ne[0], self._count, self.width
        anchors = g.view(h, (size, 1, count), (h.nb[1], width * h.nb[1]))
        drafted = g.reshape(self._written.after, size, width - 1, count)
        return g.reshape(g.concat(anchors, drafted, 1), size, width * count)

    def _inject(self, g: Graph, index: int, h: Tensor) -> _Written:
        """h_i + rms(h_i) * Write(gate_i * Message(pred_i)) for slots 1 ... n, all at once.

        pred_1 is the anchor's code, pred_i the feature of slot i - 1 before this write.
        """
        c, n, count, injection = self._config, self.width - 1, self._count, self._injection
        m, rank = c.message_size, c.transfer_rank
        if self._anchor_code is None:
            self._anchor_code = g.reshape(self._codes(g, self._anchors), rank, 1, count)
        feature = g.rms_norm(injection.readouts[index] @ h, _UNIT_EPS)
        known = g.concat(self._anchor_code, g.reshape(feature, rank, n, count), 1)
        maps = injection.shared.product(g, g.reshape(known, rank, (n + 1) * count))
        steps = (maps.nb[1], (n + 1) * maps.nb[1])
        message = g.view(maps, (m, n, count), steps)
        predecessor = g.view(maps, (m, n, count), steps, m * 4)
        receiver = g.view(maps, (m, n, count), steps, 2 * m * 4 + maps.nb[1])
        receiver = receiver + injection.bias
        strength = g.sqrt(g.mean(g.sqr(h)))
        gated = g.sigmoid(receiver + predecessor) * message
        gated = g.reshape(gated, m, n * count)
        # The write is linear, so its strength may scale the shorter side.
        after = injection.writes[index] @ (gated * strength) + h
        return _Written(h, g.reshape(receiver, m, n * count), strength, after)

    def _score(self, g: Graph, hidden: Tensor) -> list[Tensor]:
        """Candidates of each slot, and S[k][j] = <state of the slot after candidate k of the slot
        before, head row of candidate j>. Slot 1's state after the anchor is `hidden` itself.
        """
        c, weights, written = self._config, self._weights, self._written
        k, size, n, rest, count = (
            c.top_k,
            c.hidden_size,
            self.width - 1,
            self.width - 2,
            self._count,
        )
        ids, rows = self._candidates_of(g, hidden, k)
        self._before = g.output(written.before, "pre_injection")
        first = g.view(rows, (size, k, count), (rows.nb[1], n * k * rows.nb[1]))
        states = g.view(hidden, (size, 1, count), (hidden.nb[1], n * hidden.nb[1]))
        outputs = [g.output(ids, "candidates"), g.output(first @ states, "first_row")]
        if not rest:
            return outputs
        m = c.message_size
        known = g.view(ids, (k * rest, count), (n * k * 4,))
        if count > 1:
            known = g.cont(known)
        codes = self._codes(g, g.reshape(known, k * rest * count))
        maps = self._injection.shared.product(g, codes, last=2)
        shape = (m, k, rest, count)
        steps = (maps.nb[1], k * maps.nb[1], k * rest * maps.nb[1])
        message = g.view(maps, shape, steps)
        predecessor = g.view(maps, shape, steps, m * 4)
        gate = g.sigmoid(predecessor + self._slots_from_2(g, written.receiver))
        gated = gate * message * self._slots_from_2(g, written.strength)
        write = self._injection.writes[-1] @ g.reshape(gated, m, k * rest * count)
        state = g.reshape(write, size, k, rest, count) + self._slots_from_2(g, written.before)
        state = g.rms_norm(state, c.rms_norm_eps) * weights.output_norm
        block = k * rows.nb[1]
        later = g.view(rows, (size, k, rest, count), (rows.nb[1], block, n * block), block)
        outputs.append(g.output(later @ state, "table"))
        # Also where no lead comes: one row more costs less than a second graph.
        outputs.append(g.output(self._led_row(g, rows), "led_row"))
        return outputs

    def _led_row(self, g: Graph, rows: Tensor) -> Tensor:
        """(K, 1, S): the scores of one slot's candidates, whose head rows are among (H, K n S),
        after a token that need not be a candidate of the slot before.
        """
        c, count, written, places = self._config, self._count, self._written, self._places
        k, m, size = c.top_k, c.message_size, c.hidden_size
        maps = self._injection.shared.product(g, self._codes(g, self._ends), last=2)
        message = g.view(maps, (m, count), maps.nb[1:2])
        predecessor = g.view(maps, (m, count), maps.nb[1:2], m * 4)
        gate = g.sigmoid(predecessor + g.get_rows(written.receiver, places))
        gated = gate * message * g.get_rows(written.strength, places)
        state = self._injection.writes[-1] @ gated + g.get_rows(written.before, places)
        state = g.rms_norm(state, c.rms_norm_eps) * self._weights.output_norm
        slots = g.reshape(rows, size * k, (self.width - 1) * count)
        own = g.reshape(g.get_rows(slots, places), size, k, count)
        return own @ g.reshape(state, size, 1, count)

    def _walk(self, index: int, draw: Draw | None, lead: tuple[int, ...]) -> Draft:
        draft = super()._walk(index, draw, lead)
        if not lead:
            return draft
        count = len(lead)
        led = self._led.get((index, count))
        if led is None:
            # (K,) scores of the candidates of the slot after the lead.
            row = self._results[3].array.reshape(self._count, -1)[index]
            led = self._led[index, count] = self._chains[index].after(count, row)
        return draft._replace(led=led.walk(draw and draw.after(count)))

    def _unpack(self, results: list[npt.NDArray[Any]]) -> list[Scores]:
        count, n, k = self._count, self.width - 1, self._config.top_k
        table = results[2] if n > 1 else np.empty(0, dtype=np.float32)
        candidates, first = results[0].reshape(count, n, k), results[1].reshape(count, k)
        return list(zip(candidates, first, table.reshape(count, n - 1, k, k), strict=True))

    def _slots_from_2(self, g: Graph, x: Tensor) -> Tensor:
        """Columns of slots 2 ... n of (a, n S) as (a, 1, n - 1, S), to repeat over candidates."""
        step = x.nb[1]
        shape, steps = (
            (x.ne[0], 1, self.width - 2, self._count),
            (step, step, (self.width - 1) * step),
        )
        return g.view(x, shape, steps, step)

    def _codes(self, g: Graph, ids: Tensor) -> Tensor:
        """sqrt(r) * code of each id."""
        return g.get_rows(self._injection.codes, ids) * math.sqrt(self._config.transfer_rank)
