"""Speculative decoding: propose a block, verify it in one decode, keep the correct prefix."""

from __future__ import annotations

from time import perf_counter

from dspine.engine.loop import Run, StepResult
from dspine.engine.proposal import NOTHING, Ask, Confirmed, Proposer
from dspine.engine.rollback import MAX_REPLAY, Rollback
from dspine.engine.trace import DecodeRecord
from dspine.engine.verify import accept_rows
from dspine.engine.width import Outcome, WidthPolicy


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

    @property
    def disabled_reason(self) -> str | None:
        return self._disabled_reason or self._proposer.disabled_reason

    def usable(self, common: int) -> int:
        return self._proposer.usable(self._run.sequence.tokens, common)

    def begin(self, kept: int) -> None:
        self._policy.begin()
        self._proposer.begin(self._run.sequence.tokens, kept)

    def saw_prompt(self, position: int, count: int) -> None:
        self._proposer.saw_prompt(position, count)

    def prompt_done(self) -> None:
        self._rollback.start(self._run.sequence.anchor_position)

    def step(self) -> StepResult:
        run, sequence = self._run, self._run.sequence
        anchor, position = sequence.anchor, sequence.anchor_position

        started = perf_counter()
        proposal = NOTHING
        limit = run.room - 1 - (position - self._rollback.held)
        if limit > 0:
            extra = position - self._rollback.held
            proposal = self._proposer.propose(
                Ask(anchor, position, limit, run.chooser.draw(), extra)
            )
            if proposal.tokens:
                proposal = proposal.first(run.chooser.allowed(proposal.tokens))
        drafts = proposal.tokens
        drafted_at = perf_counter()

        if position - self._rollback.held > MAX_REPLAY:
            self._replay(position)
        held = self._rollback.held
        feed = (*sequence.tokens[held:], *drafts)
        first_row = position - held
        if drafts:
            self._rollback.before_verify()
        run.target.decode(feed, held, "all")
        run.target.wait()
        verified_at = perf_counter()

        verdict = accept_rows(
            drafts, run.chooser, run.emitter, first_row=first_row, drawn=proposal.drawn
        )
        kept = len(verdict.tokens)
        sequence.extend(verdict.tokens)
        self._proposer.confirm(Confirmed(position, first_row, verdict.tokens))
        self._rollback.settle(held + len(feed), position + kept)
        draft_ms = (drafted_at - started) * 1000.0
        verify_ms = (verified_at - drafted_at) * 1000.0
        if limit > 0:
            self._policy.observe(Outcome(len(drafts), verdict.tokens, draft_ms, verify_ms))
        if run.trace is not None:
            run.trace.steps.append(DecodeRecord(held, feed, position + kept, first_row, kept))
        return StepResult(
            tokens=verdict.tokens,
            drafted=len(drafts),
            accepted=verdict.accepted,
            proposer=proposal.proposer,
            draft_ms=draft_ms,
            verify_ms=verify_ms,
            reason=verdict.reason,
        )

    def _replay(self, position: int) -> None:
        """Decode confirmed tokens that piled up since the last checkpoint, without drafts."""
        run, held = self._run, self._rollback.held
        tokens = tuple(run.sequence.tokens[held:position])
        run.target.decode(tokens, held, "none")
        self._rollback.start(position)
        if run.trace is not None:
            run.trace.steps.append(DecodeRecord(held, tokens, position, len(tokens), 0))

    def undo(self) -> None:
        length = self._run.sequence.anchor_position
        self._rollback.undo(length)
        self._proposer.truncate(length + 1)
