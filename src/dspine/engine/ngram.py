"""Lookup in the running context: where did the newest tokens occur before, and what came next?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dspine.errors import UsageError

TOKEN_BITS = 21
"""Bits of one packed token id: vocabularies up to two million."""

MAX_MATCH = 32
"""Longer matches are not told apart."""

MAX_CANDIDATES = 16
"""Earlier occurrences compared, newest first."""


class Match(NamedTuple):
    """The newest tokens also stand before index `start`, `length` of them (at most MAX_MATCH)."""

    start: int
    length: int


class NgramIndex:
    """Tokens of one sequence, indexed by their n-grams; extending costs about 1 us a token.

    Occurrences of the same n-gram form a chain, newest first, so that the longest suffix match
    among the newest MAX_CANDIDATES is found without scanning the text.
    """

    def __init__(self, min_match: int) -> None:
        """`min_match` is the shortest match that `find` reports."""
        if min_match < 1:
            raise UsageError(f"the shortest n-gram match is {min_match}: it must be at least 1")
        self._n = min_match
        self._mask = (1 << (TOKEN_BITS * min_match)) - 1
        self._tokens: list[int] = []
        self._keys: list[int] = []
        self._newest: dict[int, int] = {}
        self._before: list[int] = []

    @property
    def tokens(self) -> list[int]:
        """The indexed tokens (read only)."""
        return self._tokens

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. An n-gram can be found once the token after it is known."""
        for token in tokens:
            end = len(self._tokens) - 1
            if end >= 0:
                key = self._keys[end]
                findable = end + 1 >= self._n
                self._before.append(self._newest.get(key, -1) if findable else -1)
                if findable:
                    self._newest[key] = end
                last = key
            else:
                last = 0
            self._tokens.append(token)
            self._keys.append(((last << TOKEN_BITS) | token) & self._mask)

    def truncate(self, length: int) -> None:
        """Forget tokens from index `length` on."""
        findable = max(length - 1, 0)
        for end in range(len(self._before) - 1, findable - 1, -1):
            if end + 1 >= self._n:
                if self._before[end] < 0:
                    del self._newest[self._keys[end]]
                else:
                    self._newest[self._keys[end]] = self._before[end]
        del self._before[findable:]
        del self._tokens[length:]
        del self._keys[length:]

    def find(self, tail: Sequence[int] = ()) -> Match | None:
        """The longest earlier occurrence of the newest tokens, the newest among equals.

        With a `tail` they are the text's and those of the tail after it, which itself is not
        searched.
        """
        tokens = newest = self._tokens
        if tail:
            newest = [*tokens[-max(MAX_MATCH, self._n) :], *tail]
        last = len(newest) - 1
        if last + 1 <= self._n:
            return None
        key = self._keys[last] if not tail else _packed(newest[-self._n :])
        end = self._newest.get(key, -1)
        best_end, best_length = -1, 0
        for _ in range(MAX_CANDIDATES):
            if end < 0:
                break
            length = self._n
            while (
                length < MAX_MATCH
                and end - length >= 0
                and tokens[end - length] == newest[last - length]
            ):
                length += 1
            if length > best_length:
                best_end, best_length = end, length
                if length >= MAX_MATCH:
                    break
            end = self._before[end]
        return Match(best_end + 1, best_length) if best_length else None

    def continuation(self, start: int, count: int, tail: Sequence[int] = ()) -> list[int]:
        """`count` tokens from index `start` on of the text and the tail after it.

        Past the end they are taken as periodic.
        """
        drafts = self._tokens[start : start + count]
        if len(drafts) < count:
            drafts += tail[: count - len(drafts)]
        period = len(self._tokens) + len(tail) - start
        while len(drafts) < count:
            drafts.append(drafts[len(drafts) - period])
        return drafts


def _packed(tokens: Sequence[int]) -> int:
    key = 0
    for token in tokens:
        key = (key << TOKEN_BITS) | token
    return key
