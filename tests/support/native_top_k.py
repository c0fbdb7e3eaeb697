"""The largest values of rows as the CPU kernels choose them, beside those of NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dspine.ggml import Backend, Graph, kernels

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int32]

MOST = 64
"""With more to choose, the operation is left to ggml."""
_DRAFTER = 12288
_NAN, _INF = np.float32(np.nan), np.float32(np.inf)
_UNWRITTEN = -7


def expected(values: Floats, k: int) -> Indices:
    """Best first, the lower index first among equals, what is no number behind all numbers."""
    odd = np.isnan(values)
    order = np.lexsort((np.arange(len(values)), -np.where(odd, -_INF, values), odd))
    return order[:k].astype(np.int32)


def chosen(library: ctypes.CDLL, values: Floats, k: int) -> Indices:
    """What the kernels choose from one row, in arrays of just its size."""
    function = library.dspine_top_k
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p]
    row, result = np.array(values, dtype=np.float32), np.full(k, _UNWRITTEN, dtype=np.int32)
    function(row.ctypes.data, len(row), k, result.ctypes.data)
    return result


def special_rows(rng: np.random.Generator, count: int = _DRAFTER) -> Mapping[str, Floats]:
    """Rows of `count` values, by what is special about them."""
    normal = rng.standard_normal(count, dtype=np.float32)
    at = np.arange(count)
    tiny = np.float32(1e-45)

    def mixed(*values: float | np.float32) -> Floats:
        return np.array(values, dtype=np.float32)[rng.integers(0, len(values), count)]

    some = at[rng.permutation(count)[:5]]
    few_numbers = np.full(count, _NAN)
    few_numbers[some] = np.array((3, -_INF, _INF, 0, 3), dtype=np.float32)[: len(some)]
    few_infinite = normal.copy()
    few_infinite[some] = _INF
    return {
        "normal": normal,
        "equal": np.full(count, 1.5, dtype=np.float32),
        "three values": mixed(-1, 0, 2),
        "rising": at.astype(np.float32) - count // 2,
        "falling": count // 2 - at.astype(np.float32),
        "rising in steps": (at // 50).astype(np.float32),
        "zeros of both signs": mixed(0.0, -0.0),
        "denormal": mixed(tiny, -tiny, 0.0, -0.0),
        "negative": -np.abs(normal) - 1,
        "large ones side by side": np.where(at // 100 == count // 300, normal + 50, normal),
        "large ones 128 apart": np.where(at % 128 == 7, at.astype(np.float32) + 9, normal),
        "infinite": mixed(_INF, -_INF, 0),
        "few infinite": few_infinite,
        "least": np.full(count, -_INF),
        "mostly least": np.where(rng.random(count) < 3 / count, normal, -_INF),
        "some no numbers": np.where(rng.random(count) < 0.3, _NAN, normal),
        "no numbers of both signs": mixed(_NAN, -_NAN, 1, _INF),
        "few numbers": few_numbers,
        "no numbers": np.full(count, _NAN),
        "no numbers at the end": np.where(at > count - 90, _NAN, normal),
    }


def random_row(rng: np.random.Generator) -> tuple[str, Floats]:
    """A row of any length, short ones as often as long ones."""
    count = int(np.exp(rng.uniform(0, np.log(20_000))))
    rows = special_rows(rng, count)
    kind = list(rows)[rng.integers(len(rows))]
    return kind, rows[kind]


def differences(library: ctypes.CDLL, rng: np.random.Generator, count: int) -> Iterator[str]:
    """`count` random rows: a sentence for each whose choice is another."""
    for _ in range(count):
        kind, values = random_row(rng)
        k = int(rng.integers(1, 1 + min(MOST, len(values))))
        if not np.array_equal(chosen(library, values, k), expected(values, k)):
            yield f"{k} of {len(values)} values, {kind}"


def operations(
    plug_in: kernels.Kernels, backends: Sequence[Backend], rng: np.random.Generator, count: int
) -> Iterator[str]:
    """`count` times several rows in a graph, with any number of threads, as matrices and as parts
    of wider ones: a sentence for each whose choice is not the kernels' own, in their order. And
    one where they take what is left to ggml.
    """
    for _ in range(count):
        kind, row = random_row(rng)
        matrices, rows, unused = (int(most) for most in rng.integers(1, (4, 9, 200)))
        values = np.stack([rng.permutation(row) for _ in range(matrices * rows)])
        k, threads = int(rng.integers(1, 1 + min(MOST, len(row)))), int(rng.integers(len(backends)))
        wanted = np.stack([expected(one, k) for one in values])
        for more in (0, unused):
            found = _choose(backends[threads], values, k, matrices, more)
            if not np.array_equal(found, wanted):
                shape = f"{matrices} x {rows} rows, {1 + threads} threads, {more} unused"
                yield f"{k} of {len(row)} values, {kind}: {shape}"
    values = rng.standard_normal((5, 300), dtype=np.float32)
    for k in (MOST + 1, 300):
        plug_in.take_top_k(True)
        ours = _choose(backends[1], values, k)
        plug_in.take_top_k(False)
        # ggml has an order of its own.
        if not np.array_equal(ours, _choose(backends[1], values, k)):
            yield f"{k} values are not left to ggml"
    plug_in.take_top_k(True)


def _choose(
    backend: Backend, values: Floats, k: int, matrices: int = 1, unused: int = 0
) -> Indices:
    """The operation on `values` (rows, count) as so many matrices, whose rows have `unused` values
    behind them that nobody may see: (rows, k).
    """
    count, rows = values.shape[1], len(values) // matrices
    whole = np.pad(values, ((0, 0), (0, unused)), constant_values=np.float32(1e30))
    with Graph(backend) as graph:
        given = graph.input("values", "f32", (count + unused, rows, matrices))
        part = graph.view(given, (count, rows, matrices), given.nb[1:3]) if unused else given
        # `Graph.top_k` wants no gaps between rows.
        result = graph.output(graph._node("ggml_top_k", part, k), "result")
        graph.allocate()
        graph.set(given, whole)
        graph.compute()
        return graph.get(result).reshape(-1, k)
