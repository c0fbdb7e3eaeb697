"""Returning a sequence to an earlier point, also where its state cannot be trimmed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from dspine.errors import CapacityError, LibraryError, UsageError
from dspine.llama.log import capture


class State:
    """One checkpoint per sequence, and whole sequences as bytes; belongs to a Context.

    A recurrent or hybrid target cannot forget its last tokens. Before a verify its recurrent
    part is copied (on the device, a single copy per sequence); after a partial acceptance it is
    put back and the attention cache is trimmed to the same position. The accepted tokens must
    then be decoded again, best in front of the next block.
    """

    def __init__(
        self,
        api: Any,
        pointer: Callable[[], int],
        n_sequences: int,
        is_recurrent: bool,
        last_position: Callable[[int], int],
        cut: Callable[[int, int], bool],
        free_bytes: Callable[[], int | None],
    ) -> None:
        """`cut(sequence, length)` trims the memory; `free_bytes` is what a copy may take."""
        self._api = api
        self._pointer = pointer
        self._n_sequences = n_sequences
        self._is_recurrent = is_recurrent
        self._last_position = last_position
        self._cut = cut
        self._free_bytes = free_bytes
        self._flags = api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY | api.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE
        self._buffers: dict[int, tuple[Any, int]] = {}
        self._positions: dict[int, int] = {}

    def checkpoint(self, sequence: int) -> int:
        """Remember the present point of a sequence (replacing its earlier checkpoint).

        Returns the next position, i.e. how many positions the sequence has. Raises CapacityError
        when the copy does not fit into memory; the library would end the process.
        """
        next_position = self._next(sequence)
        # Until the new one is whole there is none: an interrupt may come between the two.
        self._positions.pop(sequence, None)
        if self._is_recurrent and next_position > 0:
            pointer = self._pointer()
            size = self._api.llama_state_seq_get_size_ext(pointer, sequence, self._flags)
            buffer, room = self._buffers.get(sequence, (None, 0))
            if buffer is None:
                self._check_room(sequence)
            if room < size:
                buffer = (ctypes.c_uint8 * size)()
            mark = capture.count
            written = self._api.llama_state_seq_get_data_ext(
                pointer, buffer, size, sequence, self._flags
            )
            if not written:
                raise LibraryError(
                    f"the state of sequence {sequence} cannot be saved: {capture.reason(mark)}; "
                    "free memory, or answer without a drafter (--proposer none)"
                )
            self._buffers[sequence] = (buffer, written)
        self._positions[sequence] = next_position
        return next_position

    def bytes_per_copy(self, sequence: int) -> int:
        """Bytes of one copy of what a checkpoint keeps; 0 for attention-only targets.

        The sequence must not be empty.
        """
        if not self._is_recurrent:
            return 0
        self._next(sequence)
        flags = self._api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        return int(self._api.llama_state_seq_get_size_ext(self._pointer(), sequence, flags))

    def restore(self, sequence: int) -> int:
        """Return a sequence to its checkpoint, which stays valid; returns the next position."""
        self._check(sequence)
        position = self._positions.get(sequence)
        if position is None:
            raise UsageError(f"sequence {sequence} has no checkpoint to return to: save one first")
        pointer = self._pointer()
        if self._is_recurrent and position > 0:
            buffer, written = self._buffers[sequence]
            mark = capture.count
            # The saved state first: trimming is refused while the state is at a later token.
            if not self._api.llama_state_seq_set_data_ext(
                pointer, buffer, written, sequence, self._flags
            ):
                raise LibraryError(
                    f"the state of sequence {sequence} cannot be restored: "
                    f"{capture.reason(mark)}; begin the text anew"
                )
        return self._cut_to(sequence, position)

    def forget_from(self, sequence: int, start: int) -> None:
        """Drop the checkpoint when positions before it were removed or replaced."""
        position = self._positions.get(sequence)
        if position is not None and start < position:
            del self._positions[sequence]

    def copy_out(self, sequence: int) -> bytes:
        """The recurrent part of a sequence's state as bytes; empty where there is none."""
        if not self._is_recurrent or not self._next(sequence):
            return b""
        return self._read(sequence, self._api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def copy_in(self, sequence: int, data: bytes, position: int) -> int:
        """Return to where `copy_out` gave `data`: `position` positions, which the cache still
        holds (it may hold more). Returns the next position.
        """
        self._check(sequence)
        self.forget_from(sequence, position)
        if data:
            flags = self._api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
            self._write(sequence, data, flags)
        return self._cut_to(sequence, position)

    def save(self, sequence: int) -> bytes:
        """The whole sequence (cache and state) as bytes, for `load` on a like context."""
        if not self._next(sequence):
            raise UsageError(f"sequence {sequence} is empty: there is nothing to save")
        return self._read(sequence, 0)

    def load(self, sequence: int, data: bytes) -> int:
        """Replace a sequence by saved bytes; returns its next position.

        Raises UsageError when the bytes come from a context of another shape or do not fit; the
        sequence is empty then.
        """
        self._check(sequence)
        pointer = self._pointer()
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        self.forget_from(sequence, 0)
        mark = capture.count
        if not data or not self._api.llama_state_seq_set_data_ext(
            pointer, buffer, len(data), sequence, 0
        ):
            memory = self._api.llama_get_memory(pointer)
            self._api.llama_memory_seq_rm(memory, sequence, 0, -1)
            raise UsageError(
                f"{len(data)} bytes of saved state do not fit this context: "
                f"{capture.reason(mark)}; load it with the settings that it was saved with"
            )
        return self._next(sequence)

    def _read(self, sequence: int, flags: int) -> bytes:
        pointer = self._pointer()
        size = self._api.llama_state_seq_get_size_ext(pointer, sequence, flags)
        buffer = (ctypes.c_uint8 * size)()
        mark = capture.count
        written = self._api.llama_state_seq_get_data_ext(pointer, buffer, size, sequence, flags)
        if not written:
            raise LibraryError(
                f"sequence {sequence} cannot be saved: {capture.reason(mark)}; free memory, or "
                "answer without a drafter (--proposer none)"
            )
        return bytes(memoryview(buffer)[:written])

    def _write(self, sequence: int, data: bytes, flags: int) -> None:
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        mark = capture.count
        if not self._api.llama_state_seq_set_data_ext(
            self._pointer(), buffer, len(data), sequence, flags
        ):
            raise LibraryError(
                f"the state of sequence {sequence} cannot be restored: {capture.reason(mark)}; "
                "begin the text anew"
            )

    def _cut_to(self, sequence: int, position: int) -> int:
        if not self._cut(sequence, position) or self._next(sequence) != position:
            raise LibraryError(
                f"sequence {sequence} cannot return to its first {position} tokens: not all of "
                "them are in memory any more, begin the text anew"
            )
        return position

    def _check_room(self, sequence: int) -> None:
        needed, free = self.bytes_per_copy(sequence), self._free_bytes()
        if free is not None and needed > free:
            raise CapacityError(
                f"a copy of the target's state needs {needed / 2**20:.0f} MiB and "
                f"{free / 2**20:.0f} MiB of memory are free: free memory, or answer without a "
                "drafter (--proposer none)"
            )

    def _next(self, sequence: int) -> int:
        self._check(sequence)
        return self._last_position(sequence) + 1

    def _check(self, sequence: int) -> None:
        self._pointer()
        if not 0 <= sequence < self._n_sequences:
            raise UsageError(
                f"sequence {sequence} does not exist: the context has {self._n_sequences}, "
                f"numbered from 0"
            )
