"""Lookups in one native call a step, against those of Python."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.ggml.ngram import FIRST_ROOM, NativeTable, NativeText
from tests.support.native_calls import compiled
from tests.support.native_lookups import Move, difference, random_differences, table_of

__all__ = ["compiled"]

TOKENS = st.lists(st.integers(0, 3), max_size=12)
MOVES = st.builds(
    Move, TOKENS, st.integers(1, 2 * FIRST_ROOM), TOKENS, st.sampled_from((1.0, 0.7, 0.0))
)


@settings(max_examples=500, deadline=None)
@given(
    moves=st.lists(MOVES, max_size=8),
    min_match=st.integers(1, 4),
    streams=st.lists(TOKENS, max_size=3),
    least=st.sampled_from((0.0, 0.3)),
)
def test_they_find_what_python_finds(
    moves: Sequence[Move],
    min_match: int,
    streams: Sequence[Sequence[int]],
    least: float,
    compiled: ctypes.CDLL,
) -> None:
    table = table_of(streams)
    assert difference(compiled, moves, min_match=min_match, table=table, least=least) is None


@pytest.mark.parametrize("seed", range(4))
def test_they_do_in_long_texts(seed: int, compiled: ctypes.CDLL) -> None:
    """Where the index grows several times, and with tables of some hundred entries."""
    assert not list(random_differences(compiled, np.random.default_rng(seed), 8))


def test_matches_longer_than_those_told_apart(compiled: ctypes.CDLL) -> None:
    text = [*range(100), *range(100), *range(50)]
    moves = [Move(text, 20, [50, 51]), Move([50], 3, [])]
    for min_match in (1, 32, 40):
        assert not difference(compiled, moves, min_match=min_match, table=None, least=0.0)


def test_tokens_of_the_largest_vocabulary(compiled: ctypes.CDLL) -> None:
    top = (1 << 21) - 2
    stream = [top, top - 1, top, 0, top, top - 1, top, 0]
    moves = [Move(stream[:3], 4, [0, top]), Move([0], 4, [])]
    table = table_of([stream])
    assert not difference(compiled, moves, min_match=2, table=table, least=0.0)


def test_memory_is_given_back(compiled: ctypes.CDLL) -> None:
    """The table only after the last text that is continued by it."""
    known = table_of([[1, 2, 3] * 4])
    assert known is not None
    table = NativeTable(compiled, known.keys, known.tokens, known.confidences)
    text = NativeText(
        compiled, table, matches=(2, 4, 4), scores=[0.5] * 5, least=0.0, least_reach=0.1
    )
    kept = weakref.ref(table)
    del table
    gc.collect()
    assert kept() is not None
    text.extend([1, 2])
    assert text.look_up(1)[0] == (3,)
    del text
    gc.collect()
    assert kept() is None


AT_EXIT = """
import atexit, ctypes, sys
from dspine.ggml.ngram import NativeTable, NativeText
from tests.support.native_lookups import table_of

def late():
    print(text.look_up(1)[0], flush=True)

atexit.register(late)
library = ctypes.CDLL(sys.argv[1])
known = table_of([[1, 2, 3] * 4])
table = NativeTable(library, known.keys, known.tokens, known.confidences)
text = NativeText(library, table, matches=(2, 4, 4), scores=[0.5] * 5, least=0.0, least_reach=0.1)
text.extend([1, 2])
"""


def test_memory_is_there_for_threads_that_outlive_the_main_one(compiled: ctypes.CDLL) -> None:
    """What is freed is overwritten at once here, so that its use would be seen."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, compiled._name],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "MALLOC_PERTURB_": "165", "GLIBC_TUNABLES": "glibc.malloc.perturb=165"},
    )
    assert (done.returncode, done.stdout) == (0, "(3,)\n"), done.stderr
