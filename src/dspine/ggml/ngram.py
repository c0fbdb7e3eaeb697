"""Lookups in the running text and in a table, a step's in one native call each; only where the CPU
kernels run.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from struct import Struct

import numpy as np
import numpy.typing as npt

from dspine.ggml.kernels import integers, quick_function

_POINTER, _INT, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double

FIRST_ROOM = 16
"""Drafts for which there is room at first."""

COUNT_BITS = 20
"""Bits of each number of tokens in what a lookup returns."""

MOST = (1 << COUNT_BITS) - 1

Numbers = tuple[tuple[int, ...], tuple[float, ...], int]
"""Tokens and scores, and how many are of which kind: `COUNT_BITS` each."""


class NativeTable:
    """A table of likely next tokens, hashed: 32 bytes an entry."""

    def __init__(
        self,
        library: ctypes.CDLL,
        keys: npt.NDArray[np.uint64],
        tokens: npt.NDArray[np.int32],
        confidences: npt.NDArray[np.uint8],
    ) -> None:
        """Contiguous arrays of one length, keys all different; `library` has the CPU kernels."""
        make = quick_function(library, "dspine_ngram_table", [*[_POINTER] * 3, _LONG], _POINTER)
        free = quick_function(library, "dspine_ngram_free_table", [_POINTER], None)
        parts = keys, tokens, confidences
        self.address = _made(make(*(part.ctypes.data for part in parts), len(keys)))
        _freed_with(self, free, self.address)


class NativeText:
    """The tokens of one text, which is looked up in itself and continued by a table."""

    def __init__(
        self,
        library: ctypes.CDLL,
        table: NativeTable | None,
        *,
        matches: tuple[int, int, int],
        scores: Sequence[float],
        least: float,
        least_reach: float,
    ) -> None:
        """`matches`: the shortest one, the longest one that is told apart, and how many are
        compared. `scores[n]` is the chance of the token after a match of n tokens, up to the
        longest. `least` and `least_reach` as in `NgramTable.chain`.
        """
        make = quick_function(library, "dspine_ngram_text", [*[_INT] * 3, _POINTER], _POINTER)
        free = quick_function(library, "dspine_ngram_free_text", [_POINTER], None)
        chances = np.array(scores, np.float64)
        self._text = _made(make(*matches, chances.ctypes.data))
        _freed_with(self, free, self._text)
        # Held: the text is looked up in it.
        self._table = table
        self._known = table.address if table is not None else 0
        self._least = least, least_reach
        self._size = quick_function(library, "dspine_ngram_size", [_POINTER], _LONG)
        self._tokens = quick_function(library, "dspine_ngram_tokens", [_POINTER], _POINTER)
        self._truncate = quick_function(library, "dspine_ngram_truncate", [_POINTER, _LONG], None)
        self._extend = quick_function(library, "dspine_ngram_extend", [_POINTER, _POINTER, _LONG])
        numbers = _INT, _INT, _DOUBLE, _DOUBLE, _POINTER, _POINTER
        self._look_up = quick_function(
            library, "dspine_ngram_look_up", [*[_POINTER] * 3, *numbers], _LONG
        )
        self._after = quick_function(
            library, "dspine_ngram_after", [*[_POINTER] * 3, *numbers], _LONG
        )
        self._new: tuple[int, ...] = ()
        """Tokens that the next call adds first."""
        self._make_room(FIRST_ROOM)

    def _make_room(self, count: int) -> None:
        """For that many drafts of each kind, and as many tokens that are given."""
        self._room = count
        self._given = np.zeros(count, np.int32)
        self._found = np.zeros(3 * count, np.int32), np.zeros(3 * count, np.float64)
        tokens, scores = self._found
        self._givens = self._given.data.cast("B")
        self._ids, self._chances = tokens.data.cast("B"), scores.data.cast("B")
        self._given_at: int = self._given.ctypes.data
        self._last_arguments = (*self._least, tokens.ctypes.data, scores.ctypes.data)

    @property
    def tokens(self) -> list[int]:
        """A copy of all of them."""
        self._add()
        size: int = self._size(self._text)
        if not size:
            return []
        return list((ctypes.c_int32 * size).from_address(self._tokens(self._text)))

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        self._new += tuple(tokens)

    def truncate(self, length: int) -> None:
        """Forget tokens from index `length` on."""
        self._add()
        self._truncate(self._text, length)

    def look_up(self, count: int) -> Numbers:
        """Up to `count` tokens of a repeat; then those that the table knows and a repeat after
        them, together up to `count`.
        """
        new = self._new
        if count > self._room or len(new) > self._room:
            self._add()
            new = ()
            if count > self._room:
                count = min(count, MOST)
                self._make_room(count)
        integers(len(new)).pack_into(self._givens, 0, *new)
        counts = self._look_up(
            self._text, self._known, self._given_at, len(new), count, *self._last_arguments
        )
        if counts < 0:
            raise MemoryError("no memory for more tokens of the text")
        self._new = ()
        found = (counts & MOST) + (counts >> COUNT_BITS & MOST) + (counts >> 2 * COUNT_BITS)
        tokens = integers(found).unpack_from(self._ids)
        return tokens, _doubles(found).unpack_from(self._chances), counts

    def after(self, tail: Sequence[int], room: int) -> Numbers:
        """Up to `room` tokens of a repeat, else of the table, where `tail` follows the text."""
        self._add()
        if room > self._room or len(tail) > self._room:
            room = min(room, MOST)
            self._make_room(max(room, len(tail)))
        integers(len(tail)).pack_into(self._givens, 0, *tail)
        counts = self._after(
            self._text, self._known, self._given_at, len(tail), room, *self._last_arguments
        )
        found = counts & MOST or counts >> COUNT_BITS
        tokens = integers(found).unpack_from(self._ids)
        return tokens, _doubles(found).unpack_from(self._chances), counts

    def _add(self) -> None:
        """Hand over what waits."""
        if self._new:
            tokens = np.array(self._new, np.int32)
            if self._extend(self._text, tokens.ctypes.data, len(tokens)) < 0:
                raise MemoryError("no memory for more tokens of the text")
            self._new = ()


def _freed_with(owner: object, free: Callable[[int], object], address: int) -> None:
    """Not at the end of the process, when a thread may still look tokens up in it."""
    weakref.finalize(owner, free, address).atexit = False


def _made(address: int | None) -> int:
    if not address:
        raise MemoryError("no memory for looking tokens up")
    return address


@cache
def _doubles(count: int) -> Struct:
    return Struct(f"{count}d")
