"""Splits a stream of text into thoughts and answer, at the marks that reasoning models write."""

from __future__ import annotations

from dspine.text.stop import possible_prefix

OPEN, CLOSE = "<think>", "</think>"
SWITCH = "enable_thinking"
"""Variable of chat templates that says whether the model is to reason first."""


def expects_thoughts(prompt: str, template: str) -> bool | None:
    """Whether an answer to the end of `prompt`, which `template` made, begins with thoughts.

    Templates open the thoughts themselves, or write empty ones where none are wanted; those with
    the switch that do neither leave the mark to the model. None: neither text says it.
    """
    end = prompt.rstrip()
    if end.endswith((OPEN, CLOSE)):
        return end.endswith(OPEN)
    return True if SWITCH in template else None


class ReasoningSplitter:
    """Takes text as it comes and says which of it is thought; marks are in neither part.

    `open_at_start`: the prompt already ended with the opening mark, as some templates do. Only a
    mark at the very beginning of the answer opens thoughts: later ones are the answer's own text.
    """

    def __init__(self, *, open_at_start: bool = False) -> None:
        self._state = "thinking" if open_at_start else "start"
        self._held = ""
        self._trim = open_at_start

    def push(self, text: str) -> tuple[str, str]:
        """(thought, answer) that became certain with `text`."""
        self._held += text
        thought = ""
        if self._state == "start":
            begun = self._held.lstrip()
            if begun != OPEN and OPEN.startswith(begun):  # blanks so far, or part of the mark
                return "", ""
            if begun.startswith(OPEN):
                self._state, self._trim = "thinking", True
                self._held = begun[len(OPEN) :]
            else:
                self._state = "answer"
        if self._state == "thinking":
            end = self._held.find(CLOSE)
            if end < 0:
                keep = possible_prefix(self._held, (CLOSE,))
                # Blanks at the end may belong to the mark that comes.
                certain = self._held[: len(self._held) - keep].rstrip()
                thought, self._held = certain, self._held[len(certain) :]
                return self._trimmed(thought), ""
            thought = self._trimmed(self._held[:end].rstrip())
            self._held = self._held[end + len(CLOSE) :]
            self._state, self._trim = "answer", True
        return thought, self._take()

    def finish(self) -> tuple[str, str]:
        """(thought, answer) of what was held back; the text ends here."""
        held, self._held = self._held, ""
        if self._state == "thinking":
            return self._trimmed(held.rstrip()), ""
        return "", self._trimmed(held)

    def _take(self) -> str:
        held, self._held = self._held, ""
        return self._trimmed(held)

    def _trimmed(self, text: str) -> str:
        """Without the blanks that follow a mark."""
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        return text
