"""The ggml operations a graph offers. Every one checks shapes and types in Python first,
because ggml answers a mistake by ending the process.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from dspine.errors import UsageError
from dspine.ggml.library import functions
from dspine.ggml.tensor import Tensor

_NEOX = 2
"""ggml's rotary mode that pairs element i with element i + n/2 (half-split)."""
_INDEX_TYPES = ("i32", "i64")
_INTEGERS = ("i8", "i16", "i32", "i64", "f64")
"""Types that ggml stores but does not multiply."""
_NO_ROWS = ("i8", "i16", "i64", "f64")
_COPY_TYPES = ("f32", "f16", "bf16")


class Operations(ABC):
    """Builds nodes in one ggml context. Shapes below are in ggml order, fastest first."""

    _context_pointer: int
    _room: int

    # -- products and element-wise ------------------------------------------------------------

    def matmul(self, weight: Tensor, x: Tensor) -> Tensor:
        """Each row of x (n, k, ...) times each row of weight (n, m, ...): (m, k, ...) in f32.

        Dimensions 2 and 3 of weight repeat to those of x.
        """
        fits = (
            weight.ne[0] == x.ne[0] and x.ne[2] % weight.ne[2] == 0 and x.ne[3] % weight.ne[3] == 0
        )
        _require(fits, "matmul", "rows of equal length", weight, x)
        _require(x.type.name == "f32", "matmul", "an f32 right side", weight, x)
        _require(
            weight.has_contiguous_rows and x.has_contiguous_rows and weight.nb[0] <= weight.nb[1],
            "matmul",
            "contiguous rows",
            weight,
            x,
        )
        _require(weight.type.name not in _INTEGERS, "matmul", "real-valued weights", weight, x)
        return self._node("ggml_mul_mat", weight, x)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Sum, with b repeated to the shape of a."""
        return self._binary("ggml_add", a, b)

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        """Difference, with b repeated to the shape of a."""
        return self._binary("ggml_sub", a, b)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """Element-wise product, with b repeated to the shape of a."""
        return self._binary("ggml_mul", a, b)

    def scale(self, a: Tensor, factor: float) -> Tensor:
        """Every element times `factor`."""
        _require(a.type.name == "f32" and a.is_contiguous, "scale", "contiguous f32", a)
        return self._node("ggml_scale", a, factor)

    def sqr(self, a: Tensor) -> Tensor:
        """Square of every element."""
        return self._unary("ggml_sqr", a)

    def sqrt(self, a: Tensor) -> Tensor:
        """Square root of every element."""
        return self._unary("ggml_sqrt", a)

    def silu(self, a: Tensor) -> Tensor:
        """Every element times its sigmoid."""
        return self._unary("ggml_silu", a)

    def sigmoid(self, a: Tensor) -> Tensor:
        """1 / (1 + exp(-a))."""
        return self._unary("ggml_sigmoid", a)

    def tanh(self, a: Tensor) -> Tensor:
        """Hyperbolic tangent of every element."""
        return self._unary("ggml_tanh", a)

    def mean(self, a: Tensor) -> Tensor:
        """Mean of each row: (n, ...) gives (1, ...)."""
        return self._unary("ggml_mean", a)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(first half of each row) * second half: (2n, ...) gives (n, ...)."""
        _require(
            gate_up.type.name == "f32" and gate_up.is_contiguous and gate_up.ne[0] % 2 == 0,
            "swiglu",
            "contiguous f32 rows of even length",
            gate_up,
        )
        return self._node("ggml_swiglu", gate_up)

    # -- norms, rotary, attention --------------------------------------------------------------

    def rms_norm(self, a: Tensor, eps: float) -> Tensor:
        """Each row divided by sqrt(mean(row^2) + eps), in fp32."""
        _require(a.type.name == "f32" and a.has_contiguous_rows, "rms_norm", "f32 rows", a)
        if not (math.isfinite(eps) and eps >= 0):
            raise UsageError(f"rms_norm: eps {eps} must be a finite number of at least 0")
        return self._node("ggml_rms_norm", a, eps)

    def rope_neox(
        self, a: Tensor, positions: Tensor, base: float, size: int | None = None
    ) -> Tensor:
        """Half-split rotary over the first `size` elements of dimension 0, or all of them. a is
        (head_dim, heads, tokens, ...), positions an i32 vector with one entry per token.
        """
        _require(
            positions.type.name == "i32"
            and positions.is_contiguous
            and positions.size == positions.ne[0] == a.ne[2],
            "rope",
            "one i32 position per token",
            a,
            positions,
        )
        _require(
            a.type.name in ("f32", "f16") and a.has_contiguous_rows and a.ne[0] % 2 == 0,
            "rope",
            "rows of even length",
            a,
        )
        n_dims, original_context, no_factors = size or a.ne[0], 0, None
        _require(n_dims % 2 == 0 and 0 < n_dims <= a.ne[0], "rope", "an even part of a row", a)
        plain = (1.0, 0.0, 1.0, 0.0, 0.0)  # no scaling of frequencies or magnitudes
        return self._node(
            "ggml_rope_ext",
            *(a, positions, no_factors, n_dims, _NEOX, original_context, base, *plain),
        )

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """softmax(scale * q k + mask) v in one operation. q (d, rows, heads, p), k (d, keys, kv
        heads, p), v (e, keys, kv heads, p), mask f16 (keys, rows): (e, heads, rows, p) in f32.
        `sinks` (heads,) in f32 are one more score each for a head, with a value of zero.
        """
        _require(
            q.type.name == "f32" and q.has_contiguous_rows and q.ne[0] == k.ne[0],
            "attention",
            "f32 queries as wide as the keys",
            q,
            k,
        )
        _require(
            k.ne[1:] == v.ne[1:]
            and q.ne[2] % k.ne[2] == 0
            and q.ne[3] == k.ne[3]
            and k.has_contiguous_rows
            and v.has_contiguous_rows
            and k.type.name in _COPY_TYPES
            and v.type.name == k.type.name,
            "attention",
            "as many f32, f16 or bf16 values as keys",
            q,
            k,
            v,
        )
        if mask is not None:
            _require(
                mask.type.name == "f16"
                and mask.is_contiguous
                and mask.ne == (k.ne[1], q.ne[1], 1, 1),
                "attention",
                "an f16 mask (keys, rows)",
                q,
                k,
                mask,
            )
        no_bias, no_cap = 0.0, 0.0
        if sinks is None:
            return self._node("ggml_flash_attn_ext", q, k, v, mask, scale, no_bias, no_cap)
        _require(
            sinks.type.name == "f32" and sinks.is_contiguous and sinks.ne == (q.ne[2], 1, 1, 1),
            "attention",
            "one f32 sink for each head",
            q,
            sinks,
        )
        sinks.check_open()
        result = self._node("ggml_flash_attn_ext", q, k, v, mask, scale, no_bias, no_cap)
        functions().ggml_flash_attn_ext_add_sinks(result.pointer, sinks.pointer)
        return result

    # -- rows ----------------------------------------------------------------------------------

    def get_rows(self, table: Tensor, rows: Tensor) -> Tensor:
        """Rows of table (n, m, p, q) by i32 indices (k, p, q): (n, k, p, q) in f32 (i32 tables
        stay i32). The caller keeps indices inside 0 ... m-1.
        """
        _require(rows.type.name == "i32", "get_rows", "i32 indices", table, rows)
        _require(
            table.ne[2] == rows.ne[1] and table.ne[3] == rows.ne[2] and rows.ne[3] == 1,
            "get_rows",
            "one index list per matrix",
            table,
            rows,
        )
        _require(
            table.has_contiguous_rows and table.type.name not in _NO_ROWS,
            "get_rows",
            "contiguous rows of real values or i32",
            table,
            rows,
        )
        return self._node("ggml_get_rows", table, rows)

    def set_rows(self, table: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        """Write f32 values (n, k, p, q) over the rows (k, p, q) of table (n, m, p, q); the
        result is table itself. The caller keeps indices inside 0 ... m-1.
        """
        _require(
            table.ne[0] == values.ne[0]
            and table.ne[2] == values.ne[2]
            and table.ne[3] == values.ne[3]
            and values.ne[1] == rows.ne[0]
            and values.ne[2] % rows.ne[1] == 0
            and values.ne[3] % rows.ne[2] == 0
            and rows.ne[3] == 1,
            "set_rows",
            "one index per row",
            table,
            values,
            rows,
        )
        _require(
            values.type.name == "f32" and rows.type.name in _INDEX_TYPES,
            "set_rows",
            "f32 values and integer indices",
            table,
            values,
            rows,
        )
        _require(
            table.has_contiguous_rows
            and values.has_contiguous_rows
            and table.type.name in _COPY_TYPES,
            "set_rows",
            "contiguous rows of f32, f16 or bf16",
            table,
            values,
        )
        return self._node("ggml_set_rows", table, values, rows)

    def top_k(self, a: Tensor, k: int) -> Tensor:
        """i32 indices of the k largest elements of each row, in no particular order."""
        _require(a.type.name == "f32" and a.is_contiguous, "top_k", "contiguous f32", a)
        if not 1 <= k <= a.ne[0]:
            raise UsageError(f"top_k: k is {k}, rows have {a.ne[0]} elements")
        return self._node("ggml_top_k", a, k)

    def concat(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        """Elements of a, then of b, along dimension `dim`."""
        _require(
            a.type.name == b.type.name and a.type.name in ("f32", "i32"),
            "concat",
            "f32 or i32 on both sides",
            a,
            b,
        )
        same = all(a.ne[i] == b.ne[i] for i in range(4) if i != dim)
        _require(0 <= dim < 4 and same, "concat", f"equal sizes except in dimension {dim}", a, b)
        return self._node("ggml_concat", a, b, dim)

    # -- shapes --------------------------------------------------------------------------------

    def reshape(self, a: Tensor, *ne: int) -> Tensor:
        """The same elements of a contiguous tensor in shape `ne`."""
        shape = _shape4(ne)
        _require(a.is_contiguous, "reshape", "a contiguous tensor", a)
        if math.prod(shape) != a.size or (a.type.is_quantised and shape[0] != a.ne[0]):
            raise UsageError(f"reshape: {a.ne} cannot become {shape}")
        return self._node("ggml_reshape_4d", a, *shape)

    def permute(self, a: Tensor, *axes: int) -> Tensor:
        """Dimension i of a becomes dimension axes[i]; no data moves."""
        if sorted(axes) != [0, 1, 2, 3]:
            raise UsageError(f"permute: {axes} is not an order of the dimensions 0 to 3")
        return self._node("ggml_permute", a, *axes)

    def transpose(self, a: Tensor) -> Tensor:
        """Dimensions 0 and 1 exchanged; no data moves."""
        return self._node("ggml_transpose", a)

    def view(
        self, a: Tensor, ne: Sequence[int], nb: Sequence[int] | None = None, offset: int = 0
    ) -> Tensor:
        """A part of a: shape `ne`, byte steps `nb` of dimensions 1 to 3 (default: those of a),
        starting `offset` bytes in.
        """
        shape = _shape4(ne)
        steps = tuple(a.nb[1:]) if nb is None else tuple(nb)
        if len(steps) < 3:
            steps += tuple(
                steps[-1] * math.prod(shape[len(steps) : i + 1]) for i in range(len(steps), 3)
            )
        row = shape[0] // a.type.block * a.type.size
        end = offset + row + sum((n - 1) * b for n, b in zip(shape[1:], steps, strict=True))
        if offset < 0 or min(steps) < 0 or shape[0] % a.type.block or end > a.byte_size:
            raise UsageError(
                f"view: shape {shape} with steps {steps} at byte {offset} leaves {a.name!r}, "
                f"which has {a.byte_size} bytes"
            )
        _require(a.has_contiguous_rows or shape[0] == 1, "view", "contiguous rows", a)
        return self._node("ggml_view_4d", a, *shape, *steps, offset)

    def rows(self, a: Tensor, first: int, count: int) -> Tensor:
        """Rows first ... first+count-1 of dimension 1, as a view."""
        if not 0 <= first <= first + count <= a.ne[1]:
            raise UsageError(
                f"rows {first} to {first + count} are outside of {a.ne}: dimension 1 has {a.ne[1]}"
            )
        return self.view(a, (a.ne[0], count, a.ne[2], a.ne[3]), offset=first * a.nb[1])

    def columns(self, a: Tensor, first: int, count: int) -> Tensor:
        """Elements first ... first+count-1 of each row, as a view."""
        if not 0 <= first <= first + count <= a.ne[0] or first % a.type.block:
            raise UsageError(
                f"columns {first} to {first + count} are outside of {a.ne}: give whole blocks of "
                f"{a.type.block} of its {a.ne[0]}"
            )
        return self.view(a, (count, *a.ne[1:]), offset=first // a.type.block * a.type.size)

    def cont(self, a: Tensor) -> Tensor:
        """A contiguous copy of a view."""
        _require(a.type.name in (*_COPY_TYPES, "i32"), "cont", "an unquantised tensor", a)
        return self._node("ggml_cont", a)

    def copy(self, source: Tensor, target: Tensor) -> Tensor:
        """Write source over target, which has as many elements; the result is target."""
        _require(source.size == target.size, "copy", "as many elements", source, target)
        _require(
            (source.type.name == "f32" and target.type.name in _COPY_TYPES)
            or (source.type.name == target.type.name and source.type.name in _COPY_TYPES),
            "copy",
            "f32 into f32, f16 or bf16",
            source,
            target,
        )
        return self._node("ggml_cpy", source, target)

    # -- plumbing ------------------------------------------------------------------------------

    def _open_context(self) -> int:
        """The ggml context, after making sure that one more header fits in it."""
        if not self._room:
            raise UsageError("the graph has more nodes than it was made for: raise max_nodes")
        self._room -= 1
        return self._context_pointer

    @abstractmethod
    def _check_building(self) -> None:
        """Raise unless nodes may still be added."""

    @abstractmethod
    def _adopt(self, pointer: int | None, sources: Sequence[Tensor]) -> Tensor:
        """Wrap a new node and remember what keeps its sources alive."""

    def _node(self, function: str, *arguments: Tensor | float | None) -> Tensor:
        """Call a ggml function that makes a node; tensors become pointers."""
        self._check_building()
        sources = [a for a in arguments if isinstance(a, Tensor)]
        for source in sources:
            source.check_open()
        plain = (a.pointer if isinstance(a, Tensor) else a for a in arguments)
        return self._adopt(getattr(functions(), function)(self._open_context(), *plain), sources)

    def _unary(self, function: str, a: Tensor) -> Tensor:
        _require(
            a.type.name == "f32" and a.has_contiguous_rows, function[5:], "contiguous f32 rows", a
        )
        return self._node(function, a)

    def _binary(self, function: str, a: Tensor, b: Tensor) -> Tensor:
        repeats = all(n % m == 0 for n, m in zip(a.ne, b.ne, strict=True))
        _require(repeats, function[5:], "a right side that repeats to the left", a, b)
        _require(
            a.type.name == b.type.name == "f32" and a.has_contiguous_rows and b.has_contiguous_rows,
            function[5:],
            "contiguous f32 rows",
            a,
            b,
        )
        return self._node(function, a, b)


def _shape4(ne: Sequence[int]) -> tuple[int, int, int, int]:
    if not 1 <= len(ne) <= 4 or any(n < 1 for n in ne):
        raise UsageError(f"shape {tuple(ne)}: 1 to 4 positive dimensions are needed")
    padded = (*ne, 1, 1, 1)
    return padded[0], padded[1], padded[2], padded[3]


def _require(fits: bool, operation: str, need: str, *tensors: Tensor) -> None:
    if not fits:
        found = " and ".join(f"{t.type_name} {t.ne}" for t in tensors)
        raise UsageError(f"{operation} needs {need}, not {found}")
