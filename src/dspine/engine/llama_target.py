"""The engine's `Target` on a real llama.cpp context, for one sequence or several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dspine.drafters.base import Features
from dspine.engine.target import LogitRows, Rows, Snapshot
from dspine.llama.batch import Batch
from dspine.llama.context import Context
from dspine.llama.taps import RowBuffer


class LlamaTarget:
    """One sequence of a Context, with a batch that is allocated once."""

    def __init__(self, context: Context, sequence: int = 0, batch: Batch | None = None) -> None:
        """Targets of one context may share a batch, as they are not used at the same time."""
        self.context = context
        self.n_ctx = context.n_ctx
        self.n_batch = context.n_batch
        self.max_rows = context.max_outputs // context.n_sequences
        self._sequence = sequence
        self._batch = batch or Batch(context.n_batch)
        self.first_row = 0
        """Row of the last decode that is this sequence's first."""

    def decode(self, tokens: Sequence[int], position: int, logits: LogitRows) -> None:
        self._batch.clear()
        self.first_row = 0
        self._batch.add_tokens(tokens, position, self._sequence, logits)
        self.context.decode(self._batch)

    def wait(self) -> None:
        self.context.wait()

    def argmax(self, row: int) -> int:
        return self.context.argmax(self.first_row + row)

    def follow(self, row: int, drafts: Sequence[int]) -> Sequence[int]:
        return self.context.follow(self.first_row + row, drafts)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        return self.context.logits(self.first_row + row)

    def features(self, first: int, count: int) -> Features:
        return self.context.features(self.first_row + first, count)

    def copy_features(self, first: int, count: int, out: RowBuffer, place: int) -> None:
        self.context.copy_features(self.first_row + first, count, out, place)

    def clear(self) -> None:
        if self.context.n_sequences == 1:
            self.context.memory.clear()
        else:
            self.context.memory.remove(self._sequence, 0)

    def trim(self, length: int) -> bool:
        return self.context.memory.remove(self._sequence, length)

    def length(self) -> int:
        return self.context.memory.last_position(self._sequence) + 1

    def checkpoint(self) -> None:
        self.context.state.checkpoint(self._sequence)

    def restore(self) -> int:
        return self.context.state.restore(self._sequence)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.length(), self.context.state.copy_out(self._sequence))

    def save(self) -> bytes:
        return self.context.state.save(self._sequence)

    def load(self, data: bytes) -> int:
        return self.context.state.load(self._sequence, data)

    def put_back(self, snapshot: Snapshot) -> int:
        return self.context.state.copy_in(self._sequence, snapshot.data, snapshot.position)


class LlamaTargets:
    """All sequences of a Context, each a target of its own; see `Together`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._batch = Batch(context.n_batch)
        self.n_batch = context.n_batch
        self.targets = [
            LlamaTarget(context, sequence, self._batch) for sequence in range(context.n_sequences)
        ]
        self.mixes = not context.needs_equal_rows

    def decode(self, parts: Sequence[Rows]) -> None:
        batch = self._batch
        batch.clear()
        for sequence, tokens, position, logits, filler in parts:
            target = self.targets[sequence]
            target.first_row = batch.add_tokens(tokens, position, sequence, logits)
            if filler:
                batch.add_tokens((tokens[-1],) * filler, position + len(tokens), sequence, "none")
        self._context.decode(batch)

    def wait(self) -> None:
        self._context.wait()
