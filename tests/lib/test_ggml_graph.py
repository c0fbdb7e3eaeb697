"""Graphs: every operation against NumPy, reuse, and mistakes that must not end the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dspine.errors import ClosedError, UsageError
from dspine.ggml import Backend, Graph, HostTensor, Tensor, WeightStore
from dspine.ggml.library import functions
from dspine.llama.library import find_library

Array = npt.NDArray[Any]
Build = Callable[..., Tensor]


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    find_library()


@pytest.fixture
def backend() -> Iterator[Backend]:
    with Backend(n_threads=1) as backend:
        yield backend


def run(backend: Backend, build: Build, *arrays: Array) -> Array:
    """Result of `build(graph, inputs...)`; an input's `ne` is its array's shape reversed."""
    with Graph(backend) as g:
        inputs = []
        for i, array in enumerate(arrays):
            kind = {"float32": "f32", "int32": "i32", "int64": "i64"}[array.dtype.name]
            inputs.append(g.input(f"in{i}", kind, array.shape[::-1]))
        out = g.output(build(g, *inputs), "out")
        g.allocate()
        for tensor, array in zip(inputs, arrays, strict=True):
            g.set(tensor, array)
        g.compute()
        return g.get(out)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_matmul_multiplies_rows_with_rows_and_repeats_the_weight(backend: Backend) -> None:
    w, x = normal(2, 5, 8), normal(6, 3, 8, seed=1)
    found = run(backend, lambda g, w, x: w @ x, w, x)
    # Matrix i of x meets matrix i // 3 of w: that is how grouped heads share keys.
    close(found, np.stack([x[i] @ w[i // 3].T for i in range(6)]))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda g, a, b: a + b, lambda a, b: a + b),
        (lambda g, a, b: a - b, lambda a, b: a - b),
        (lambda g, a, b: a * b, lambda a, b: a * b),
        (lambda g, a, b: a * 0.5, lambda a, b: a * 0.5),
        (lambda g, a, b: g.sqr(a), lambda a, b: a**2),
        (lambda g, a, b: g.sqrt(g.sqr(a)), lambda a, b: np.abs(a)),
        (lambda g, a, b: g.silu(a), lambda a, b: a / (1 + np.exp(-a))),
        (lambda g, a, b: g.sigmoid(a), lambda a, b: 1 / (1 + np.exp(-a))),
        (lambda g, a, b: g.tanh(a), lambda a, b: np.tanh(a)),
        (lambda g, a, b: g.mean(a), lambda a, b: a.mean(1, keepdims=True)),
        (
            lambda g, a, b: g.swiglu(a),
            lambda a, b: a[:, :3] / (1 + np.exp(-a[:, :3])) * a[:, 3:],
        ),
        (
            lambda g, a, b: g.rms_norm(a, 0.1),
            lambda a, b: a / np.sqrt((a**2).mean(1, keepdims=True) + 0.1),
        ),
        (lambda g, a, b: g.cont(g.transpose(a)), lambda a, b: a.T),
        (lambda g, a, b: g.reshape(a, 3, 8), lambda a, b: a.reshape(8, 3)),
        (lambda g, a, b: g.cont(g.rows(a, 1, 2)), lambda a, b: a[1:3]),
        (lambda g, a, b: g.cont(g.columns(a, 2, 3)), lambda a, b: a[:, 2:5]),
        (lambda g, a, b: g.concat(a, a, 0), lambda a, b: np.concatenate((a, a), 1)),
        (lambda g, a, b: g.concat(a, a, 1), lambda a, b: np.concatenate((a, a), 0)),
    ],
)
def test_element_wise_and_shape_operations(backend: Backend, build: Build, expected: Any) -> None:
    a, b = normal(4, 6), normal(1, 6, seed=1)
    close(run(backend, build, a, b), expected(a, b))


def test_permute_says_where_each_dimension_goes(backend: Backend) -> None:
    a = normal(4, 3, 2)  # ne = (2, 3, 4)
    found = run(backend, lambda g, a: g.cont(g.permute(a, 2, 0, 1, 3)), a)
    # ne (2, 3, 4) -> dimension 0 to place 2, 1 to 0, 2 to 1: ne (3, 4, 2).
    close(found, np.transpose(a, (2, 0, 1)))


def test_rope_pairs_the_two_halves_of_a_head(backend: Backend) -> None:
    x = normal(5, 3, 8)  # 5 tokens, 3 heads, head_dim 8
    positions = np.array([0, 1, 7, 500, 3], dtype=np.int32)
    found = run(backend, lambda g, x, p: g.rope_neox(x, p, 100.0), x, positions)
    angle = positions[:, None, None] * 100.0 ** (-np.arange(4) / 4)
    left, right = x[..., :4], x[..., 4:]
    rotated = (
        left * np.cos(angle) - right * np.sin(angle),
        right * np.cos(angle) + left * np.sin(angle),
    )
    np.testing.assert_allclose(found, np.concatenate(rotated, -1), atol=2e-4)


def test_rows_are_looked_up_and_written(backend: Backend) -> None:
    table, rows = normal(10, 4), np.array([3, 0, 3], dtype=np.int32)
    close(run(backend, lambda g, t, r: g.get_rows(t, r), table, rows), table[rows])
    values = normal(2, 4, seed=2)
    for dtype in (np.int32, np.int64):
        where = np.array([9, 1], dtype=dtype)
        found = run(backend, lambda g, t, v, r: g.cont(g.set_rows(t, v, r)), table, values, where)
        expected = table.copy()
        expected[where] = values
        close(found, expected)


def test_top_k_finds_the_largest_of_each_row(backend: Backend) -> None:
    x = normal(3, 50)
    found = run(backend, lambda g, x: g.top_k(x, 7), x)
    for row, indices in zip(x, found, strict=True):
        assert set(indices.tolist()) == set(np.argsort(-row)[:7].tolist())


def test_a_graph_is_computed_many_times_and_inputs_keep_their_values(backend: Backend) -> None:
    with Graph(backend) as g:
        a, b = g.input("a", "f32", (4,)), g.input("b", "f32", (4,))
        out = g.output(g.sqr(g.sqr(a) + b), "out")
        g.allocate()
        values = normal(4)
        g.set(a, values)
        for i in range(3):
            g.set(b, np.full(4, float(i), dtype=np.float32))
            g.compute()
            close(g.get(out), (values**2 + i) ** 2)


def test_weights_are_shared_by_graphs_and_a_cache_is_written_in_place(backend: Backend) -> None:
    store = WeightStore(backend)
    cache = store.declare("cache", "f32", (4, 3))
    store.allocate()
    store.clear()
    with Graph(backend) as writer, Graph(backend) as reader:
        x = writer.input("x", "f32", (4, 1))
        writer.expand(writer.copy(x, writer.rows(cache, 1, 1)))
        writer.allocate()
        y = reader.input("y", "f32", (4, 1))
        product = reader.output(cache @ y, "product")
        reader.allocate()
        values, probe = normal(1, 4), normal(1, 4, seed=1)
        writer.set(x, values)
        writer.compute()
        reader.set(y, probe)
        reader.compute()
        expected = np.zeros(3)
        expected[1] = float(values[0] @ probe[0])
        close(reader.get(product), expected)
    store.close()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda g, a, b, i: b @ a, "matmul needs rows of equal length, not f32 .5, 3"),
        (lambda g, a, b, i: a @ i, "matmul needs rows of equal length|f32 right side"),
        (lambda g, a, b, i: a + b, "add needs a right side that repeats"),
        (lambda g, a, b, i: g.sigmoid(i), "sigmoid needs contiguous f32 rows"),
        (lambda g, a, b, i: g.rms_norm(a, -1.0), "eps -1.0"),
        (lambda g, a, b, i: g.rms_norm(g.transpose(a), 0.0), "rms_norm needs f32 rows"),
        (lambda g, a, b, i: g.rope_neox(a, i, 1e4), "rope needs one i32 position per token"),
        (lambda g, a, b, i: g.get_rows(a, a), "get_rows needs i32 indices"),
        (lambda g, a, b, i: g.set_rows(a, b, i), "set_rows needs one index per row"),
        (lambda g, a, b, i: g.top_k(a, 5), "k is 5, rows have 4 elements"),
        (lambda g, a, b, i: g.top_k(a, 0), "k is 0"),
        (lambda g, a, b, i: g.concat(a, b, 1), "equal sizes except in dimension 1"),
        (lambda g, a, b, i: g.concat(a, b, 4), "dimension 4"),
        (lambda g, a, b, i: g.reshape(a, 7), r"\(4, 3, 1, 1\) cannot become \(7, 1, 1, 1\)"),
        (lambda g, a, b, i: g.reshape(g.transpose(a), 12), "reshape needs a contiguous"),
        (lambda g, a, b, i: g.permute(a, 0, 0, 1, 2), "not an order"),
        (lambda g, a, b, i: g.view(a, (4, 4)), "leaves 'a', which has 48 bytes"),
        (lambda g, a, b, i: g.view(a, (4, 0)), "positive dimensions"),
        (lambda g, a, b, i: g.rows(a, 2, 2), "rows 2 to 4 are outside"),
        (lambda g, a, b, i: g.columns(a, -1, 2), "columns -1 to 1 are outside"),
        (lambda g, a, b, i: g.copy(a, b), "copy needs as many elements"),
        (lambda g, a, b, i: g.copy(i, i), "copy needs f32 into"),
        (lambda g, a, b, i: g.swiglu(b), "even length"),
        (lambda g, a, b, i: g.input("x", "f32", (0,)), "must be positive"),
        (lambda g, a, b, i: g.input("x", "q8_0", (33,)), "row of 33"),
    ],
)
def test_mistakes_are_sentences_with_shapes(backend: Backend, build: Build, message: str) -> None:
    with Graph(backend) as g:
        a = g.input("a", "f32", (4, 3))
        b = g.input("b", "f32", (5, 3))
        i = g.input("i", "i32", (3, 2))
        with pytest.raises(UsageError, match=message):
            build(g, a, b, i)


def test_a_graph_grows_only_to_its_size(backend: Backend) -> None:
    with Graph(backend, max_nodes=4) as g:
        x = g.input("x", "f32", (4,))
        for _ in range(3):
            x = g.sqr(x)
        with pytest.raises(UsageError, match="more nodes than it was made for"):
            g.sqr(x)


def test_the_order_of_build_allocate_set_compute_is_checked(backend: Backend) -> None:
    g = Graph(backend)
    x = g.input("x", "f32", (4,))
    out = g.output(g.sqr(x), "out")
    with pytest.raises(UsageError, match="before allocate"):
        g.compute()
    with pytest.raises(UsageError, match="before allocate"):
        g.set(x, normal(4))
    g.allocate()
    with pytest.raises(UsageError, match=r"inputs \['x'\] were set"):
        g.compute()
    for wrong in (normal(5), normal(4).astype(np.float64), normal(8)[::2]):
        with pytest.raises(UsageError, match="takes 4 contiguous f32 values"):
            g.set(x, wrong)
    with pytest.raises(UsageError, match="already allocated"):
        g.sqr(x)
    g.set(x, normal(4))
    g.compute()
    with Graph(backend) as other, pytest.raises(UsageError, match="not a node of this graph"):
        other.output(out, "stolen")
    g.close()
    g.close()
    for use in (g.compute, lambda: g.get(out), lambda: g.set(x, normal(4))):
        with pytest.raises(ClosedError):
            use()


def test_weights_may_not_vanish_under_a_graph(backend: Backend) -> None:
    store = WeightStore(backend)
    w = store.declare("w", "f32", (4, 3))
    store.allocate()
    store.write("w", normal(3, 4))
    with Graph(backend) as g:
        x = g.input("x", "f32", (4, 1))
        g.output(w @ x, "out")
        g.allocate()
        g.set(x, normal(1, 4))
        g.compute()
        store.close()
        with pytest.raises(ClosedError, match="weights it reads were closed"):
            g.compute()
    with Graph(backend) as g:
        x = g.input("x", "f32", (4, 1))
        with pytest.raises(ClosedError, match="'w'"):
            w @ x


def test_operators_need_a_graph(backend: Backend) -> None:
    store = WeightStore(backend)
    a, b = store.declare("a", "f32", (4,)), store.declare("b", "f32", (4,))
    with pytest.raises(UsageError, match="belong to no graph"):
        a + b
    store.close()


def test_quantised_weights_multiply_within_their_precision(backend: Backend) -> None:
    w, x = normal(16, 64), normal(3, 64, seed=1)
    exact = x @ w.T
    scale = np.abs(exact).mean()
    for kind, tolerance in (("f16", 0.01), ("bf16", 0.05), ("q8_0", 0.05), ("q4_0", 0.5)):
        store = WeightStore(backend)
        host = HostTensor.quantised(w, kind)
        tensor = store.declare("w", kind, host.ne)
        store.allocate()
        store.write("w", host.data)
        with Graph(backend) as g:
            inp = g.input("x", "f32", (64, 3))
            out = g.output(tensor @ inp, "out")
            g.allocate()
            g.set(inp, x)
            g.compute()
            assert np.abs(g.get(out) - exact).max() < tolerance * scale, kind
        store.close()


@pytest.mark.parametrize("is_host", [True, False])
def test_bound_arrays_carry_values_in_and_out_at_every_run(
    backend: Backend, is_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_host:  # a device whose memory must be copied to and from
        monkeypatch.setattr(functions(), "ggml_backend_buft_is_host", lambda _: False)
    with Graph(backend) as g:
        x = g.input("x", "f32", (3, 2))
        out = g.output(x * 2.0, "out")
        g.allocate()
        values, result = g.bind(x), g.bind(out)
        assert values.array.shape == (1, 1, 2, 3)
        assert not values.array.any()
        for seed in (1, 2):
            values.array[0, 0] = normal(2, 3, seed=seed)
            values.push()
            g.compute()
            result.pull()
            close(result.array[0, 0], 2 * normal(2, 3, seed=seed))


def test_only_plain_numbers_of_this_graph_are_bound(backend: Backend) -> None:
    with Graph(backend) as g, Graph(backend) as other:
        x = g.input("x", "f32", (4, 4))
        turned = g.output(g.transpose(x), "turned")
        with pytest.raises(UsageError, match="no memory before allocate"):
            g.bind(x)
        g.allocate()
        with pytest.raises(UsageError, match="cannot be read"):
            g.bind(turned)
        other.input("y", "f32", (1,))
        other.allocate()
        with pytest.raises(UsageError, match="not a node of this graph"):
            other.bind(x)
