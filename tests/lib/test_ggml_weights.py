"""Weight stores and host tensors: declare, allocate, write, read back, free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dspine.errors import ClosedError, UsageError
from dspine.ggml import Backend, HostTensor, Tensor, WeightStore, quantise, type_by_name
from dspine.llama.library import find_library


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    find_library()


@pytest.fixture
def store() -> Iterator[WeightStore]:
    with Backend() as backend:
        store = WeightStore(backend, capacity=4)
        yield store
        store.close()


def test_what_is_written_is_read_back(store: WeightStore) -> None:
    store.declare("m", "q8_0", (64, 6))
    store.declare("v", "f32", (3,))
    store.allocate()
    raw = np.random.default_rng(0).integers(0, 256, (6, 68), dtype=np.uint8)
    store.write("m", raw[:4])
    store.write("m", raw[4:], first_row=4)
    store.write("v", np.array([1, 2, 3], dtype=np.float32))
    assert (store["m"].read_rows(0, 6) == raw).all()
    assert (store["m"].read_rows(2, 1) == raw[2:3]).all()
    assert store["v"].read_rows(0, 1).view(np.float32).tolist() == [[1, 2, 3]]
    assert "m" in store and "x" not in store
    assert store.byte_size >= 6 * 68 + 12
    assert store["m"].is_readable and store["m"].buffer_name == "CPU"
    store.clear()
    assert not store["m"].read_rows(0, 6).any()


def test_a_foreign_tensor_shows_shape_type_and_name(store: WeightStore) -> None:
    declared = store.declare("embedding", "q4_1", (32, 5))
    store.allocate()
    seen = Tensor.foreign(declared.pointer, owner=store)
    assert (seen.ne, seen.type_name, seen.name) == ((32, 5, 1, 1), "q4_1", "embedding")
    assert seen.byte_size == 5 * 20 and seen.is_contiguous
    store.close()
    with pytest.raises(ClosedError, match="'embedding'"):
        seen.read_rows(0, 1)


def test_mistakes_are_sentences(store: WeightStore) -> None:
    store.declare("m", "f32", (4, 3))
    with pytest.raises(UsageError, match="'m' was declared twice"):
        store.declare("m", "f32", (4, 3))
    with pytest.raises(UsageError, match="row of 33 elements cannot be q8_0"):
        store.declare("q", "q8_0", (33, 2))
    with pytest.raises(UsageError, match="1 to 4 positive dimensions"):
        store.declare("z", "f32", (4, 0))
    with pytest.raises(UsageError, match="before allocate"):
        store.write("m", np.zeros((3, 4), dtype=np.float32))
    with pytest.raises(UsageError, match="no tensor 'n'"):
        store["n"]
    store.allocate()
    with pytest.raises(UsageError, match="after the store was allocated"):
        store.declare("late", "f32", (1,))
    for first, rows in ((0, 4), (2, 2), (-1, 1)):
        with pytest.raises(UsageError, match="do not fit 'm', which has 48 bytes in rows of 16"):
            store.write("m", np.zeros((rows, 4), dtype=np.float32), first_row=first)
    with pytest.raises(UsageError, match=r"rows 2 to 4 are outside of \(4, 3"):
        store["m"].read_rows(2, 2)


def test_a_store_holds_as_many_tensors_as_it_was_made_for(store: WeightStore) -> None:
    for i in range(4):
        store.declare(f"t{i}", "f32", (1,))
    with pytest.raises(UsageError, match="made for 4 tensors, 't4' is more"):
        store.declare("t4", "f32", (1,))


def test_a_closed_store_refuses_everything(store: WeightStore) -> None:
    tensor = store.declare("t", "f32", (4,))
    store.allocate()
    store.close()
    store.close()
    for use in (store.allocate, store.clear, lambda: store["t"], tensor.check_open):
        with pytest.raises(ClosedError):
            use()


def test_quantised_rows_are_those_of_the_format() -> None:
    values = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    raw = quantise(values, "q8_0")
    scale = raw[:, :2].copy().view(np.float16).astype(np.float32)
    assert scale.reshape(-1) == pytest.approx(np.abs(values).max(1) / 127, rel=1e-3)
    decoded = scale * raw[:, 2:].view(np.int8)
    assert np.abs(decoded - values).max() <= scale.max() / 2 * 1.01


def test_types_that_need_statistics_are_refused() -> None:
    for name in ("iq2_xxs", "i8"):
        with pytest.raises(UsageError, match=f"{name} cannot be made here"):
            quantise(np.zeros((1, 256), dtype=np.float32), name)


def test_host_tensors_check_their_bytes() -> None:
    assert HostTensor.from_numpy(np.zeros((2, 3), dtype=np.float16)).ne == (3, 2)
    with pytest.raises(UsageError, match=r"q8_0 tensor of shape \(32, 2\) takes 68 bytes, 67"):
        HostTensor(type_by_name("q8_0"), (32, 2), np.zeros(67, dtype=np.uint8))
    with pytest.raises(UsageError, match="arrays of float64"):
        HostTensor.from_numpy(np.zeros(3))
