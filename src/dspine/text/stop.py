"""Finds stop strings in streamed text, also when one begins in a token and ends in a later one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dspine.errors import UsageError


class StopFinder:
    """Passes text through until a stop string is complete; the stop string itself is cut off.

    Text that might still grow into a stop string is held back, never more than the longest
    stop string minus one character.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if not all(self._stops):
            raise UsageError("a stop string is empty: give a text with at least one character")
        self._held = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to find, so that all text passes."""
        return not self._stops

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop string was completed)."""
        if not self._stops:
            return text, False
        buffer = self._held + text
        starts = [at for at in map(buffer.find, self._stops) if at >= 0]
        if starts:
            self._held = ""
            return buffer[: min(starts)], True
        keep = possible_prefix(buffer, self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        """What was held back, at the end of an answer."""
        rest, self._held = self._held, ""
        return rest

    def mark(self) -> str:
        """State to return to with `restore`."""
        return self._held

    def restore(self, state: str) -> None:
        """Back to a state taken with `mark`."""
        self._held = state


def possible_prefix(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `marks`, the whole mark apart."""
    longest = max((len(mark) for mark in marks), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[len(text) - length :]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0
