"""Speculative decoding: propose a block, verify it in one decode, keep the correct prefix."""

from __future__ import annotations

import logging
from time import perf_counter

from dspine.engine.loop import Run, StepResult
from dspine.engine.proposal import NOTHING, Ask, Confirmed, Proposer
from dspine.engine.rollback import MAX_REPLAY, Rollback
from dspine.engine.target import read_tokens
from dspine.engine.trace import DecodeRecord
from dspine.engine.verify import accept_rows
from dspine.engine.width import Outcome, WidthPolicy
from dspine.errors import DspineError

log = logging.getLogger("dspine")


class SpeculativeStepper:
    """One step = draft, verify of anchor and drafts, accept, roll back, tell the proposer."""

    def __init__(
        self,
        run: Run,
        proposer: Proposer,
        policy: WidthPolicy,
        rollback: Rollback,
        *,
        disabled_reason: str | None = None,
    ) -> None:
        """`disabled_reason`: why a drafter that was asked for is not among the proposers."""
        self._run = run
        self._proposer = proposer
        self._policy = policy
        self._rollback = rollback
        self._disabled_reason = disabled_reason
        self._drafting = True

    @property
    def disabled_reason(self) -> str | None:
        return self._disabled_reason or self._proposer.disabled_reason

    def usable(self, common: int) -> int:
        return self._proposer.usable(self._run.sequence.tokens, common)

    def begin(self, kept: int) -> None:
        self._policy.begin(self._run.max_drafts)
        self._proposer.begin(self._run.sequence.tokens, kept)

    def saw_prompt(self, position: int, count: int) -> None:
        self._proposer.saw_prompt(position, count)

    def prompt_done(self) -> None:
        self._rollback.start(self._run.sequence.anchor_position)

    def step(self) -> StepResult:
        run, rollback, target = self._run, self._rollback, self._run.target
        tokens = run.sequence.tokens
        position = len(tokens) - 1

        started = perf_counter()
        caught_up_ms = 0.0
        if position - rollback.held >= target.max_rows:
            self._catch_up(position)
            caught_up_ms, started = (perf_counter() - started) * 1000.0, perf_counter()
        proposal = NOTHING
        held = rollback.held
        extra = position - held
        limit = min(run.room, target.max_rows - extra) - 1
        if run.max_drafts is not None:
            limit = min(limit, run.max_drafts)
        asked = limit > 0 and self._drafting and extra <= MAX_REPLAY
        if asked:
            draw, forced = run.chooser.draw(), run.chooser.forced()
            ask = Ask(tokens[position], position, limit, draw, extra, rollback.copies, forced)
            proposal = self._proposer.propose(ask)
            if proposal.tokens:
                proposal = proposal.first(run.chooser.allowed(proposal.tokens))
        drafted_at = perf_counter()
        if proposal.tokens and not self._can_verify(len(proposal.tokens)):
            proposal = NOTHING
        drafts = proposal.tokens
        feed = (*tokens[held:], *drafts)
        if not drafts:
            rollback.before_verify(0)
        saved_at = perf_counter()
        target.decode(feed, held, 1 + len(drafts) if extra else "all")
        target.wait()
        verified_at = perf_counter()

        confirmed, accepted, reason = accept_rows(
            drafts, run.chooser, run.emitter, first_row=extra, drawn=proposal.drawn
        )
        kept = len(confirmed)
        run.sequence.extend(confirmed)
        self._proposer.confirm(Confirmed(position, extra, confirmed))
        confirmed_at = perf_counter()
        rollback.settle(held + len(feed), position + kept)
        settled_at = perf_counter()
        draft_ms = (drafted_at - started) * 1000.0
        verify_ms = (verified_at - saved_at) * 1000.0
        copied_ms = (saved_at - drafted_at + settled_at - confirmed_at) * 1000.0
        if asked:
            self._policy.observe(Outcome(len(drafts), confirmed, draft_ms, verify_ms))
        if run.trace is not None:
            run.trace.steps.append(DecodeRecord(held, feed, position + kept, extra, kept))
        return StepResult(
            tokens=confirmed,
            drafted=len(drafts),
            accepted=accepted,
            proposer=proposal.proposer,
            draft_ms=draft_ms,
            verify_ms=caught_up_ms + copied_ms + verify_ms,
            reason=reason,
        )

    def _catch_up(self, position: int) -> None:
        """Decode what is missing before `position`, as it does not fit beside the anchor: after
        an interrupt. Less than that waits for the next decode.
        """
        run, held = self._run, self._rollback.held
        self._rollback.before_verify(0)
        for first, tokens in read_tokens(run.target, run.sequence.tokens, held, position):
            if run.trace is not None:
                end = first + len(tokens)
                run.trace.steps.append(DecodeRecord(first, tokens, end, len(tokens), 0))
        self._rollback.settle(position, position)

    def _can_verify(self, drafts: int) -> bool:
        """Save what a verify with drafts needs; without it, drafting ends for good."""
        try:
            self._rollback.before_verify(drafts)
        except DspineError as error:
            self._drafting = False
            self._disabled_reason = f"rejected drafts could not be taken back: {error}"
            log.warning("drafting is off: %s", self._disabled_reason)
        return self._drafting

    def undo(self) -> None:
        length = self._run.sequence.anchor_position
        self._rollback.undo(length)
        self._proposer.truncate(length + 1)
