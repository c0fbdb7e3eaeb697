"""What the loops ask of the target: one sequence of one context, tokens in and rows out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dspine.drafters.base import Features
from dspine.llama.taps import RowBuffer

LogitRows = Literal["all", "none"] | int
"""Of a decode: all rows, none, or the last so many."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The part of a recurrent target's state that cannot be cut, after `position` positions.

    It is of use as long as the memory still holds those positions.
    """

    position: int
    data: bytes

    @property
    def size(self) -> int:
        """Bytes of host memory."""
        return len(self.data)


class Target(Protocol):
    """A target context as seen by the engine; `LlamaTarget` is the real one."""

    @property
    def n_ctx(self) -> int:
        """Positions that fit."""

    @property
    def n_batch(self) -> int:
        """Most tokens of one decode."""

    @property
    def max_rows(self) -> int:
        """Most tokens of one decode with logits for every row."""

    def decode(self, tokens: Sequence[int], position: int, logits: LogitRows) -> None:
        """Decode `tokens` at `position`, `position + 1`, ...; it must be the memory's end."""

    def wait(self) -> None:
        """Return once the rows of the last decode are there."""

    def argmax(self, row: int) -> int:
        """Most likely token after row `row` of the last decode (lowest id on a tie)."""

    def follow(self, row: int, drafts: Sequence[int]) -> Sequence[int]:
        """`argmax` of `row` and of the rows behind it, as long as each is the draft that was
        decoded there: 1 to len(drafts) + 1 tokens.
        """

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        """Logits after row `row`, shape (vocab,); valid until the next decode."""

    def features(self, first: int, count: int) -> Features:
        """Copy of the tapped rows first ... first + count - 1 of the last decode."""

    def copy_features(self, first: int, count: int, out: RowBuffer, place: int) -> None:
        """The same to rows `place`, `place + 1`, ... of `out`."""

    def clear(self) -> None:
        """Forget everything."""

    def trim(self, length: int) -> bool:
        """Forget positions from `length` on; False where recurrent state forbids it."""

    def length(self) -> int:
        """Positions held."""

    def checkpoint(self) -> None:
        """Remember this point for `restore`, replacing the one before."""

    def restore(self) -> int:
        """Return to the checkpoint; the length there."""

    def snapshot(self) -> Snapshot:
        """Copy of the recurrent state of this point, for `put_back` at any later time."""

    def save(self) -> bytes:
        """All that is in memory, for `load` on a like target."""

    def load(self, data: bytes) -> int:
        """Replace the memory by saved bytes; the length then.

        Raises UsageError, with an empty memory, for bytes of another kind of target.
        """

    def put_back(self, snapshot: Snapshot) -> int:
        """Return to a snapshot's point, forgetting what came after it; the length there."""


class Rows(NamedTuple):
    """What one sequence adds to a decode: the arguments of `Target.decode`, and `filler` rows more
    that mean nothing and have no logits.
    """

    sequence: int
    tokens: Sequence[int]
    position: int
    logits: LogitRows
    filler: int = 0


class Together(Protocol):
    """Targets that are the sequences of one context, and so can be decoded at once."""

    @property
    def targets(self) -> Sequence[Target]:
        """By sequence number. What one of them decodes alone ends the rows of all others."""

    @property
    def n_batch(self) -> int:
        """Most rows of one decode, of all sequences."""

    @property
    def mixes(self) -> bool:
        """Whether one sequence may have more rows in a decode than another."""

    def decode(self, parts: Sequence[Rows]) -> None:
        """Decode the rows of several sequences, numbers going up; each target then shows its own
        rows, counted from 0.
        """

    def wait(self) -> None:
        """Return once the rows of the last decode are there."""


def read_tokens(
    target: Target, tokens: Sequence[int], first: int, end: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Decode tokens first ... end - 1 at their own positions, without logits.

    Returns the position and the tokens of each decode.
    """
    batches = []
    for start in range(first, end, target.n_batch):
        batch = tuple(tokens[start : min(start + target.n_batch, end)])
        target.decode(batch, start, "none")
        batches.append((start, batch))
    return batches
