"""Turns a stream of tokens into text, holding back bytes that do not end a character yet."""

from __future__ import annotations

import codecs
from collections.abc import Callable

DetokeniserState = tuple[bytes, int]
"""Bytes held back, and the decoder's own flag."""


class Detokeniser:
    """Incremental UTF-8: a character split over tokens appears once it is complete.

    Bytes that can never become a character turn into U+FFFD, as every UTF-8 reader does it.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        """`piece` gives the bytes of one token (control tokens: none)."""
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that became certain with this token, often all of it, sometimes none."""
        return self._decoder.decode(self._piece(token))

    def flush(self) -> str:
        """The rest at the end of an answer: U+FFFD for a character that never ended."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        return rest

    def mark(self) -> DetokeniserState:
        """State to return to with `restore`."""
        return self._decoder.getstate()

    def restore(self, state: DetokeniserState) -> None:
        """Back to a state taken with `mark`."""
        self._decoder.setstate(state)
