"""Turns a stream of tokens into text, holding back bytes that do not end a character yet."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable

DetokeniserState = bytes
"""Bytes held back."""


class Detokeniser:
    """Incremental UTF-8: a character split over tokens appears once it is complete.

    Bytes that can never become a character turn into U+FFFD, as every UTF-8 reader does it.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        """`piece` gives the bytes of one token (control tokens: none)."""
        self._piece = piece
        self.held: DetokeniserState = b""
        """The whole state: note it and put it back to undo what came since."""

    def push(self, token: int) -> str:
        """Text that became certain with this token, often all of it, sometimes none."""
        return self.push_all((token,))

    def push_all(self, tokens: Iterable[int]) -> str:
        """The same for several tokens, whose texts follow each other."""
        data = self.held + b"".join(map(self._piece, tokens))
        text, used = codecs.utf_8_decode(data, "replace", False)
        self.held = data[used:]
        return text

    def flush(self) -> str:
        """The rest at the end of an answer: U+FFFD for a character that never ended."""
        rest, self.held = self.held, b""
        return codecs.utf_8_decode(rest, "replace", True)[0]
