"""The block graph: embedding, layers with injection, head, candidates and transition table.

One graph per sequence, width and padded context length, built once and recomputed. Tensor
shapes in comments are in ggml order (fastest first); w is the width, n = w - 1 the drafted
slots, K the candidates, m the message size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspine.drafters.backbone.chain import walk_chain
from dspine.drafters.backbone.context import ContextCache
from dspine.drafters.base import Draft, Draw
from dspine.drafters.dspine.weights import DrafterWeights, LayerWeights
from dspine.files.schema import DSpineConfig
from dspine.ggml import Backend, Bound, Graph, Tensor

_SPARE = 2
"""Tokens looked at for each candidate that is kept, when the head's product is not exact."""
_UNIT_EPS = 1e-24
"""For rms_norm as an L2 normalisation: below any real mean square, above 0 for a zero row."""


@dataclass(frozen=True, slots=True)
class DraftTrace:
    """What one block computed, for comparison with another implementation. Slots 1 ... n."""

    draft: Draft
    hidden: npt.NDArray[np.float32]
    """(n, H): final-normed states that the head reads."""
    pre_injection: npt.NDArray[np.float32]
    """(n, H): the last layer's output before its injection."""
    candidates: npt.NDArray[np.int32]
    """(n, K) target token ids."""
    first_row: npt.NDArray[np.float32]
    """(K,) scores of slot 1's candidates after the anchor."""
    table: npt.NDArray[np.float32]
    """(n - 1, K, K) scores of slots 2 ... n: [previous candidate][candidate]."""


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


class BlockGraph:
    """Drafts width - 1 tokens over `context_rows` rows of one sequence's cache."""

    def __init__(
        self,
        backend: Backend,
        config: DSpineConfig,
        weights: DrafterWeights,
        cache: ContextCache,
        width: int,
        context_rows: int,
    ) -> None:
        self._config, self._weights, self._cache = config, weights, cache
        self.width = width
        self._key_rows = cache.block_rows + context_rows
        self._offsets = np.arange(width, dtype=np.int32)
        g = self.graph = Graph(backend, max_nodes=96 + 72 * config.num_layers)
        self._input = g.input("ids_positions", "i32", (2 * width,))
        self._mask_inputs = {
            w: g.input(f"mask_{w}", "f16", (self._key_rows, width))
            for w in dict.fromkeys(config.windows)
        }
        self._build(g)
        g.allocate()
        self._ids = g.bind(self._input)
        self._tokens, self._positions = self._ids.array.reshape(2, width)
        self._tokens[:] = config.mask_token_id
        self._masks = [(w, self._host_mask(w)) for w in self._mask_inputs]
        slots, k = width - 1, config.top_k
        self._results = [g.bind(self._candidates), g.bind(self._first_row)]
        self._results += [] if self._table is None else [g.bind(self._table)]
        tables = self._results[2].array if self._table else np.empty(0, dtype=np.float32)
        self._values = (
            self._results[0].array.reshape(slots, k),
            self._results[1].array.reshape(k),
            tables.reshape(slots - 1, k, k),
        )

    # -- running -------------------------------------------------------------------------------

    def draft(self, anchor: int, draw: Draw | None = None) -> Draft:
        """The chain after `anchor` at the cache's next position."""
        return walk_chain(*self._run(anchor), draw)

    def trace(self, anchor: int) -> DraftTrace:
        """The same with everything in between."""
        candidates, first_row, table = self._run(anchor)
        hidden = self.graph.get(self._hidden).reshape(self.width - 1, -1)
        before = self.graph.get(self._before).reshape(self.width - 1, -1)
        draft = walk_chain(candidates, first_row, table)
        return DraftTrace(draft, hidden, before, candidates.copy(), first_row.copy(), table.copy())

    def _run(
        self, anchor: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Candidates, first row and table; the next run writes over them."""
        position = self._cache.length
        self._tokens[0] = anchor
        np.add(self._offsets, position, out=self._positions)
        self._ids.push()
        for window, mask in self._masks:
            self._fill_mask(mask.array[0, 0], window, position)
            mask.push()
        self.graph.compute()
        for result in self._results:
            result.pull()
        return self._values

    def _host_mask(self, window: int | None) -> Bound:
        """(w, rows) with the block's own part filled: slot o sees slots o' <= o, and with a
        window only o - o' < window.
        """
        mask = self.graph.bind(self._mask_inputs[window])
        distance = np.arange(self.width)[:, None] - np.arange(self.width)[None, :]
        seen = (distance >= 0) & (distance < (window or self.width))
        mask.array.fill(-np.inf)
        mask.array[0, 0, :, : self.width] = np.where(seen, 0.0, -np.inf)
        return mask

    def _fill_mask(self, mask: npt.NDArray[np.float16], window: int | None, position: int) -> None:
        """Context part: a row at p is visible to slot o iff p < position, and with a window only
        if position + o - p < window.
        """
        cache = self._cache
        mask[:, cache.block_rows :] = -np.inf
        if window is None or position + self.width <= window:
            for rows in cache.rows_from(0):
                mask[:, rows] = 0.0
            return
        for slot in range(self.width):
            for rows in cache.rows_from(position + slot - window + 1):
                mask[slot, rows] = 0.0

    # -- building ------------------------------------------------------------------------------

    def _build(self, g: Graph) -> None:
        c, weights, width = self._config, self._weights, self.width
        tokens = g.view(self._input, (width,))
        positions = g.view(self._input, (width,), offset=width * 4)
        anchor_code = self._codes(g, g.view(self._input, (1,)))
        h = g.get_rows(weights.embedding, tokens)
        written: _Written | None = None
        for i, layer in enumerate(weights.layers):
            last = i + 1 == c.num_layers
            # Nothing reads slot 0 after the last layer's keys and values.
            out = self._attention(g, i, layer, h, positions, skip=1 if last else 0)
            out = self._feed_forward(g, layer, out)
            drafted = out if last else g.rows(out, 1, width - 1)
            written = self._inject(g, layer, drafted, anchor_code)
            if not last:
                h = g.concat(g.rows(out, 0, 1), written.after, 1)
        assert written is not None  # a drafter has at least one layer
        hidden = g.rms_norm(written.after, c.rms_norm_eps) * weights.output_norm
        self._before = g.output(written.before, "pre_injection")
        self._hidden = g.output(hidden, "hidden")
        self._score(g, written, hidden)

    def _attention(
        self, g: Graph, index: int, layer: LayerWeights, h: Tensor, positions: Tensor, skip: int
    ) -> Tensor:
        """Residual attention of slots skip ... w - 1 over context and block."""
        c, cache, width = self._config, self._cache, self.width
        d, heads, kv_heads = c.head_dim, c.num_heads, c.num_kv_heads
        queries = width - skip
        x = g.rms_norm(h, c.rms_norm_eps) * layer.attn_norm
        qkv = layer.qkv.product(g, x)
        qk = g.view(qkv, (d, heads + kv_heads, width), (d * 4, qkv.nb[1]))
        qk = g.rope_neox(g.rms_norm(qk, c.rms_norm_eps) * layer.qk_norm, positions, c.rope_theta)

        cached_k, cached_v = cache.keys[index], cache.values[index]
        k = g.view(qk, (d, kv_heads, width), qk.nb[1:3], heads * d * 4)
        v = g.view(qkv, (d, kv_heads, width), (d * 4, qkv.nb[1]), (heads + kv_heads) * d * 4)
        g.expand(g.copy(g.permute(k, 0, 2, 1, 3), g.rows(cached_k, 0, width)))
        g.expand(g.copy(g.permute(v, 0, 2, 1, 3), g.rows(cached_v, 0, width)))

        q = g.view(qk, (d, heads, queries), qk.nb[1:3], skip * qk.nb[2])
        mixed = g.attention(
            g.permute(q, 0, 2, 1, 3),
            g.rows(cached_k, 0, self._key_rows),
            g.rows(cached_v, 0, self._key_rows),
            g.rows(self._mask_inputs[c.windows[index]], skip, queries),
            d**-0.5,
        )
        mixed = g.reshape(mixed, heads * d, queries)
        residual = g.rows(h, skip, queries) if skip else h
        return layer.attn_output @ mixed + residual

    def _feed_forward(self, g: Graph, layer: LayerWeights, h: Tensor) -> Tensor:
        x = g.rms_norm(h, self._config.rms_norm_eps) * layer.ffn_norm
        return layer.ffn_down @ g.swiglu(layer.gate_up.product(g, x)) + h

    def _inject(self, g: Graph, layer: LayerWeights, h: Tensor, anchor_code: Tensor) -> _Written:
        """h_i + rms(h_i) * Write(gate_i * Message(pred_i)) for slots 1 ... n, all at once.

        pred_1 is the anchor's code, pred_i the feature of slot i - 1 before this write.
        """
        m, n = self._config.message_size, self.width - 1
        feature = g.rms_norm(layer.readout @ h, _UNIT_EPS)
        maps = self._weights.injection.product(g, g.concat(anchor_code, feature, 1))
        message = g.view(maps, (m, n))
        predecessor = g.view(maps, (m, n), offset=m * 4)
        receiver = g.view(maps, (m, n), offset=2 * m * 4 + maps.nb[1])
        receiver = receiver + self._weights.injection_bias
        strength = g.sqrt(g.mean(g.sqr(h)))
        gated = g.sigmoid(receiver + predecessor) * message
        # The write is linear, so its strength may scale the shorter side.
        after = layer.write @ (gated * strength) + h
        return _Written(h, receiver, strength, after)

    def _score(self, g: Graph, written: _Written, hidden: Tensor) -> None:
        """Candidates of each slot, and S[k][j] = <state of the slot after candidate k of the slot
        before, head row of candidate j>. Slot 1's state after the anchor is `hidden` itself.
        """
        c, weights = self._config, self._weights
        k, size, rest = c.top_k, c.hidden_size, self.width - 2
        ids, rows = self._candidates_of(g, hidden)
        self._candidates = g.output(ids, "candidates")
        self._first_row = g.output(g.rows(rows, 0, k) @ g.rows(hidden, 0, 1), "first_row")
        self._table: Tensor | None = None
        if not rest:
            return
        m, layer = c.message_size, weights.layers[-1]
        codes = self._codes(g, g.view(ids, (k * rest,)))
        maps = weights.injection.product(g, codes, last=2)
        steps = (maps.nb[1], k * maps.nb[1])
        message = g.view(maps, (m, k, rest), steps)
        predecessor = g.view(maps, (m, k, rest), steps, m * 4)
        gate = g.sigmoid(predecessor + self._slots_from_2(g, written.receiver))
        gated = gate * message * self._slots_from_2(g, written.strength)
        write = layer.write @ g.reshape(gated, m, k * rest)
        state = g.reshape(write, size, k, rest) + self._slots_from_2(g, written.before)
        state = g.rms_norm(state, c.rms_norm_eps) * weights.output_norm
        later = g.view(rows, (size, k, rest), (rows.nb[1], k * rows.nb[1]), k * rows.nb[1])
        self._table = g.output(later @ state, "table")

    def _candidates_of(self, g: Graph, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Target ids (K n) of the best K head rows of each slot, and these rows (H, K n).

        A product with anything but f32 rounds `hidden`, which lets the wrong tokens in where the
        last candidates are close. So more of them are taken and the exact rows choose.
        """
        weights, n, k = self._weights, self.width - 1, self._config.top_k
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

    def _slots_from_2(self, g: Graph, x: Tensor) -> Tensor:
        """Columns of slots 2 ... n of (a, n) as (a, 1, n - 1), to repeat over candidates."""
        return g.view(x, (x.ne[0], 1, self.width - 2), (x.nb[1], x.nb[1]), x.nb[1])

    def _codes(self, g: Graph, ids: Tensor) -> Tensor:
        """sqrt(r) * code of each id."""
        return g.get_rows(self._weights.codes, ids) * math.sqrt(self._config.transfer_rank)
