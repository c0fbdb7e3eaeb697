"""The engine's `Target` on a real llama.cpp context."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dspine.drafters.base import Features
from dspine.engine.target import LogitRows, Snapshot
from dspine.llama.batch import Batch
from dspine.llama.context import Context


class LlamaTarget:
    """One sequence of a Context, with a batch that is allocated once."""

    def __init__(self, context: Context, sequence: int = 0) -> None:
        self.context = context
        self.n_ctx = context.n_ctx
        self.n_batch = context.n_batch
        self.max_rows = context.max_outputs
        self._sequence = sequence
        self._batch = Batch(context.n_batch)

    def decode(self, tokens: Sequence[int], position: int, logits: LogitRows) -> None:
        self._batch.clear()
        self._batch.add_tokens(tokens, position, self._sequence, logits)
        self.context.decode(self._batch)

    def wait(self) -> None:
        self.context.wait()

    def argmax(self, row: int) -> int:
        return self.context.argmax(row)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        return self.context.logits(row)

    def features(self, first: int, count: int) -> Features:
        return self.context.features(first, count)

    def copy_features(self, first: int, count: int, out: memoryview) -> None:
        self.context.copy_features(first, count, out)

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
