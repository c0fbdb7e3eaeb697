"""What a Context remembers of each sequence (its K/V cache and recurrent state)."""

from __future__ import annotations

from collections.abc import Callable

from dspine.errors import UsageError
from dspine.llama.native import Native


class Memory:
    """Belongs to a Context; every call checks the sequence number first."""

    def __init__(
        self,
        native: Native,
        pointer: Callable[[], int],
        n_sequences: int,
        shared_cache: bool,
        window: int,
        changed: Callable[[int, int], None],
    ) -> None:
        """`window`: of the attention cache, 0 where it keeps every position.

        `changed(sequence, start)` hears that positions from `start` on are gone.
        """
        self._api = native.api
        self._remove, self._last = native.remove_positions, native.last_position
        self._pointer = pointer
        self._n_sequences = n_sequences
        self._shared_cache = shared_cache
        self._window = window
        self._changed = changed

    def remove(self, sequence: int, start: int, end: int = -1) -> bool:
        """Forget positions [start, end) of a sequence; -1 means to its end.

        False when the model cannot forget that part: recurrent state has no earlier version,
        and a sliding window that went on no longer has what the earlier one saw. Nothing is
        changed then.
        """
        self.check(sequence)
        if start < 0:
            raise UsageError(f"position {start} is negative: positions start at 0")
        if self._window and end < 0 and not self._window_remains(sequence, start):
            return False
        done = self._remove(self._pointer(), sequence, start, end)
        if done:
            self._changed(sequence, start)
        return done

    def clear(self) -> None:
        """Forget everything of all sequences."""
        for sequence in range(self._n_sequences):
            self._changed(sequence, 0)
        self._api.llama_memory_clear(self._pointer(), False)

    def last_position(self, sequence: int) -> int:
        """Last position that is present, -1 when the sequence is empty."""
        self.check(sequence)
        return self._last(self._pointer(), sequence)

    def first_position(self, sequence: int) -> int:
        """First position that is present, -1 when the sequence is empty.

        Above 0 where positions left a sliding window; the last one of a recurrent target.
        """
        self.check(sequence)
        return int(self._api.llama_memory_seq_pos_min(self._pointer(), sequence))

    def copy(self, source: int, destination: int, start: int = 0, end: int = -1) -> None:
        """Give `destination` the positions [start, end) of `source`, replacing what it had.

        With a cache per sequence only whole sequences can be copied (UsageError otherwise).
        """
        self.check(source)
        self.check(destination)
        if source == destination:
            return
        whole = start <= 0 and (end < 0 or end > self.last_position(source))
        if not whole and not self._shared_cache:
            raise UsageError(
                f"positions {start} to {end} of sequence {source} cannot be copied alone: each "
                f"sequence has a cache of its own, so copy all of it or use shared_cache"
            )
        self.remove(destination, 0)
        self._api.llama_memory_seq_cp(
            self._pointer(), source, destination, -1 if whole else start, -1 if whole else end
        )
        self._changed(destination, 0)

    def _window_remains(self, sequence: int, start: int) -> bool:
        """Whether a next token at `start` would find all that its window shows."""
        return start == 0 or self.first_position(sequence) <= max(0, start - self._window + 1)

    def check(self, sequence: int) -> None:
        """UsageError for a sequence that the context does not have."""
        if not 0 <= sequence < self._n_sequences:
            raise UsageError(
                f"sequence {sequence} does not exist: the context has {self._n_sequences}, "
                f"numbered from 0"
            )
