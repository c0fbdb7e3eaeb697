"""Context K/V: what the drafter remembers of the confirmed tokens of one sequence.

Keys and values of a layer depend only on the target's features and the token's position, so
they are computed once per confirmed token and kept. A sequence's cache has, per layer, rows
for the current block, then the context rows (position p in row p modulo `capacity`), then one
scratch row that takes the padding of a chunk.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.drafters.backbone.weights import BackboneWeights
from dspine.drafters.base import Features
from dspine.errors import CapacityError, UsageError
from dspine.files.schema import DrafterConfig
from dspine.ggml import Backend, Graph, Tensor, WeightStore

CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32, 64, 128, 256)
"""Rows per context graph: exact for what a step adds, coarse for prompts."""
_SLACK = 128
"""Extra ring rows at least, so that a short rollback does not cost the whole window; a quarter
of the window where that is more, so that neither does an answer that is given again."""
_ALIGN = 32
"""Row counts are multiples of this, which suits the vector kernels."""


def ring_capacity(config: DrafterConfig, n_ctx: int) -> int:
    """Context rows a sequence needs: the largest window, or n_ctx when a layer sees everything."""
    window = config.context_window
    rows = n_ctx if window is None else min(n_ctx, window - 1 + max(_SLACK, window // 4))
    return -(-rows // _ALIGN) * _ALIGN


class ContextCache:
    """K/V of one sequence, and which position each row holds."""

    def __init__(
        self, backend: Backend, config: DrafterConfig, n_ctx: int, cache_type: str = "f16"
    ) -> None:
        self.config, self._window = config, config.context_window
        self.block_rows = -(-config.block_size // _ALIGN) * _ALIGN
        self.capacity = ring_capacity(config, n_ctx)
        self.rows = self.block_rows + self.capacity + 1
        self.start = 0
        """First position that is present."""
        self.length = 0
        """Positions start ... length - 1 are present."""
        self.store = WeightStore(backend, capacity=2 * config.num_layers)
        width = config.num_kv_heads
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for i in range(config.num_layers):
            shape = (config.head_dim, self.rows, width)
            self.keys.append(self.store.declare(f"k{i}", cache_type, shape))
            self.values.append(self.store.declare(f"v{i}", cache_type, shape))
        self._type = np.dtype(np.float16 if cache_type == "f16" else np.float32)
        try:
            self.store.allocate()
        except CapacityError as error:
            raise CapacityError(
                f"the drafter's context of {self.capacity} positions does not fit into memory "
                f"({error.args[0].partition(':')[0]}): choose a smaller context (-c)"
            ) from error
        # Masked rows are multiplied by 0, which only helps when they hold numbers.
        self.store.clear()

    @property
    def used_rows(self) -> int:
        """Context rows up to the last one that was ever used since the cache was empty."""
        return min(self.capacity, self.length)

    def prepare(self, position: int, count: int) -> int:
        """Make room for positions position ... position + count - 1, forgetting what they
        replace. Returns the first of them that the ring will keep. UsageError or CapacityError
        when they do not fit.
        """
        window = self._window
        end = position + count
        if position < 0:
            raise UsageError(f"context position {position} is negative: positions start at 0")
        if window is None and position > self.length:
            raise UsageError(
                f"context rows start at position {position}, but only {self.length} are "
                f"present and a full-attention layer sees all: add the rows between first"
            )
        if end > self.capacity and (window is None or self.capacity < window - 1):
            raise CapacityError(
                f"context position {end - 1} is outside of the drafter's {self.capacity} "
                f"rows: raise n_ctx"
            )
        self.truncate(position)
        first = max(position, end - self.capacity)
        if first > self.length:
            self.start = self.length = first
        return first

    def hold(self, position: int, count: int) -> None:
        """Rows of positions position ... position + count - 1 now have their K/V."""
        self.length = position + count
        self.start = max(self.start, self.length - self.capacity)

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on."""
        if length >= self.length:
            return
        if length <= self.start:
            self.start = self.length = 0
        else:
            self.length = length

    def empty(self) -> None:
        """Forget everything, and what was written."""
        self.start = self.length = 0
        self.store.clear()

    def rows_from(self, position: int) -> tuple[slice, ...]:
        """Cache rows of the positions that are present from `position` on."""
        first, capacity, row = max(position, self.start), self.capacity, self.block_rows
        if first >= self.length:
            return ()
        begin, end = first % capacity, (self.length - 1) % capacity + 1
        if begin < end:
            return (slice(row + begin, row + end),)
        return slice(row, row + end), slice(row + begin, row + capacity)

    def read(self) -> bytes:
        """K, then V, of the positions that are present: (layers, heads, positions, head size)."""
        rows = self._rows(self.start, self.length)
        kept = [self._array(tensor)[:, rows] for tensor in (*self.keys, *self.values)]
        return np.stack(kept).tobytes()

    def fill(self, start: int, length: int, data: bytes) -> bool:
        """Put what `read` gave for positions start ... length - 1 into the empty cache.

        False, and still empty, for positions that do not fit or data of another size.
        """
        c, count = self.config, length - start
        shape = (2 * c.num_layers, c.num_kv_heads, count, c.head_dim)
        if not 0 <= start < length or count > self.capacity:
            return False
        if len(data) != math.prod(shape) * self._type.itemsize:
            return False
        if c.context_window is None and (start or length > self.capacity):
            return False
        saved = np.frombuffer(data, self._type).reshape(shape)
        rows = self._rows(start, length)
        for tensor, values in zip((*self.keys, *self.values), saved, strict=True):
            whole = self._array(tensor)
            whole[:, rows] = values
            self.store.write(tensor.name, whole)
        self.start = start
        self.hold(start, count)
        return True

    def _rows(self, start: int, length: int) -> npt.NDArray[np.int64]:
        return self.block_rows + np.arange(start, length, dtype=np.int64) % self.capacity

    def _array(self, tensor: Tensor) -> npt.NDArray[Any]:
        shape = (self.config.num_kv_heads, self.rows, self.config.head_dim)
        data = tensor.read_rows(0, self.rows * self.config.num_kv_heads)
        return data.reshape(-1).view(self._type).reshape(shape)

    def close(self) -> None:
        """Free the cache."""
        self.store.close()


class ContextGraph:
    """Features of up to `size` tokens -> rows of one sequence's cache, in every layer."""

    def __init__(
        self,
        backend: Backend,
        config: DrafterConfig,
        weights: BackboneWeights,
        cache: ContextCache,
        size: int,
    ) -> None:
        self.size = size
        self._cache = cache
        c, eps = config, config.rms_norm_eps
        g = self.graph = Graph(backend, max_nodes=32 + 24 * c.num_layers)
        features = g.input("features", "f32", (c.feature_size, size))
        indices = g.input("positions_rows", "i32", (2 * size,))
        positions = g.view(indices, (size,))
        rows = g.view(indices, (size,), offset=4 * size)
        fused = g.rms_norm(weights.fc @ features, eps) * weights.hidden_norm
        heads, d = c.num_kv_heads, c.head_dim
        for layer, cached_k, cached_v in zip(weights.layers, cache.keys, cache.values, strict=True):
            kv = layer.qkv.product(g, fused, first=1)
            k = g.view(kv, (d, heads, size), (d * 4, kv.nb[1]))
            k = g.rms_norm(k, eps) * g.rows(layer.qk_norm, c.num_heads, heads)
            k = g.rope_neox(k, positions, c.rope_theta, c.rotary_size)
            v = g.view(kv, (d, heads, size), (d * 4, kv.nb[1]), heads * d * 4)
            g.expand(g.set_rows(cached_k, g.permute(k, 0, 2, 1, 3), rows))
            g.expand(g.set_rows(cached_v, g.permute(v, 0, 2, 1, 3), rows))
        g.allocate()
        self._features, self._indices = g.bind(features), g.bind(indices)
        self._staging = self._features.array.reshape(-1).data.cast("B")
        self._numbers = struct.Struct(f"{2 * size}i")
        self._index_bytes = self._indices.array.data.cast("B")

    def run(self, position: int, features: Features) -> None:
        """Fill rows for `features` (at most `size`), whose first token is at `position`."""
        cache, count = self._cache, len(features)
        positions = range(position, position + self.size)
        rows = [cache.block_rows + place % cache.capacity for place in positions[:count]]
        rows += [cache.rows - 1] * (self.size - count)
        # Packing, and copying plain bytes, touch less code than NumPy does for so few numbers.
        self._numbers.pack_into(self._index_bytes, 0, *positions, *rows)
        data = features.data
        if data.format != "f" or not data.c_contiguous:
            data = np.ascontiguousarray(features, np.float32).data
        self._staging[: data.nbytes] = data.cast("B")
        self._features.push()
        self._indices.push()
        self.graph.compute()
        cache.hold(position, count)
