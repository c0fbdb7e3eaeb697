"""Bytes become text only when a character is whole."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dspine.text.detokenise import Detokeniser

PIECES = [b"a", b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", b"\xff", b""]


def test_a_character_split_over_tokens_appears_once_it_is_whole() -> None:
    text = Detokeniser(PIECES.__getitem__)
    assert [text.push(t) for t in (0, 1, 2, 3, 4)] == ["a", "", "€", "", "😀"]
    assert text.flush() == ""


def test_bytes_that_never_become_a_character_are_replaced() -> None:
    text = Detokeniser(PIECES.__getitem__)
    assert text.push(1) == ""
    assert text.push(0) == "\N{REPLACEMENT CHARACTER}a"
    assert text.push(5) == "\N{REPLACEMENT CHARACTER}"
    assert text.push(3) == ""
    assert text.flush() == "\N{REPLACEMENT CHARACTER}"
    assert text.flush() == ""


def test_restore_forgets_what_came_after_the_mark() -> None:
    text = Detokeniser(PIECES.__getitem__)
    text.push(1)
    mark = text.held
    assert text.push(2) == "€"
    text.held = mark
    assert text.push(2) == "€"


@given(st.text(max_size=20), st.data())
def test_any_cut_of_a_text_gives_the_text(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    bounds = [0, *cuts, len(raw)]
    pieces = [raw[a:b] for a, b in pairwise(bounds)]
    stream = Detokeniser(pieces.__getitem__)
    parts = [stream.push(token) for token in range(len(pieces))]
    assert "".join(parts) + stream.flush() == text
