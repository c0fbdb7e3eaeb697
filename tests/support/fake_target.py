"""A scripted target: every next token is a fixed function of the tokens in its memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dspine.drafters.base import Features
from dspine.engine.target import LogitRows, Rows, Snapshot
from dspine.errors import UsageError
from dspine.llama.taps import RowBuffer

NextToken = Callable[[Sequence[int]], int]


def mixing(vocab_size: int, salt: int = 0, memory: int = 3) -> NextToken:
    """A next-token function that looks random but repeats itself: it sees `memory` tokens."""

    def choose(tokens: Sequence[int]) -> int:
        state = 2166136261 ^ salt
        for token in tokens[-memory:]:
            state = ((state ^ (token + 1)) * 16777619) & 0xFFFFFFFF
        return (state >> 7) % vocab_size

    return choose


class _Choosing(Protocol):
    def argmax(self, row: int) -> int: ...


def followed(target: _Choosing, row: int, drafts: Sequence[int]) -> list[int]:
    """What `Target.follow` gives, row by row."""
    tokens = [target.argmax(row)]
    while len(tokens) <= len(drafts) and tokens[-1] == drafts[len(tokens) - 1]:
        tokens.append(target.argmax(row + len(tokens)))
    return tokens


class FakeTarget:
    """Implements `dspine.engine.target.Target`; refuses every misuse the real library punishes."""

    def __init__(
        self,
        next_token: NextToken,
        vocab_size: int,
        *,
        n_ctx: int = 64,
        n_batch: int = 8,
        recurrent: bool = False,
        snapshots: int = 0,
    ) -> None:
        """`recurrent`: no trimming, but for the last `snapshots` rows of a decode, once."""
        self.next_token, self.vocab_size = next_token, vocab_size
        self.n_ctx, self.n_batch, self.max_rows = n_ctx, n_batch, n_batch
        self.recurrent, self.snapshots = recurrent, snapshots
        self._removable = 0
        self.checkpoints = 0
        self._saved: list[int] | None = None
        self.memory: list[int] = []
        self.decoded: list[tuple[int, tuple[int, ...]]] = []
        self.rows_asked: list[int] = []
        self.on_decode: Callable[[], None] = lambda: None
        self._first = 0
        self._count = 0
        self._has_logits = False
        self._with_logits = 0
        """First row of the last decode with logits."""
        self._end_of_logits = 0

    def decode(self, tokens: Sequence[int], position: int, logits: LogitRows) -> None:
        assert 1 <= len(tokens) <= self.n_batch, f"a batch of {len(tokens)} tokens"
        assert position == len(self.memory), f"decode at {position}, memory {len(self.memory)}"
        assert position + len(tokens) <= self.n_ctx, "beyond the context"
        assert all(0 <= token < self.vocab_size for token in tokens)
        self.on_decode()
        self.memory.extend(tokens)
        self.decoded.append((position, tuple(tokens)))
        self._first, self._count = position, len(tokens)
        asked = logits if isinstance(logits, int) else len(tokens) if logits == "all" else 0
        assert 0 <= asked <= len(tokens)
        self._has_logits, self._with_logits = asked > 0, len(tokens) - asked
        self._end_of_logits = len(tokens)
        self._removable = min(self.snapshots, len(tokens) - 1)

    def wait(self) -> None:
        assert self._has_logits, "rows without logits"

    def argmax(self, row: int) -> int:
        assert self._count and self._has_logits, "rows of another decode"
        assert self._with_logits <= row < self._end_of_logits, f"no logits in row {row}"
        self.rows_asked.append(row)
        return self.next_token(self.decoded_prefix(row))

    def follow(self, row: int, drafts: Sequence[int]) -> Sequence[int]:
        return followed(self, row, drafts)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        values = np.zeros(self.vocab_size, np.float32)
        values[self.argmax(row)] = 1.0
        return values

    def features(self, first: int, count: int) -> Features:
        """Two numbers a row: its position and its token, so that a mix-up shows."""
        assert first >= 0 and first + count <= self._count, "rows of another decode"
        _, tokens = self.decoded[-1]
        return np.array(
            [[self._first + i, tokens[i]] for i in range(first, first + count)], np.float32
        ).reshape(count, 2)

    def copy_features(self, first: int, count: int, out: RowBuffer, place: int) -> None:
        out.rows[place : place + count] = self.features(first, count)

    def hide_rows(self, first: int, end: int) -> None:
        """Only rows first ... end - 1 of the last decode have logits."""
        self._with_logits, self._end_of_logits = first, end

    def forget_rows(self) -> None:
        """Another sequence of the context was decoded."""
        self._count, self._has_logits = 0, False

    def clear(self) -> None:
        self.memory = []
        self._saved = None
        self._removable = 0

    def trim(self, length: int) -> bool:
        if self.recurrent and length < len(self.memory):
            if len(self.memory) - length > self._removable:
                return False
            self._removable = 0
        del self.memory[length:]
        return True

    def checkpoint(self) -> None:
        self._saved = list(self.memory)
        self.checkpoints += 1

    def restore(self) -> int:
        assert self._saved is not None, "nothing was saved"
        assert self.memory[: len(self._saved)] == self._saved
        self.memory = list(self._saved)
        return len(self.memory)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            len(self.memory), json.dumps(self.memory).encode() if self.recurrent else b""
        )

    def save(self) -> bytes:
        return json.dumps(self.memory).encode()

    def load(self, data: bytes) -> int:
        self.memory = []
        try:
            self.memory = [int(token) for token in json.loads(data)]
        except ValueError as error:
            raise UsageError("these bytes are no memory") from error
        return len(self.memory)

    def put_back(self, snapshot: Snapshot) -> int:
        kept = self.memory[: snapshot.position]
        assert json.loads(snapshot.data) == kept, "a state of another text"
        self.memory = kept
        return len(kept)

    def length(self) -> int:
        return len(self.memory)

    def decoded_prefix(self, row: int) -> Sequence[int]:
        """Everything up to and including row `row` of the last decode."""
        _, tokens = self.decoded[-1]
        return [*self.memory[: self._first], *tokens[: row + 1]]


class InterruptedTarget(FakeTarget):
    """KeyboardInterrupt comes at moment `at`: before or after one of the calls that steps make."""

    at = -1
    moments = 0

    def decode(self, tokens: Sequence[int], position: int, logits: LogitRows) -> None:
        self._pass()
        super().decode(tokens, position, logits)
        self._pass()

    def argmax(self, row: int) -> int:
        self._pass()
        return super().argmax(row)

    def trim(self, length: int) -> bool:
        self._pass()
        done = super().trim(length)
        self._pass()
        return done

    def checkpoint(self) -> None:
        self._pass()
        super().checkpoint()
        self._pass()

    def restore(self) -> int:
        self._pass()
        length = super().restore()
        self._pass()
        return length

    def _pass(self) -> None:
        self.moments += 1
        if self.moments == self.at:
            raise KeyboardInterrupt


class FakeTargets:
    """Several fake targets as the sequences of one context (`dspine.engine.target.Together`)."""

    def __init__(
        self, targets: Sequence[FakeTarget], *, n_batch: int = 64, mixes: bool = True
    ) -> None:
        self.targets: Sequence[FakeTarget] = targets
        self.n_batch, self.mixes = n_batch, mixes
        self.decodes: list[dict[int, int]] = []
        """Of every decode of several: rows by sequence."""
        self.failures: list[Exception] = []
        """Raised by the next decodes of several, which change nothing then."""
        self._sharing = False
        for target in targets:
            target.on_decode = self._forget_others

    def decode(self, parts: Sequence[Rows]) -> None:
        numbers = [part.sequence for part in parts]
        assert numbers == sorted(set(numbers)), f"sequences {numbers}"
        if self.failures:
            raise self.failures.pop(0)
        self._forget_others()
        self._sharing = True
        for number, tokens, position, logits, filler in parts:
            target = self.targets[number]
            asked = len(tokens) if logits == "all" else logits if isinstance(logits, int) else 0
            target.decode([*tokens, *[tokens[-1]] * filler], position, "all" if asked else "none")
            if asked:
                target.hide_rows(len(tokens) - asked, len(tokens))
        self._sharing = False
        self.decodes.append({part.sequence: len(part.tokens) + part.filler for part in parts})
        assert sum(self.decodes[-1].values()) <= self.n_batch

    def wait(self) -> None:
        """All rows are there at once."""

    def _forget_others(self) -> None:
        if not self._sharing:
            for target in self.targets:
                target.forget_rows()


def plain_answer(next_token: NextToken, prompt: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens, computed without any engine code."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
