"""Rows for one decode: tokens with position, sequences and whether logits are wanted."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from dspine.errors import CapacityError, UsageError
from dspine.llama.checks import require_count
from dspine.llama.library import native_functions

LogitsOf = Literal["all", "last", "none"] | int
_NAMED = {"last": 1, "none": 0}
_LARGEST = 2**31 - 1


class Batch:
    """Up to `capacity` rows in native arrays that are allocated once and used again.

    Rows of one sequence must be added in order of position without gaps. `clear()` and refill
    for every decode; a row's index is the order in which it was added.
    """

    def __init__(self, capacity: int) -> None:
        require_count("capacity", capacity)
        api = native_functions().api
        self.capacity = capacity
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._positions = np.zeros(capacity, dtype=np.int32)
        self._counts = np.ones(capacity, dtype=np.int32)
        self._sequences = np.zeros(capacity, dtype=np.int32)
        self._wanted = np.zeros(capacity, dtype=np.int8)
        first = self._sequences.ctypes.data
        self._own_cells = np.arange(capacity, dtype=np.uintp) * 4 + np.uintp(first)
        self._cells = self._own_cells.copy()
        self._shared: list[Any] = []
        self.native: Any = api.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32),
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._counts, ctypes.c_int32),
            seq_id=ctypes.cast(
                self._cells.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))
            ),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )
        """The C structure for llama_decode; `embd` stays null."""
        # Written item by item: for few rows that touches less code than NumPy, struct or fields of
        # a C structure do.
        self._token_view = self._tokens.data
        self._position_view = self._positions.data
        self._sequence_view = self._sequences.data
        self._wanted_view = self._wanted.data
        place = api.llama_batch.n_tokens.offset
        count = (ctypes.c_char * 4).from_buffer(self.native, place)
        self._count_view = memoryview(count).cast("B").cast("i")
        self._only_sequence: int | None = 0
        """Stands in all of `_sequences`, so that its rows need not say so again."""
        # Plain attributes, for the context to read: each property would be one more function.
        self.size = 0
        """How many rows there are."""
        self.wanted = b""
        """One byte per row: 1 where logits are wanted."""
        self.outputs = 0
        """How many rows want logits."""
        self.highest_token = -1
        """Largest token id in the batch, -1 when it is empty."""
        self.spans: dict[int, tuple[int, int]] = {}
        """Positions [first, end) that the batch adds to each sequence."""

    def __len__(self) -> int:
        return self.size

    @property
    def has_equal_parts(self) -> bool:
        """Whether each sequence has as many rows as the others, one after the other."""
        parts = {end - first for first, end in self.spans.values()}
        rows = self._sequences[: self.size]
        changes = int(np.count_nonzero(rows[1:] != rows[:-1]))
        return len(parts) <= 1 and changes + 1 <= len(self.spans) and not self._shared

    @property
    def tokens(self) -> list[int]:
        """The token ids in row order."""
        return [int(token) for token in self._tokens[: self.size]]

    def clear(self) -> None:
        """Remove all rows; the arrays stay."""
        if self._shared:
            self._cells[:] = self._own_cells
            self._counts[:] = 1
            self._shared.clear()
        self.wanted = b""
        self.size = 0
        self.outputs = 0
        self.highest_token = -1
        self.spans = {}

    def add(
        self,
        token: int,
        position: int,
        sequences: Sequence[int] = (0,),
        logits: bool = True,
    ) -> int:
        """Add one row and return its index; the row belongs to every sequence named.

        Raises CapacityError when the batch is full and UsageError for a negative id or a
        position that does not follow the sequence's previous row.
        """
        row = self.size
        if token < 0 or token > _LARGEST or row >= self.capacity:
            raise _bad_tokens(token, token, row + 1, self.capacity)
        if not sequences:
            raise UsageError("a row needs at least one sequence")
        if len(set(sequences)) != len(sequences):
            raise UsageError(f"sequences {list(sequences)} name one twice: name each once")
        firsts = [self._first_of(sequence, position, 1) for sequence in sequences]
        for sequence, first in zip(sequences, firsts, strict=True):
            self.spans[sequence] = first, position + 1
        self._tokens[row] = token
        self._positions[row] = position
        self._wanted[row] = logits
        self.wanted += b"\1" if logits else b"\0"
        if len(sequences) == 1:
            self._sequences[row] = sequences[0]
            if sequences[0] != self._only_sequence:
                self._only_sequence = None
        else:
            shared = (ctypes.c_int32 * len(sequences))(*sequences)
            self._shared.append(shared)
            self._cells[row] = ctypes.addressof(shared)
            self._counts[row] = len(sequences)
        self.highest_token = max(self.highest_token, token)
        self.outputs += bool(logits)
        self.size = self._count_view[0] = row + 1
        return row

    def add_tokens(
        self,
        tokens: Sequence[int],
        position: int,
        sequence: int = 0,
        logits: LogitsOf = "all",
    ) -> int:
        """Add consecutive rows from `position` on and return the index of the first.

        Logits are asked for all, the last, the last so many or none of them. Errors as in `add`.
        """
        count = len(tokens)
        first = self.size
        end = first + count
        if not count:
            return first
        lowest, highest = min(tokens), max(tokens)
        if lowest < 0 or highest > _LARGEST or end > self.capacity:
            raise _bad_tokens(lowest, highest, end, self.capacity)
        if logits == "all":
            asked = count
        else:
            asked = logits if isinstance(logits, int) else _NAMED.get(logits, -1)
        if not 0 <= asked <= count:
            raise UsageError(
                f"logits is {logits!r}: choose all, last, none or a number of up to {count} rows"
            )
        self.spans[sequence] = self._first_of(sequence, position, count), position + count
        silent = end - asked
        for row, token in enumerate(tokens, first):
            self._token_view[row] = token
            self._position_view[row] = position + row - first
            self._wanted_view[row] = row >= silent
        if sequence != self._only_sequence:
            for row in range(first, end):
                self._sequence_view[row] = sequence
            self._only_sequence = None
        self.wanted += bytes(count - asked) + b"\1" * asked
        if highest > self.highest_token:
            self.highest_token = highest
        self.outputs += asked
        self.size = self._count_view[0] = end
        return first

    def _first_of(self, sequence: int, position: int, count: int) -> int:
        """The first position of a sequence in the batch, which rows from `position` on follow."""
        if sequence < 0:
            raise UsageError(f"sequence {sequence} is negative: sequences start at 0")
        if position < 0:
            raise UsageError(f"position {position} is negative: positions start at 0")
        if position + count > _LARGEST:
            raise UsageError(f"position {position + count} is too large: the limit is {_LARGEST}")
        span = self.spans.get(sequence)
        if span is None:
            return position
        if span[1] != position:
            raise UsageError(
                f"position {position} of sequence {sequence} does not follow {span[1] - 1}, the "
                f"last one in the batch: positions must be consecutive"
            )
        return span[0]


def _bad_tokens(lowest: int, highest: int, rows: int, capacity: int) -> Exception:
    """Why tokens from `lowest` to `highest` cannot make it a batch of `rows`."""
    if rows > capacity:
        return CapacityError(
            f"{rows} rows do not fit into a batch of {capacity}: decode in smaller pieces"
        )
    if lowest < 0:
        return UsageError(f"token id {lowest} is negative: ids start at 0")
    return UsageError(
        f"token id {highest} is larger than any vocabulary: give ids of the target's vocabulary"
    )


def _pointer(array: Any, kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
