"""What is done in one native call of its own, against NumPy and Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.drafters.backbone.chain import Chain
from dspine.ggml.walk import NativeWalk
from dspine.llama.results import BestTokens, tap_copy
from tests.support.native_calls import compiled

__all__ = ["compiled"]

RowOf = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32)


def expected(logits: npt.NDArray[np.float32], first: int, drafts: Sequence[int]) -> list[int]:
    """The choices row by row; none where a row that counts has something that is no number."""
    found: list[int] = []
    for row, draft in enumerate((*drafts, -1), first):
        if np.isnan(logits[row]).any():
            return []
        found.append(int(logits[row].argmax()))
        if found[-1] != draft:
            break
    return found


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_the_best_tokens_are_those_of_numpy(data: st.DataObject, compiled: ctypes.CDLL) -> None:
    """Sizes around blocks and vectors, many ties, infinities, and values that are no numbers."""
    size = data.draw(st.sampled_from((1, 2, 15, 16, 17, 1000, 1023, 1024, 1025, 2047, 3001)))
    rows, seed = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 2**32 - 1))
    chance = np.random.default_rng(seed)
    levels = data.draw(st.sampled_from((1, 2, 5, 10**6)))
    logits = (chance.integers(-levels, levels, (rows, size)) / 7).astype(np.float32)
    special = data.draw(st.sampled_from((None, np.inf, -np.inf, np.nan)))
    if special is not None:
        at = chance.integers(0, rows * size, data.draw(st.integers(1, 3)))
        logits.reshape(-1)[at] = special
    if data.draw(st.booleans()):
        logits[chance.integers(rows)] = -np.inf
    first = data.draw(st.integers(0, rows - 1))
    # Mostly right drafts, so that the later rows count.
    drafts = [
        int(np.nan_to_num(row, nan=0.0).argmax()) if chance.random() < 0.8 else 0
        for row in logits[first : rows - 1]
    ]
    address = logits.ctypes.data

    row_of = RowOf(lambda _context, row: address + 4 * size * row)
    reader = BestTokens(compiled, row_of, rows, size)
    assert list(reader.follow(0, first, drafts)) == expected(logits, first, drafts)


def test_a_row_without_logits_gives_nothing(compiled: ctypes.CDLL) -> None:
    row_of = RowOf(lambda _context, _row: 0)
    assert BestTokens(compiled, row_of, 3, 8).follow(0, 0, [1, 2]) == []


@pytest.mark.parametrize("missing", [None, 0, 2])
def test_taps_are_copied_row_by_row(missing: int | None, compiled: ctypes.CDLL) -> None:
    """Layers 3, 7, 9 of 4 rows; rows 1 and 2 go to the end of the room."""
    layers, size = (3, 7, 9), 5
    values = np.random.default_rng(1).normal(size=(len(layers), 4, size)).astype(np.float32)

    def address(_context: int, layer: int) -> int:
        place = layers.index(layer)
        return 0 if place == missing else values[place].ctypes.data

    rows_of = RowOf(address)
    out = np.zeros((3, len(layers) * size), np.float32)
    copied = tap_copy(compiled, 0, rows_of, layers, 4 * size)(1, 2, out[1:].ctypes.data)
    assert copied == (len(layers) if missing is None else missing)
    if missing is None:
        assert not out[0].any()
        assert np.array_equal(out[1:], values[:, 1:3].transpose(1, 0, 2).reshape(2, -1))


@settings(max_examples=200, deadline=None)
@given(
    slots=st.integers(1, 7),
    k=st.sampled_from((1, 2, 16)),
    seed=st.integers(0, 9999),
    ties=st.booleans(),
)
def test_the_walk_is_that_of_python(
    slots: int, k: int, seed: int, ties: bool, compiled: ctypes.CDLL
) -> None:
    chance = np.random.default_rng(seed)
    ids = chance.integers(0, 50_000, (slots, k)).astype(np.int32)
    scores = chance.normal(0, 4, k + (slots - 1) * k * k).astype(np.float32)
    scores = scores.round() if ties else scores
    first, table = scores[:k].copy(), scores[k:].reshape(slots - 1, k, k).copy()
    expected = Chain(ids, first, table).walk()
    tokens, found = NativeWalk(compiled, ids, first, table).best()
    assert tokens == expected.tokens
    assert found == pytest.approx(expected.scores, rel=1e-12)


def test_a_walk_over_what_is_no_number_is_an_error(compiled: ctypes.CDLL) -> None:
    ids, table = np.zeros((1, 3), np.int32), np.zeros((0, 3, 3), np.float32)
    for odd in (np.nan, np.inf):
        walk = NativeWalk(compiled, ids, np.array([0, odd, 1], np.float32), table)
        with pytest.raises(FloatingPointError, match="not numbers"):
            walk.best()
