"""Generates many answers at once: a fixed number of slots, refilled when an answer ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from dspine.errors import CapacityError, UsageError
from dspine.llama.batch import Batch
from dspine.llama.context import Context
from dspine.llama.model import Model

# More than this many candidates are almost never needed to reach top-p; if so, all are sorted.
_FIRST_CANDIDATES = 256
_LONGEST_PERIOD = 64
_LEAST_LOOP = 32
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to make. Temperature 0 takes the most probable token; `seed` fixes the draws."""

    key: str
    prompt: tuple[int, ...]
    temperature: float
    top_p: float
    seed: int


@dataclass(slots=True)
class _Slot:
    sequence: int
    job: Job
    rng: np.random.Generator
    pending: tuple[int, ...]
    """Tokens that are not in the target's memory yet."""
    position: int
    answer: list[int] = field(default_factory=list)


def check_draws(temperature: float, top_p: float, why: str) -> None:
    """UsageError, ending with `why`, for what nothing can be drawn with."""
    if not 0 < temperature <= 5 or not 0 < top_p <= 1:
        raise UsageError(
            f"temperature {temperature} must lie in 0 ... 5 and top_p {top_p} in 0 ... 1, "
            f"without 0{why}"
        )


class Generator:
    """Decodes up to `slots` answers side by side, each as a sequence of its own.

    What all prompts begin with (`shared_prefix`) is decoded once and copied into every slot.
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int,
        max_prompt_tokens: int,
        max_tokens: int,
        shared_prefix: Sequence[int] = (),
        n_threads: int | None = None,
        flash_attention: bool = True,
    ) -> None:
        if slots < 1 or max_tokens < 1:
            raise UsageError(f"slots {slots} and max_tokens {max_tokens} must be at least 1")
        # A recurrent state cannot be taken over in parts, and its memory is per sequence anyway.
        self._prefix = () if model.is_recurrent else tuple(shared_prefix)
        self._max_prompt = max_prompt_tokens
        self._max_tokens = max_tokens
        self._is_end = model.tokenizer.is_end
        self._rows = max(slots, max_prompt_tokens, 256)
        self._context = Context(
            model,
            n_ctx=max_prompt_tokens + max_tokens,
            n_batch=self._rows,
            n_threads=n_threads,
            flash_attention=flash_attention,
            n_sequences=slots + bool(self._prefix),
            max_outputs=slots,
        )
        self._batch = Batch(self._rows)
        self._logits = np.empty((slots, model.vocab_size), dtype=np.float32)
        self._free = list(reversed(range(slots)))
        self._prefix_sequence = slots
        self.tokens = 0
        """Answer tokens made so far."""
        if self._prefix:
            self._batch.add_tokens(self._prefix, 0, slots, logits="none")
            self._context.decode(self._batch)

    def close(self) -> None:
        """Free the target's memory."""
        self._context.close()

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, list[int]]]:
        """Finished answers in the order in which they end."""
        waiting = iter(jobs)
        active: list[_Slot] = []
        more = True
        while True:
            while more and self._free:
                job = next(waiting, None)
                if job is None:
                    more = False
                else:
                    active.append(self._start(job))
            if not active:
                return
            stepped = self._step(active)
            for slot in stepped:
                if self._is_finished(slot.answer):
                    active.remove(slot)
                    self._free.append(slot.sequence)
                    yield slot.job, slot.answer

    def _start(self, job: Job) -> _Slot:
        if not 1 <= len(job.prompt) <= self._max_prompt:
            raise CapacityError(
                f"prompt {job.key} has {len(job.prompt)} tokens: 1 to {self._max_prompt} fit"
            )
        sequence = self._free.pop()
        begin = 0
        shared = len(self._prefix)
        if 0 < shared < len(job.prompt) and job.prompt[:shared] == self._prefix:
            self._context.memory.copy(self._prefix_sequence, sequence)
            begin = shared
        else:
            self._context.memory.remove(sequence, 0)
        return _Slot(
            sequence=sequence,
            job=job,
            rng=np.random.default_rng(job.seed),
            pending=job.prompt[begin:],
            position=begin,
        )

    def _step(self, active: Sequence[_Slot]) -> list[_Slot]:
        """One decode: waiting prompts if there are any, else the next token of every slot."""
        # Prompts go alone: sequences with unequal numbers of rows would be split up anyway.
        starting = [slot for slot in active if not slot.answer]
        chosen: list[_Slot] = []
        rows: list[int] = []
        self._batch.clear()
        # The library decodes sequences together only when their numbers rise one by one.
        for slot in sorted(starting or active, key=lambda s: s.sequence):
            if len(self._batch) + len(slot.pending) > self._rows:
                break
            self._batch.add_tokens(slot.pending, slot.position, slot.sequence, logits="last")
            chosen.append(slot)
            rows.append(len(self._batch) - 1)
        self._context.decode(self._batch)
        for index, row in enumerate(rows):
            self._logits[index] = self._context.logits(row)
        next_tokens = sample_rows(
            self._logits[: len(rows)],
            np.array([slot.job.temperature for slot in chosen]),
            np.array([slot.job.top_p for slot in chosen]),
            np.array([slot.rng.random() for slot in chosen]),
        )
        for slot, token in zip(chosen, next_tokens.tolist(), strict=True):
            slot.position += len(slot.pending)
            slot.pending = (token,)
            slot.answer.append(token)
        self.tokens += len(chosen)
        return chosen

    def _is_finished(self, answer: list[int]) -> bool:
        return self._is_end(answer[-1]) or len(answer) >= self._max_tokens or is_looping(answer)


def common_prefix(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The longest beginning of all prompts that leaves at least one token of each."""
    if not prompts:
        return ()
    # Whatever the first and the last in order share, all between them share as well.
    ordered = [tuple(p) for p in prompts]
    low, high = min(ordered), max(ordered)
    length = 0
    limit = min(len(p) for p in prompts) - 1
    while length < min(limit, len(high)) and low[length] == high[length]:
        length += 1
    return tuple(low[:length])


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether the end repeats itself: at least 3 equal pieces in a row, at least 32 tokens long."""
    size = len(tokens)
    for period in range(1, _LONGEST_PERIOD + 1):
        length = max(_LEAST_LOOP, _REPEATS * period)
        if length > size:
            return False
        if tokens[-1] != tokens[-1 - period]:
            continue
        if tokens[size - length + period :] == tokens[size - length : size - period]:
            return True
    return False


def sample_rows(
    logits: NDArray[np.float32],
    temperatures: NDArray[np.float64],
    top_p: NDArray[np.float64],
    uniforms: NDArray[np.float64],
) -> NDArray[np.int64]:
    """One token of each row (n, V): arg-max at temperature 0, else a draw from the top-p set.

    The set is the smallest one of most probable tokens whose probability reaches `top_p`;
    `uniforms` in [0, 1) decide the draws.
    """
    tokens: NDArray[np.int64] = logits.argmax(axis=1).astype(np.int64)
    drawn = np.flatnonzero(temperatures > 0)
    if len(drawn) == 0:
        return tokens
    rows = torch.from_numpy(logits[drawn]).double()
    rows /= torch.from_numpy(temperatures[drawn]).unsqueeze(1)
    totals = torch.logsumexp(rows, dim=1, keepdim=True)
    for count in (min(_FIRST_CANDIDATES, rows.shape[1]), rows.shape[1]):
        values, ids = torch.topk(rows, count, dim=1)
        sums = torch.exp(values - totals).cumsum(dim=1).numpy()
        if (sums[:, -1] >= top_p[drawn] - 1e-9).all():
            break
    for index, row in enumerate(drawn):
        # The set ends with the token that reaches top_p; rounding may keep the sum just below 1.
        size = min(int(np.searchsorted(sums[index], top_p[row])) + 1, sums.shape[1])
        target = uniforms[row] * sums[index, size - 1]
        place = min(int(np.searchsorted(sums[index, :size], target, side="right")), size - 1)
        tokens[row] = int(ids[index, place])
    return tokens
