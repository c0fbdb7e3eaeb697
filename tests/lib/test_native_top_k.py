"""The largest values of rows, chosen by the CPU kernels, against NumPy's order and ggml's."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.kernels.status import SWITCH
from dspine.llama.library import find_library
from tests.support import native_top_k
from tests.support.native_calls import compiled
from tests.support.native_top_k import MOST, chosen, expected, special_rows

__all__ = ["compiled"]

_ROOT = Path(__file__).parents[2]
_LENGTHS = (*range(1, 36), 63, 64, 65, 191, 192, 193, 12287, 12288, 12319)
"""Around a vector, a step of four, the room for what is found, and a drafter's vocabulary."""
_WITHOUT = """
import sys
from dspine.ggml import kernels
from tests.support.native_random import main

known = kernels._operations
kernels._operations = lambda stock: {**known(stock), "TOP_K": -1}
sys.exit(main(sys.argv[1:]))
"""

VALUES = st.one_of(
    st.sampled_from((0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"))),
    st.floats(width=32),
)


def test_the_order_that_is_expected() -> None:
    inf, nan = float("inf"), float("nan")
    values = np.array([nan, 0.0, -inf, 2.0, -0.0, nan, 2.0, inf], dtype=np.float32)
    assert expected(values, 8).tolist() == [7, 3, 6, 1, 4, 2, 0, 5]


@pytest.mark.parametrize("kind", special_rows(np.random.default_rng(0), 1))
def test_special_rows(kind: str, compiled: ctypes.CDLL) -> None:
    rng = np.random.default_rng(1)
    for count in _LENGTHS:
        values = special_rows(rng, count)[kind]
        for k in {1, 2, 16, 32, MOST - 1, MOST, min(count, MOST)}:
            if k <= count:
                found = chosen(compiled, values, k)
                assert found.tolist() == expected(values, k).tolist(), f"{k} of {count}"


@settings(max_examples=500, deadline=None)
@given(values=st.lists(VALUES, min_size=1, max_size=300), repeats=st.integers(1, 8), k=st.data())
def test_any_rows(
    values: list[float], repeats: int, k: st.DataObject, compiled: ctypes.CDLL
) -> None:
    row = np.array(values * repeats, dtype=np.float32)
    most = k.draw(st.integers(1, min(MOST, len(row))))
    assert chosen(compiled, row, most).tolist() == expected(row, most).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_random_rows(seed: int, compiled: ctypes.CDLL) -> None:
    assert not list(native_top_k.differences(compiled, np.random.default_rng(seed), 300))


def test_another_choice_is_noticed(compiled: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        native_top_k, "expected", lambda values, k: np.argsort(-values, kind="stable")[:k][::-1]
    )
    assert list(native_top_k.differences(compiled, np.random.default_rng(0), 20))


def test_graphs_choose_them(compiled: ctypes.CDLL) -> None:
    """Rows of matrices and of views, shared among threads, in the order of the kernels."""
    assert _differences(compiled, "-m", "tests.support.native_random") == []


def test_without_the_operation_everything_is_left_to_ggml(compiled: ctypes.CDLL) -> None:
    """Its order is another, so nearly every case differs."""
    assert len(_differences(compiled, "-c", _WITHOUT)) > 10


def _differences(kernels: ctypes.CDLL, *script: str) -> list[str]:
    arguments = ("rows_of_top_k", kernels._name, str(find_library().path), "3", "40")
    done = subprocess.run(
        [sys.executable, *script, *arguments],
        cwd=_ROOT,
        env={**os.environ, SWITCH: "avx2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found
