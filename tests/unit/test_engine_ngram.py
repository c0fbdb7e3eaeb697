"""Lookup in the running context and the table, against slow and obvious oracles."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine.engine.ngram import MAX_CANDIDATES, Match, NgramIndex
from dspine.engine.ngram_table import NgramTable, build_table
from dspine.errors import FileError, UsageError


def longest_match(tokens: list[int], least: int) -> Match | None:
    """Every earlier place is compared; the newest of the longest wins."""
    best: Match | None = None
    for start in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < start and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= least and (best is None or length > best.length):
            best = Match(start, length)
    return best


def test_the_longest_match_wins_over_a_newer_shorter_one() -> None:
    index = NgramIndex(2)
    index.extend([7, 1, 2, 3, 4, 5, 9, 2, 3, 6, 1, 2, 3])
    # "1 2 3" before index 4, "2 3" before index 9: the longer one is older.
    assert index.find() == Match(4, 3)
    assert index.continuation(4, 3) == [4, 5, 9]


def test_a_match_of_the_text_with_itself_goes_on_periodically() -> None:
    index = NgramIndex(2)
    index.extend([1, 2, 1, 2, 1, 2])
    assert index.find() == Match(4, 4)
    assert index.continuation(4, 5) == [1, 2, 1, 2, 1]


def test_nothing_is_found_in_short_or_new_text() -> None:
    index = NgramIndex(2)
    assert index.find() is None
    index.extend([1])
    assert index.find() is None
    index.extend([2, 3])
    assert index.find() is None


def test_a_minimum_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        NgramIndex(0)


@given(
    st.lists(st.integers(0, 2), max_size=MAX_CANDIDATES + 2),
    st.integers(1, 4),
)
def test_find_equals_a_full_search(tokens: list[int], least: int) -> None:
    index = NgramIndex(least)
    index.extend(tokens)
    assert index.find() == longest_match(tokens, least)


@given(
    st.lists(st.integers(0, 2), max_size=MAX_CANDIDATES + 2),
    st.lists(st.integers(0, 2), max_size=5),
    st.integers(1, 4),
)
def test_find_after_a_tail_equals_a_full_search_of_the_text(
    tokens: list[int], tail: list[int], least: int
) -> None:
    index = NgramIndex(least)
    index.extend(tokens)
    found = index.find(tail)
    best: Match | None = None
    whole = [*tokens, *tail]
    # The place ahead of which the match stands lies in the text, the tail is not searched.
    for start in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < start and tokens[start - 1 - length] == whole[-1 - length]:
            length += 1
        if length >= least and (best is None or length > best.length):
            best = Match(start, length)
    assert found == best
    assert index.tokens == tokens
    if found is not None:
        ahead = index.continuation(found.start, 12, tail)
        endless = [*whole]
        for _ in range(12):
            endless.append(endless[found.start - len(whole)])
        assert ahead == endless[found.start : found.start + 12]


@given(st.lists(st.integers(0, 1), max_size=40), st.integers(0, 40), st.integers(1, 3))
def test_truncating_equals_never_having_seen_the_rest(
    tokens: list[int], length: int, least: int
) -> None:
    index, fresh = NgramIndex(least), NgramIndex(least)
    index.extend(tokens)
    index.truncate(length)
    fresh.extend(tokens[:length])
    assert index.tokens == fresh.tokens
    for more in ([0], [1], [1, 0]):
        index.extend(more)
        fresh.extend(more)
        assert index.find() == fresh.find()


@given(st.lists(st.lists(st.integers(0, 3), max_size=25), max_size=4), st.integers(1, 3))
def test_the_table_holds_what_counting_gives(streams: list[list[int]], least: int) -> None:
    table = build_table(streams, min_count=least, min_probability=0.0)
    follow: dict[tuple[int, ...], Counter[int]] = {}
    for stream in streams:
        for order in (1, 2, 3):
            for at in range(order, len(stream)):
                follow.setdefault(tuple(stream[at - order : at]), Counter())[stream[at]] += 1
    for context, counts in follow.items():
        best = max(counts.values())
        known = table.after(context)
        if best >= least:
            assert known is not None and known.order == len(context)
            assert counts[known.token] == best
            expected = (best / (counts.total() + 1)) ** {1: 2.3, 2: 1.7, 3: 1.1}[len(context)]
            assert known.probability == pytest.approx(expected, abs=0.003)
        else:
            assert known is None or known.order < len(context)


def test_the_table_prefers_long_contexts_and_passes_over_doubtful_ones() -> None:
    table = build_table(
        [[1, 2, 3, 4]] * 9 + [[5, 2, 3, 6]] * 2 + [[9, 2, 3, 7]], min_count=1, min_probability=0.0
    )
    first = table.after([1, 2, 3])
    assert first is not None
    assert (first.token, first.order) == (4, 3)
    assert first.probability == pytest.approx(0.9**1.1, abs=0.003)
    doubtful = table.after([9, 2, 3], least=0.5)
    assert doubtful is not None
    assert (doubtful.token, doubtful.order) == (4, 2)
    assert table.after([3, 3, 3], least=0.9) is None
    assert table.after([]) is None


def test_a_limit_keeps_the_entries_seen_most() -> None:
    table = build_table([[1, 2]] * 5 + [[3, 4]] * 2, min_probability=0.0, max_entries=1)
    assert len(table) == 1
    assert table.after([1]) is not None and table.after([3]) is None


def test_save_and_load(tmp_path: Path) -> None:
    table = build_table([[1, 2, 3, 1, 2, 3, 1, 2]], min_probability=0.0)
    table.save(tmp_path / "t.ngram.npz")
    again = NgramTable.load(tmp_path / "t.ngram.npz")
    assert np.array_equal(again.keys, table.keys) and len(again) > 0
    assert again.after([1, 2]) == table.after([1, 2])
    assert [file.name for file in tmp_path.iterdir()] == ["t.ngram.npz"]


def test_damaged_tables_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with pytest.raises(FileError, match="does not exist"):
        NgramTable.load(path)
    path.write_bytes(b"not a table")
    with pytest.raises(FileError, match="readable"):
        NgramTable.load(path)
    build_table([[1, 2, 3] * 30], min_probability=0.0).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match="readable"):
        NgramTable.load(path)
    np.savez(path, keys=np.zeros(3, np.uint64))
    with pytest.raises(FileError, match="tokens"):
        NgramTable.load(path)
    np.savez(
        path,
        format=np.array(1, np.int32),
        keys=np.array([2, 1], np.uint64),
        tokens=np.zeros(2, np.int32),
        confidences=np.zeros(2, np.uint8),
    )
    with pytest.raises(FileError, match="order"):
        NgramTable.load(path)
    np.savez(
        path,
        format=np.array(1, np.int32),
        keys=np.array([1, 2], np.uint64),
        tokens=np.array([7, -1], np.int32),
        confidences=np.zeros(2, np.uint8),
    )
    with pytest.raises(FileError, match="negative token"):
        NgramTable.load(path)


def test_any_damaged_byte_is_told_as_such_or_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    table = build_table([[1, 2, 3] * 30], min_probability=0.0)
    table.save(path)
    whole = path.read_bytes()
    told: list[str] = []
    for index in range(len(whole)):
        for changed in {whole[index] ^ 1, whole[index] ^ 8, 255} - {whole[index]}:
            path.write_bytes(whole[:index] + bytes([changed]) + whole[index + 1 :])
            try:
                loaded = NgramTable.load(path)
            except FileError as error:
                told.append(str(error))
            else:
                assert loaded.tokens.tolist() == table.tokens.tolist()
    assert len(told) > len(whole)
    assert all("n-gram table" in text or "damaged" in text for text in told)


def test_a_token_too_large_for_a_key_is_refused() -> None:
    with pytest.raises(UsageError, match="token ids"):
        build_table([[1, 1 << 21]])
