"""One generation from prompt to finish; what happens inside a step is the stepper's business."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

from dspine.engine.choose import Chooser
from dspine.engine.emit import Emitter
from dspine.engine.events import Event, FinishReason, Prefill, TokenLogprob
from dspine.engine.held import HeldContext
from dspine.engine.logprobs import LogprobRecorder
from dspine.engine.proposal import NOTHING, Ask, Proposal
from dspine.engine.sequence import TokenSequence
from dspine.engine.stats import StatsRecorder
from dspine.engine.steps import AnswerSteps, Told
from dspine.engine.target import LogitRows, Target
from dspine.engine.trace import Trace
from dspine.errors import CapacityError


@dataclass(slots=True)
class Run:
    """Everything one generation works on."""

    target: Target
    sequence: TokenSequence
    emitter: Emitter
    chooser: Chooser
    cancel: threading.Event = field(default_factory=threading.Event)
    recorder: StatsRecorder = field(default_factory=StatsRecorder)
    trace: Trace | None = None
    reuse: bool = True
    """Whether what the memory holds of the prompt may stay."""
    logprobs: LogprobRecorder | None = None
    """Listens to `chooser`."""
    max_drafts: int | None = None
    """Drafts of a verify at most, None for as many as the policy says."""
    tells_reading: bool = False
    """Whether parts of the prompt are told of."""

    def take_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Those of the tokens chosen since the last call, None when not asked for."""
        return None if self.logprobs is None else self.logprobs.take()

    @property
    def room(self) -> int:
        """Rows that the next verify may have: positions left, tokens that may be emitted."""
        room = min(self.target.n_ctx - self.sequence.anchor_position, self.target.max_rows)
        remaining = self.emitter.remaining
        return room if remaining is None else min(room, remaining)


class StepResult(NamedTuple):
    """What a stepper did: confirmed tokens, and its times in milliseconds."""

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    proposer: str
    draft_ms: float
    verify_ms: float
    reason: FinishReason | None


class Planned(NamedTuple):
    """What a step decodes: `feed` at `position` and after it, the anchor before the drafts."""

    feed: tuple[int, ...]
    position: int
    logits: LogitRows
    proposal: Proposal = NOTHING
    """Its tokens are the last ones of `feed`."""
    asked: bool = False
    """Whether drafts could have been made."""
    draft_ms: float = 0.0
    extra_ms: float = 0.0
    """Time of what the decode needed before it, besides drafts."""


class Stepper(Protocol):
    """Plain or speculative decoding.

    `step` is `plan`, a decode and `absorb`. Where a drafter or a decode serves several answers,
    `plan` is taken apart: `ask`, a proposal, `allowed`, `prepare`.
    """

    def usable(self, common: int) -> int:
        """Of `common` positions in memory, how many need not be decoded again for this stepper."""

    def begin(self, kept: int) -> None:
        """A new generation starts with a memory that holds the first `kept` positions."""

    def saw_prompt(self, position: int, count: int) -> None:
        """The last decode was prompt rows at `position` ... `position + count - 1`."""

    def prompt_done(self) -> None:
        """All of the prompt but the anchor is in memory."""

    def step(self) -> StepResult:
        """Confirm at least one token: extends the sequence and settles the memory."""

    def plan(self) -> Planned:
        """Propose drafts and get ready to verify them."""

    def ask(self) -> Ask | None:
        """What to ask a proposer for, None when there can be no drafts."""

    def allowed(self, proposal: Proposal) -> Proposal:
        """The part of a proposal that can be right at all."""

    def prepare(
        self,
        proposal: Proposal,
        *,
        asked: bool,
        draft_ms: float = 0.0,
        extra_ms: float = 0.0,
    ) -> Planned:
        """Get ready to verify `proposal`, which answers an ask or is none (`asked` says that).

        The times are those of proposing it and of what was needed before that.
        """

    def absorb(
        self,
        planned: Planned,
        verify_ms: float,
        *,
        filler: int = 0,
        sharing: int = 1,
        drafting: int = 1,
        mixed: bool = False,
    ) -> StepResult:
        """The decode is done: accept rows, extend the sequence, settle the memory.

        `filler` rows without meaning stood behind the planned ones. `sharing` answers had rows in
        the decode, each of as many, and `drafting` of them a part in the drafts. `mixed`: so had a
        prompt, and nothing can be learned from the decode's time.
        """

    def undo(self) -> None:
        """A step was interrupted: everything back to the sequence as it is now."""

    @property
    def disabled_reason(self) -> str | None:
        """Why this stepper no longer drafts, if it should."""


def whole_step(stepper: Stepper, target: Target) -> StepResult:
    """A step of one answer that shares its decode with no other."""
    planned = stepper.plan()
    started = perf_counter()
    target.decode(planned.feed, planned.position, planned.logits)
    target.wait()
    return stepper.absorb(planned, (perf_counter() - started) * 1000.0)


def generate(run: Run, stepper: Stepper, held: HeldContext | None = None) -> Iterator[Event]:
    """Events of one generation: Prefill, Steps, Finish.

    `held` knows what the memory holds from before; the caller tells it when the answer is over.
    Without it the memory is emptied first.

    Ctrl-C and `run.cancel` end it between steps; an interrupted step leaves no trace, so the
    text so far stays and the memory matches it. Raises CapacityError for a prompt that does
    not fit.
    """
    sequence, recorder = run.sequence, run.recorder
    steps = AnswerSteps(run, stepper, told := Told())
    started = perf_counter()
    try:
        kept = _prefill(run, stepper, held or HeldContext(run.target))
        recorder.prompt_tokens, recorder.cached_tokens = sequence.prompt_length, kept
        recorder.prefill_ms = (perf_counter() - started) * 1000.0
        yield Prefill(sequence.prompt_length, recorder.prefill_ms, kept)
        while steps.reason is None:
            steps.start_clock()
            if run.cancel.is_set():
                steps.reason = "cancelled"
                break
            steps.begin()
            steps.end(stepper.step())
            # No call between these two: an interrupt comes before or after both.
            (_, step), told.events = told.events[0], []
            yield step
    except (KeyboardInterrupt, _CancelledError):
        steps.undo()
        steps.reason = steps.reason or "cancelled"
    steps.finish()
    for _, event in told.events:
        yield event


def _prefill(run: Run, stepper: Stepper, held: HeldContext) -> int:
    """Decode the prompt up to its last token, which is the first anchor, but for the positions
    that are held already; how many those are.
    """
    target, tokens = run.target, run.sequence.tokens
    check_fits(tokens, target)
    kept = position = held.begin(tokens, stepper.usable, reuse=run.reuse)
    stepper.begin(kept)
    end = len(tokens) - 1
    while position < end:
        if run.cancel.is_set():
            raise _CancelledError
        position = read_chunk(run, stepper, held, position, target.n_batch)
    stepper.prompt_done()
    return kept


def check_fits(prompt: Sequence[int], target: Target) -> None:
    """CapacityError for a prompt that is longer than the context."""
    if len(prompt) > target.n_ctx:
        raise CapacityError(
            f"the prompt has {len(prompt)} tokens, the context has {target.n_ctx}: shorten the "
            f"prompt or raise the context size (-c)"
        )


def read_chunk(run: Run, stepper: Stepper, held: HeldContext, position: int, most: int) -> int:
    """Decode at most `most` tokens of the prompt from `position` on; the position after them."""
    chunk = next_chunk(run, held, position, most)
    run.target.decode(chunk, position, "none")
    return saw_chunk(run, stepper, held, position, chunk)


def next_chunk(run: Run, held: HeldContext, position: int, most: int) -> tuple[int, ...]:
    """What is decoded of the prompt from `position` on, at most `most` tokens."""
    tokens = run.sequence.tokens
    limit = min(position + min(most, run.target.n_batch), len(tokens) - 1)
    return tuple(tokens[position : held.pause(position, limit)])


def saw_chunk(
    run: Run, stepper: Stepper, held: HeldContext, position: int, chunk: tuple[int, ...]
) -> int:
    """The last decode had `chunk` at `position`: all hear of it; the position after it."""
    if run.trace is not None:
        run.trace.chunks.append(chunk)
    stepper.saw_prompt(position, len(chunk))
    position += len(chunk)
    held.reached(position)
    return position


class _CancelledError(Exception):
    """The caller asked to stop while the prompt was being decoded."""
