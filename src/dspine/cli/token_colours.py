"""Shows who wrote each token of a streamed answer: an accepted draft, a bonus token, or neither."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal, TextIO

import click

from dspine.engine.events import Step
from dspine.text.detokenise import Detokeniser

Writer = Literal["accepted", "bonus", "plain"]
MARKS = {"accepted": ("\u2039", "\u203a"), "bonus": ("\u00ab", "\u00bb")}
"""Angle quotes, single and double: rare in answers, and in every font."""
COLOURS = {"accepted": "green", "bonus": "yellow"}
LEGEND: dict[Writer, str] = {
    "accepted": "accepted draft",
    "bonus": "bonus token, the target's own after drafts",
    "plain": "step without drafts",
}


class TokenColours:
    """Splits the text of steps by token. One object serves one answer.

    The text of a step may begin in an earlier one and end before its tokens do (half characters,
    text that may become a stop string), so what tokens say waits until a step shows it.
    """

    def __init__(self, piece: Callable[[int], bytes], *, colour: bool) -> None:
        """`piece` gives the bytes of a token; without `colour` there are marks."""
        self._detokeniser = Detokeniser(piece)
        self._colour = colour
        self._waiting: deque[tuple[int, Writer]] = deque()
        self._last: Writer = "plain"

    def show(self, step: Step) -> str:
        """The step's text with colours or marks; all of them end where it ends."""
        for index, token in enumerate(step.tokens):
            if count := len(self._detokeniser.push(token)):
                self._waiting.append((count, writer_of(step, index)))
        shown: list[tuple[str, Writer]] = []
        text = step.text
        while text:
            # Beyond all tokens is only what a broken character at the end became.
            count, writer = self._waiting.popleft() if self._waiting else (len(text), self._last)
            if count > len(text):
                self._waiting.appendleft((count - len(text), writer))
            now, text = text[:count], text[count:]
            if shown and shown[-1][1] == writer:
                now = shown.pop()[0] + now
            shown.append((now, writer))
            self._last = writer
        return "".join(dressed(part, writer, colour=self._colour) for part, writer in shown)


def writer_of(step: Step, index: int) -> Writer:
    """Who wrote token number `index` of a step."""
    if index < step.accepted:
        return "accepted"
    return "bonus" if step.drafted else "plain"


def dressed(text: str, writer: Writer, *, colour: bool) -> str:
    if writer == "plain":
        return text
    if colour:
        return click.style(text, fg=COLOURS[writer])
    before, after = MARKS[writer]
    return f"{before}{text}{after}"


def legend(*, colour: bool) -> str:
    """One line that explains the colours or marks."""
    return ", ".join(dressed(text, writer, colour=colour) for writer, text in LEGEND.items())


def has_colour(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether colours may be written there: a terminal that has them, and no NO_COLOR."""
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return stream.isatty()
