"""Lookups of the kernels and of Python side by side: do they find the same?"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dspine.engine.lookups import LEAST_REACH, NativeLookups, PythonLookups, lookup_scores
from dspine.engine.ngram import MAX_CANDIDATES, MAX_MATCH, NgramIndex
from dspine.engine.ngram_table import NgramTable, build_table
from dspine.engine.proposal import Proposal
from dspine.ggml.ngram import NativeTable, NativeText


class Move(NamedTuple):
    """Tokens that are added, then lookups of at most `most` drafts, one of them after a tail, and a
    cut that leaves `share` of the text.
    """

    tokens: Sequence[int]
    most: int
    tail: Sequence[int]
    share: float = 1.0


def table_of(streams: Sequence[Sequence[int]]) -> NgramTable | None:
    """A table of what these hold, None where there are none."""
    return build_table(streams, min_count=1, min_probability=0.0) if streams else None


def difference(
    library: ctypes.CDLL,
    moves: Iterable[Move],
    *,
    min_match: int,
    table: NgramTable | None,
    least: float,
) -> str | None:
    """What the two do not agree about; None where they agree about everything."""
    plain = PythonLookups(NgramIndex(min_match), table, least)
    native = NativeLookups(
        NativeText(
            library,
            None
            if table is None
            else NativeTable(library, table.keys, table.tokens, table.confidences),
            matches=(min_match, MAX_MATCH, MAX_CANDIDATES),
            scores=lookup_scores(0, MAX_MATCH + 1),
            least=least,
            least_reach=LEAST_REACH,
        )
    )
    for move in moves:
        drafted = Proposal(tuple(move.tail), (0.5,) * len(move.tail), "dspine")
        plain.extend(move.tokens)
        native.extend(move.tokens)
        for expected, found in (
            (plain.look_up(move.most), native.look_up(move.most)),
            (plain.continued(drafted, move.most), native.continued(drafted, move.most)),
            (list(plain.tokens), list(native.tokens)),
        ):
            if expected != found:
                return f"{found} after {list(plain.tokens)}, not {expected} ({move}, {min_match})"
        length = round(move.share * len(plain.tokens))
        plain.truncate(length)
        native.truncate(length)
    return None


def random_differences(library: ctypes.CDLL, rng: np.random.Generator, count: int) -> Iterator[str]:
    """The same over `count` long texts of few different tokens."""
    for _ in range(count):
        kinds = int(rng.integers(2, 60))

        def some(most: int, kinds: int = kinds) -> list[int]:
            tokens: list[int] = rng.integers(0, kinds, int(rng.integers(0, most))).tolist()
            return tokens

        found = difference(
            library,
            (
                Move(some(30), int(rng.integers(1, 40)), some(6), float(rng.choice((1.0, 0.9))))
                for _ in range(60)
            ),
            min_match=int(rng.integers(1, 5)),
            table=table_of([some(400) for _ in range(3)]),
            least=0.1,
        )
        if found is not None:
            yield found
