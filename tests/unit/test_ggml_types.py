"""The table of tensor types, without the library."""

from __future__ import annotations

import pytest

from dspine.errors import UsageError
from dspine.ggml.types import all_types, row_bytes, type_by_name, type_by_number


def test_bytes_of_a_row_count_whole_blocks() -> None:
    # Q8_0: 32 values and an f16 scale; Q4_1: 32 half bytes, an f16 scale and an f16 minimum.
    assert row_bytes("f32", 576) == 2304
    assert row_bytes("q8_0", 576) == 576 // 32 * (32 + 2)
    assert row_bytes("q4_1", 64) == 2 * (16 + 2 + 2)
    assert row_bytes("bf16", 3) == 6


def test_a_row_that_is_no_multiple_of_a_block_is_refused() -> None:
    with pytest.raises(UsageError, match=r"row of 576 elements cannot be q4_k.*256"):
        row_bytes("q4_k", 576)


def test_names_are_found_in_any_case_and_numbers_are_those_of_gguf() -> None:
    assert type_by_name("Q4_K") is type_by_name("q4_k")
    assert [type_by_number(n).name for n in (0, 1, 8, 26, 30)] == [
        *("f32", "f16", "q8_0", "i32", "bf16")
    ]


@pytest.mark.parametrize("number", [4, 5, 31, 99])
def test_unknown_and_retired_numbers_are_refused(number: int) -> None:
    with pytest.raises(UsageError, match=str(number)):
        type_by_number(number)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'q9_9' is not a tensor type.*q8_0"):
        type_by_name("q9_9")


def test_names_and_numbers_are_unique() -> None:
    types = all_types()
    assert len({t.name for t in types}) == len({t.number for t in types}) == len(types)
