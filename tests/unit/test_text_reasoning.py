"""Thoughts and answers, however the text is cut into pieces."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine.text.reasoning import ReasoningSplitter


def split(pieces: list[str], *, open_at_start: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(open_at_start=open_at_start)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts)


@pytest.mark.parametrize(
    ("text", "is_open", "thought", "answer"),
    [
        ("<think>\nHm, 2.\n</think>\n\nTwo.", False, "Hm, 2.", "Two."),
        ("Hm, 2.\n</think>\n\nTwo.", True, "Hm, 2.", "Two."),
        ("\n <think>a  b</think>c", False, "a  b", "c"),
        ("Two <think>x</think>", False, "", "Two <think>x</think>"),
        ("<think>never ends ", False, "never ends", ""),
        ("<thin", False, "", "<thin"),
        ("<think></think>Two", False, "", "Two"),
        ("a < b </thinker></think> c", True, "a < b </thinker>", "c"),
        ("  plain", False, "", "  plain"),
        ("", False, "", ""),
    ],
)
def test_each_form(text: str, is_open: bool, thought: str, answer: str) -> None:
    assert split([text], open_at_start=is_open) == (thought, answer)
    assert split(list(text), open_at_start=is_open) == (thought, answer)


@given(
    st.text(alphabet="<>/think \nab", max_size=40),
    st.booleans(),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_pieces_do_not_matter(text: str, is_open: bool, cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert split(pieces, open_at_start=is_open) == split([text], open_at_start=is_open)


def test_thoughts_come_as_they_are_made() -> None:
    splitter = ReasoningSplitter()
    assert splitter.push("<think>one") == ("one", "")
    assert splitter.push(" two") == (" two", "")
    assert splitter.push(" three </thi") == (" three", "")
    assert splitter.push("nk> four") == ("", "four")
    assert splitter.push(" five") == ("", " five")
