"""Stop strings over token borders; the oracle searches the whole text at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine.errors import UsageError
from dspine.text.stop import StopFinder


def feed(finder: StopFinder, parts: list[str]) -> tuple[str, bool]:
    shown = ""
    for part in parts:
        text, stopped = finder.push(part)
        shown += text
        if stopped:
            return shown, True
    return shown + finder.flush(), False


def test_a_stop_string_over_three_tokens_is_cut() -> None:
    finder = StopFinder(["\nUser:"])
    assert finder.push("Hello\n") == ("Hello", False)
    assert finder.push("Us") == ("", False)
    assert finder.push("er: more") == ("", True)


def test_text_that_only_looked_like_a_stop_string_comes_out_later() -> None:
    finder = StopFinder(["END"])
    assert finder.push("xEN") == ("x", False)
    assert finder.push("EN") == ("EN", False)
    assert finder.flush() == "EN"


def test_the_first_of_two_stop_strings_wins() -> None:
    assert StopFinder(["cd", "b"]).push("abcd") == ("a", True)


def test_one_text_is_one_stop_string_and_not_its_characters() -> None:
    assert StopFinder("ab").push("xbax") == ("xbax", False)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopFinder(["a", ""])


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=1), max_size=30),
)
def test_characters_one_by_one_give_what_a_search_of_the_text_gives(
    stops: list[str], parts: list[str]
) -> None:
    text = "".join(parts)
    ends = {text.find(stop) + len(stop): text.find(stop) for stop in stops if stop in text}
    if ends:
        first_end = min(ends)
        start = min(text.find(s) for s in stops if s in text[:first_end])
        expected = (text[:start], True)
    else:
        expected = (text, False)
    assert feed(StopFinder(stops), parts) == expected
