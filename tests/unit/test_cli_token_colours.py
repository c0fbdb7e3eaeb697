"""Who wrote what of a streamed text: split by token, whole as text."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine.cli.token_colours import MARKS, TokenColours, has_colour, legend
from dspine.engine.emit import Emitter
from dspine.engine.events import Step

END = 0
PIECES = [b"", b"a", b"bc", "\u00e9".encode()[:1], "\u00e9".encode()[1:], b" ", b"\xff", b"END"]


def step(tokens: tuple[int, ...], text: str, drafted: int, accepted: int) -> Step:
    return Step(tokens, text, drafted, accepted, "dspine", 0.0, 0.0, 0.0)


def shown(*steps: Step, colour: bool = False) -> list[str]:
    colours = TokenColours(PIECES.__getitem__, colour=colour)
    return [colours.show(one) for one in steps]


def test_accepted_bonus_and_plain_tokens_are_told_apart() -> None:
    assert shown(step((1, 2, 1), "abca", 3, 2), step((2,), "bc", 0, 0), step((1,), "a", 2, 0)) == [
        "\u2039abc\u203a\u00aba\u00bb",
        "bc",
        "\u00aba\u00bb",
    ]


def test_an_answer_that_ends_on_a_draft_has_no_bonus() -> None:
    assert shown(step((1, 2), "abc", 3, 2)) == ["\u2039abc\u203a"]


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    assert shown(step((1, 3), "a", 1, 1), step((4, 1), "\u00e9a", 1, 1)) == [
        "\u2039a\u203a",
        "\u2039\u00e9\u203a\u00aba\u00bb",
    ]


def test_text_held_back_keeps_its_writer() -> None:
    # "bc" might become a stop string and is shown with the next step, in which it is plain text.
    assert shown(step((1, 2), "ab", 1, 1), step((1,), "ca", 0, 0)) == [
        "\u2039a\u203a\u00abb\u00bb",
        "\u00abc\u00bba",
    ]


def test_colours_end_where_the_step_ends() -> None:
    assert shown(step((1, 2), "abc", 1, 1), colour=True) == ["\x1b[32ma\x1b[0m\x1b[33mbc\x1b[0m"]
    assert legend(colour=True).count("\x1b[0m") == 2
    assert "\x1b" not in legend(colour=False)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, len(PIECES) - 1), min_size=1, max_size=5), st.booleans()),
        max_size=8,
    ),
    st.sampled_from([(), ("END",), ("ab", "cE")]),
)
def test_without_its_marks_the_text_is_that_of_the_engine(
    blocks: list[tuple[list[int], bool]], stop: tuple[str, ...]
) -> None:
    emitter = Emitter(PIECES.__getitem__, lambda t: t == END, max_tokens=None, stop=stop)
    colours = TokenColours(PIECES.__getitem__, colour=False)
    whole, marked = "", ""
    reason = None
    for block, drafted in [*blocks, ([END], False)]:
        tokens = list[int]()
        for token in block:
            tokens.append(token)
            if reason := emitter.push(token):
                break
        text = emitter.finish_text() if reason else emitter.take_text()
        accepted = len(tokens) - 1 if drafted else 0
        marked += colours.show(step(tuple(tokens), text, accepted + drafted, accepted))
        whole += text
        if reason:
            break
    assert reason == "stop"
    for before, after in MARKS.values():
        marked = marked.replace(before, "").replace(after, "")
    assert marked == whole


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environment", "expected"),
    [
        (Terminal(), {}, True),
        (Terminal(), {"TERM": "xterm"}, True),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
        (Terminal(), {"TERM": "dumb"}, False),
        (io.StringIO(), {}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    stream: io.StringIO, environment: dict[str, str], expected: bool
) -> None:
    assert has_colour(stream, environment) is expected
