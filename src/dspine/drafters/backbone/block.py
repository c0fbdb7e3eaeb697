"""The block graph: embedding, layers, head and candidates; each kind adds its own to it.

One graph per sequences, width and padded context length, built once and recomputed. A graph of
several sequences makes a block for each: products take all rows at once, attention looks at each
sequence's own context. Tensor shapes in comments are in ggml order (fastest first); w is the
width, n = w - 1 the drafted slots, K the candidates, S the sequences (1 where none is named).
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dspine.drafters.backbone.chain import Chain
from dspine.drafters.backbone.context import ContextCache
from dspine.drafters.backbone.weights import BackboneWeights, LayerWeights
from dspine.drafters.base import Draft, Draw
from dspine.files.schema import DrafterConfig
from dspine.ggml import Backend, Bound, Graph, Tensor

_SPARE = 3
"""Tokens looked at for each candidate that is kept, when the head's product is not exact."""

_FEW_CHANGES = 64
"""Rows of the context up to which a mask is changed row by row."""

_HIDDEN, _VISIBLE = 0xFC00, 0
"""Minus infinity and zero as bits of a 16-bit float."""


@dataclass(frozen=True, slots=True)
class DraftTrace:
    """What one block computed, for comparison with another implementation. Slots 1 ... n."""

    draft: Draft
    hidden: npt.NDArray[np.float32]
    """(n, H): final-normed states that the head reads."""
    candidates: npt.NDArray[np.int32]
    """(n, K) target token ids."""
    first_row: npt.NDArray[np.float32]
    """(K,) scores of slot 1's candidates after the anchor."""
    table: npt.NDArray[np.float32]
    """(n - 1, K, K) scores of slots 2 ... n: [previous candidate][candidate]."""


Scores: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]
"""Candidates, first row and table as `Chain` takes them."""
_MaskKind: TypeAlias = tuple[int | None, bool]
"""Window and causality of a layer."""


class BlockGraph(ABC):
    """Drafts width - 1 tokens over `context_rows` rows of each sequence's cache."""

    max_layer_nodes = 72
    """Graph nodes that a layer may take."""
    skips_anchor = True
    """Whether the last layer may leave out slot 0, whose output is no draft."""

    def __init__(
        self,
        backend: Backend,
        config: DrafterConfig,
        weights: BackboneWeights,
        caches: Sequence[ContextCache],
        width: int,
        context_rows: int,
    ) -> None:
        self._config, self._weights, self._caches = config, weights, tuple(caches)
        self.width = width
        self._count = count = len(self._caches)
        self._key_rows = caches[0].block_rows + context_rows
        self._numbers = struct.Struct(f"{(2 * width + 3) * count}i")
        self._masked = (config.mask_token_id,) * (width - 1)
        self._kinds: list[_MaskKind] = list(zip(config.windows, config.causal, strict=True))
        nodes = 96 + (self.max_layer_nodes + 16 * (count - 1)) * config.num_layers
        g = self.graph = Graph(backend, max_nodes=nodes)
        self._input = g.input("ids_positions_ends", "i32", ((2 * width + 3) * count,))
        self._mask_inputs = {
            (kind, index): g.input(
                f"mask_{kind[0]}_{kind[1]}_{index}", "f16", (self._key_rows, width)
            )
            for kind in dict.fromkeys(self._kinds)
            for index in range(count)
        }
        outputs = self._build(g)
        g.allocate()
        self._ids = g.bind(self._input)
        self._id_bytes = self._ids.array.data.cast("B")
        self._masks = [
            _Mask(self._host_mask(kind, tensor), kind[0], self._caches[index], width)
            for (kind, index), tensor in self._mask_inputs.items()
        ]
        self._results = [g.bind(output) for output in outputs]
        found = self._unpack([result.array for result in self._results])
        self._chains = [Chain(*scores) for scores in found]

    @abstractmethod
    def _score(self, g: Graph, hidden: Tensor) -> list[Tensor]:
        """Outputs that `_unpack` understands, from the final-normed states (H, n S)."""

    @abstractmethod
    def _unpack(self, results: list[npt.NDArray[Any]]) -> list[Scores]:
        """Views of the outputs by sequence, in the order of `_score`."""

    # -- running -------------------------------------------------------------------------------

    def draft(self, anchor: int, draw: Draw | None = None, lead: tuple[int, ...] = ()) -> Draft:
        """The chain after `anchor` at the cache's next position, of one sequence; also the one
        after a lead, of a kind that follows one.
        """
        self._run((anchor,), (lead,))
        return self._walk(0, draw, lead)

    def draft_all(
        self,
        anchors: Sequence[int],
        draws: Sequence[Draw | None],
        leads: Sequence[tuple[int, ...]],
    ) -> list[Draft]:
        """The same for all sequences."""
        self._run(anchors, leads)
        pairs = zip(draws, leads, strict=True)
        return [self._walk(index, draw, lead) for index, (draw, lead) in enumerate(pairs)]

    def _walk(self, index: int, draw: Draw | None, _lead: tuple[int, ...]) -> Draft:
        """One sequence's chain; what follows a lead is added by the kinds that can follow one."""
        return self._chains[index].walk(draw)

    def trace(self, anchor: int) -> DraftTrace:
        """A draft of one sequence with everything in between."""
        self._run((anchor,), ((),))
        chain = self._chains[0]
        hidden = self.graph.get(self._hidden).reshape(self.width - 1, -1)
        return DraftTrace(
            chain.walk(),
            hidden,
            chain.candidates.copy(),
            chain.first_row.copy(),
            chain.table.copy(),
        )

    def _run(self, anchors: Sequence[int], leads: Sequence[tuple[int, ...]]) -> None:
        """Write what the walks need; the next run writes over it."""
        ids: list[int] = []
        positions: list[int] = []
        # The token before the slot after the lead, and the place of that slot among all of them.
        ends = [(anchor, *lead)[-1] for anchor, lead in zip(anchors, leads, strict=True)]
        slots = self.width - 1
        places = [index * slots + len(lead) for index, lead in enumerate(leads)]
        for anchor, cache in zip(anchors, self._caches, strict=True):
            ids += (anchor, *self._masked)
            positions += range(cache.length, cache.length + self.width)
        self._numbers.pack_into(self._id_bytes, 0, *ids, *positions, *anchors, *ends, *places)
        self._ids.push()
        for mask in self._masks:
            mask.show()
        self.graph.compute()
        for result in self._results:
            result.pull()

    def _host_mask(self, kind: _MaskKind, tensor: Tensor) -> Bound:
        """(w, rows) with the block's own part filled: slot o sees slots o' <= o, or all of them
        where attention is not causal, and with a window only o - o' < window.
        """
        window, causal = kind
        mask = self.graph.bind(tensor)
        distance = np.arange(self.width)[:, None] - np.arange(self.width)[None, :]
        seen = (distance >= (0 if causal else -self.width)) & (distance < (window or self.width))
        mask.array.fill(-np.inf)
        mask.array[0, 0, :, : self.width] = np.where(seen, 0.0, -np.inf)
        return mask

    # -- building ------------------------------------------------------------------------------

    def _build(self, g: Graph) -> list[Tensor]:
        c, weights, rows = self._config, self._weights, self.width * self._count
        tokens = g.view(self._input, (rows,))
        positions = g.view(self._input, (rows,), offset=rows * 4)
        self._anchors, self._ends, self._places = (
            g.view(self._input, (self._count,), offset=(2 * rows + part * self._count) * 4)
            for part in range(3)
        )
        h = g.get_rows(weights.embedding, tokens)
        if c.embedding_scale != 1.0:
            h = h * c.embedding_scale
        for i in range(c.num_layers):
            # Nothing reads slot 0 after the last layer's keys and values.
            skip = 1 if self.skips_anchor and i + 1 == c.num_layers else 0
            h = self._layer(g, i, h, positions, skip)
        drafted = h if h.ne[1] < rows else self._slots(g, h, 1)
        hidden = g.rms_norm(drafted, c.rms_norm_eps) * weights.output_norm
        self._hidden = g.output(hidden, "hidden")
        return self._score(g, hidden)

    def _slots(self, g: Graph, x: Tensor, first: int) -> Tensor:
        """Columns of slots first ... w - 1 of every sequence, contiguous: (a, (w - first) S)."""
        left = self.width - first
        if not first:
            return x
        if self._count == 1:
            return g.rows(x, first, left)
        part = g.view(
            x, (x.ne[0], left, self._count), (x.nb[1], self.width * x.nb[1]), first * x.nb[1]
        )
        return g.reshape(g.cont(part), x.ne[0], left * self._count)

    def _layer(self, g: Graph, index: int, h: Tensor, positions: Tensor, skip: int) -> Tensor:
        """States of slots skip ... w - 1 of every sequence after a layer."""
        return self._feed_forward(g, index, self._attention(g, index, h, positions, skip))

    def _attention(self, g: Graph, index: int, h: Tensor, positions: Tensor, skip: int) -> Tensor:
        """Residual attention of slots skip ... w - 1 over context and block."""
        layer = self._weights.layers[index]
        x = g.rms_norm(h, self._config.rms_norm_eps) * layer.attn_norm
        out = self._attend(g, index, x, positions, skip)
        return out + self._slots(g, h, skip)

    def _attend(self, g: Graph, index: int, x: Tensor, positions: Tensor, skip: int) -> Tensor:
        """Attention of normed states x, without the residual."""
        c, width, rows = self._config, self.width, self.width * self._count
        d, heads, kv_heads = c.head_dim, c.num_heads, c.num_kv_heads
        layer, queries = self._weights.layers[index], width - skip
        qkv = layer.qkv.product(g, x)
        qk = g.view(qkv, (d, heads + kv_heads, rows), (d * 4, qkv.nb[1]))
        qk = g.rms_norm(qk, c.rms_norm_eps) * layer.qk_norm
        qk = g.rope_neox(qk, positions, c.rope_theta, c.rotary_size)
        mixed: Tensor | None = None
        for number, cache in enumerate(self._caches):
            cached_k, cached_v = cache.keys[index], cache.values[index]
            own_qk, own_v = number * width * qk.nb[2], number * width * qkv.nb[1]
            k = g.view(qk, (d, kv_heads, width), qk.nb[1:3], own_qk + heads * d * 4)
            v_place = own_v + (heads + kv_heads) * d * 4
            v = g.view(qkv, (d, kv_heads, width), (d * 4, qkv.nb[1]), v_place)
            g.expand(g.copy(g.permute(k, 0, 2, 1, 3), g.rows(cached_k, 0, width)))
            g.expand(g.copy(g.permute(v, 0, 2, 1, 3), g.rows(cached_v, 0, width)))
            q = g.view(qk, (d, heads, queries), qk.nb[1:3], own_qk + skip * qk.nb[2])
            own = g.attention(
                g.permute(q, 0, 2, 1, 3),
                g.rows(cached_k, 0, self._key_rows),
                g.rows(cached_v, 0, self._key_rows),
                g.rows(self._mask_inputs[self._kinds[index], number], skip, queries),
                d**-0.5,
                layer.sinks,
            )
            own = g.reshape(own, heads * d, queries)
            mixed = own if mixed is None else g.concat(mixed, own, 1)
        assert mixed is not None  # a graph has at least one sequence
        out = layer.attn_output @ mixed
        return out if c.value_scale == 1.0 else out * c.value_scale

    def _feed_forward(self, g: Graph, index: int, h: Tensor) -> Tensor:
        layer = self._weights.layers[index]
        x = g.rms_norm(h, self._config.rms_norm_eps) * layer.ffn_norm
        return self._feed(g, layer, x) + h

    def _feed(self, g: Graph, layer: LayerWeights, x: Tensor) -> Tensor:
        """SwiGLU of normed states x, without the residual."""
        return layer.ffn_down @ g.swiglu(layer.gate_up.product(g, x))

    def _candidates_of(self, g: Graph, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Target ids (K n S) of the best K head rows of each slot, and these rows (H, K n S).

        A product with anything but f32 rounds `hidden`, which lets the wrong tokens in where the
        last candidates are close. So more of them are taken and the exact rows choose.
        """
        weights, n = self._weights, (self.width - 1) * self._count
        is_exact = weights.head.type_name == "f32"
        most = k if is_exact else min(_SPARE * k, weights.head.ne[1])
        chosen = g.reshape(g.top_k(weights.head @ hidden, most), most * n)
        ids = chosen
        if weights.target_ids is not None:
            ids = g.reshape(g.get_rows(weights.target_ids, chosen), most * n)
        rows = g.get_rows(weights.scoring, ids if weights.scoring_by_id else chosen)
        if most == k:
            return ids, rows
        rows = g.reshape(rows, self._config.hidden_size, most, n)
        scores = rows @ g.reshape(hidden, self._config.hidden_size, 1, n)
        best = g.top_k(g.reshape(scores, most, n), k)
        ids = g.get_rows(g.reshape(ids, 1, most, n), best)
        return g.reshape(ids, k * n), g.reshape(
            g.get_rows(rows, best), self._config.hidden_size, k * n
        )

    def _logits_of(self, g: Graph, rows: Tensor, hidden: Tensor, k: int) -> Tensor:
        """(K, 1, n S): each slot's exact logits of its candidates, whose head rows are (H, K n S),
        scaled and capped as the file says; neither changes their order.
        """
        c, n = self._config, (self.width - 1) * self._count
        size, cap = c.hidden_size, c.logit_softcap
        logits = g.reshape(rows, size, k, n) @ g.reshape(hidden, size, 1, n)
        factor = c.logit_scale / (cap or 1.0)
        if factor != 1.0:
            logits = logits * factor
        return logits if cap is None else g.tanh(logits) * cap


class _Mask:
    """The context part of one mask: a row at p is visible to slot o iff p < position, and with a
    window only if position + o - p < window.

    From block to block few rows change, and only those are written.
    """

    def __init__(self, bound: Bound, window: int | None, cache: ContextCache, width: int) -> None:
        """`bound` (w, rows) shows none of the context."""
        self._bound, self._window, self._cache = bound, window, cache
        self._length = bound.array.shape[-1]
        self._cells = bound.array.reshape(-1).data.cast("B").cast("H")
        self._column = np.full(width, _VISIBLE, np.uint16).data.cast("B").cast("H")
        """What every slot sees, as a column of the cells."""
        self._firsts, self._end = [0] * width, 0
        """First positions that the slots see, and the common end."""

    def show(self) -> None:
        """Make it that of a block at the cache's next position."""
        cache, window, end = self._cache, self._window, self._end
        start, position = cache.start, cache.length
        lows = [start] * len(self._firsts)
        if window is not None and position + len(lows) - window > start:
            lows = [max(start, position + slot - window + 1) for slot in range(len(lows))]
        if end <= position <= end + _FEW_CHANGES and lows[-1] <= end:
            self._change(lows, position)
        else:
            for slot, low in enumerate(lows):
                self._write_row(slot, low)
        self._firsts, self._end = lows, position
        self._bound.push()

    def _change(self, lows: list[int], position: int) -> None:
        """Show the positions up to `position` that are new, and hide those before `lows`."""
        cells, capacity, length = self._cells, self._cache.capacity, self._length
        context = self._cache.block_rows
        if lows != self._firsts:
            for slot, (first, low) in enumerate(zip(self._firsts, lows, strict=True)):
                place = slot * length + context
                for gone in range(first, low):
                    cells[place + gone % capacity] = _HIDDEN
                for seen in range(low, first):
                    cells[place + seen % capacity] = _VISIBLE
        for new in range(self._end, position):
            cells[context + new % capacity :: length] = self._column

    def _write_row(self, slot: int, first: int) -> None:
        row = self._bound.array[0, 0, slot]
        row[self._cache.block_rows :] = -np.inf
        for rows in self._cache.rows_from(first):
            row[rows] = 0.0
