"""Drafts from a grammar: text that must come next, as the tokens a target probably writes it with.

A grammar often leaves one text only: the rest of a key, of a word out of a list, a closing quote.
Tokens stay free, though: a target may cut the same text in several ways, and its last token may
hold what follows as well. So these are guesses, verified like any draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

KNOWN = 256
"""Tokens of earlier answers that are remembered."""

BEFORE = 4
"""Tokens in front of the forced text that are cut into tokens along with it."""

INSIDE, AT_ODDS, ENDING, LAST = 0.8, 0.5, 0.7, 0.3
"""Scores: a token inside the forced text; the same where the text before was not cut as the
tokenizer would; a last token that earlier ones continue; one without an example. Of the default
target's JSON about 85, 50, 70 and 30 of 100 are right."""


class Forced(NamedTuple):
    """Tokens that probably come next in a row, and the chance of each if those before it do."""

    tokens: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()


NOT_FORCED = Forced()
"""Nothing is forced."""


class ForcedTokenizer(Protocol):
    """The part of a tokenizer that this needs."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of a token."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""


class ForcedDrafts:
    """Serves all answers of one target, and learns from them how texts end."""

    def __init__(self, tokenizer: ForcedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, None] = {}  # the one used last comes last

    def saw(self, token: int) -> None:
        """A token of an answer with a grammar."""
        self._known.pop(token, None)
        self._known[token] = None
        if len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]

    def guess(
        self, text: bytes, before: Sequence[int], allowed: Callable[[Sequence[int]], int]
    ) -> Forced:
        """`text` must come after the tokens `before`; `allowed` says how many of some tokens
        may come in a row.
        """
        known = _characters(text)
        head = b"".join(self._tokenizer.piece(token) for token in before[-BEFORE:])
        tokens, inside = self._cut(head.decode("utf-8", "ignore"), known), INSIDE
        if tokens is None:
            tokens, inside = self._cut("", known), AT_ODDS
        if not tokens:
            return NOT_FORCED
        *body, last = tokens
        scores = [inside] * len(body)
        ending = self._ending(self._tokenizer.piece(last), body, allowed)
        if ending is None:
            return Forced((*body, last), (*scores, LAST))
        return Forced((*body, ending), (*scores, ENDING))

    def _cut(self, before: str, text: str) -> list[int] | None:
        """Tokens of `text`; None where the tokenizer joins it with the text before."""
        tokens = self._tokenizer.encode(before + text)
        sizes = [len(self._tokenizer.piece(token)) for token in tokens]
        # Some tokenizers put a space in front, which does not count.
        place = len((before + text).encode()) - sum(sizes)
        start = len(before.encode())
        for index, size in enumerate(sizes):
            if place >= start:
                return tokens[index:] if place == start else None
            place += size
        return None

    def _ending(
        self, rest: bytes, body: list[int], allowed: Callable[[Sequence[int]], int]
    ) -> int | None:
        """The token used last that begins with `rest` and may come after `body`."""
        piece = self._tokenizer.piece
        for token in reversed(self._known):
            if piece(token).startswith(rest) and allowed((*body, token)) > len(body):
                return token
        return None


def _characters(text: bytes) -> str:
    """The whole characters at the beginning of `text`, none if it begins inside one."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        return text[: error.start].decode()
