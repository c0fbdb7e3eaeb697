"""Speculative decoding: propose a block, verify it in one decode, keep the correct prefix."""

from __future__ import annotations

import logging
from time import perf_counter

from dspine.engine.loop import Planned, Run, StepResult, whole_step
from dspine.engine.proposal import NOTHING, Ask, Confirmed, Proposal, Proposer
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
        return whole_step(self, self._run.target)

    def plan(self) -> Planned:
        started = perf_counter()
        ask = self.ask()
        asked_at = perf_counter()
        proposal = NOTHING if ask is None else self.allowed(self._proposer.propose(ask))
        drafted_at = perf_counter()
        return self.prepare(
            proposal,
            asked=ask is not None,
            draft_ms=(drafted_at - asked_at) * 1000.0,
            extra_ms=(asked_at - started) * 1000.0,
        )

    def ask(self) -> Ask | None:
        run, rollback, max_rows = self._run, self._rollback, self._run.target.max_rows
        tokens = run.sequence.tokens
        position = len(tokens) - 1
        extra = position - rollback.held
        if extra >= max_rows:
            self._catch_up(position)
            extra = position - rollback.held
        limit = min(run.room, max_rows - extra) - 1
        if run.max_drafts is not None:
            limit = min(limit, run.max_drafts)
        if limit <= 0 or not self._drafting or extra > MAX_REPLAY:
            return None
        draw, forced = run.chooser.draw(), run.chooser.forced()
        return Ask(tokens[position], position, limit, draw, extra, rollback.copies, forced)

    def allowed(self, proposal: Proposal) -> Proposal:
        if not proposal.tokens:
            return proposal
        return proposal.first(self._run.chooser.allowed(proposal.tokens))

    def prepare(
        self,
        proposal: Proposal,
        *,
        asked: bool,
        draft_ms: float = 0.0,
        extra_ms: float = 0.0,
    ) -> Planned:
        started = perf_counter()
        if proposal.tokens and not self._can_verify(len(proposal.tokens)):
            proposal = NOTHING
        drafts = proposal.tokens
        if not drafts:
            self._rollback.before_verify(0)
        tokens, held = self._run.sequence.tokens, self._rollback.held
        return Planned(
            feed=(*tokens[held:], *drafts),
            position=held,
            logits=1 + len(drafts) if held + 1 < len(tokens) else "all",
            proposal=proposal,
            asked=asked,
            draft_ms=draft_ms,
            extra_ms=extra_ms + (perf_counter() - started) * 1000.0,
        )

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
        run, proposal, held = self._run, planned.proposal, planned.position
        drafts = proposal.tokens
        position = len(run.sequence.tokens) - 1
        extra = position - held
        confirmed, accepted, reason = accept_rows(
            drafts, run.chooser, run.emitter, first_row=extra, drawn=proposal.drawn
        )
        kept = len(confirmed)
        run.sequence.extend(confirmed)
        self._proposer.confirm(Confirmed(position, extra, confirmed))
        confirmed_at = perf_counter()
        self._rollback.settle(held + len(planned.feed) + filler, position + kept)
        settled_ms = (perf_counter() - confirmed_at) * 1000.0
        if planned.asked:
            self._policy.observe(
                Outcome(
                    len(drafts) + filler,
                    confirmed,
                    planned.draft_ms / drafting,
                    0.0 if mixed else verify_ms / sharing,
                )
            )
        else:
            self._policy.passed(confirmed)
        if run.trace is not None:
            run.trace.steps.append(DecodeRecord(held, planned.feed, position + kept, extra, kept))
        return StepResult(
            tokens=confirmed,
            drafted=len(drafts),
            accepted=accepted,
            proposer=proposal.proposer,
            draft_ms=planned.draft_ms,
            verify_ms=planned.extra_ms + verify_ms + settled_ms,
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
