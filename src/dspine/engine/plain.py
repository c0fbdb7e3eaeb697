"""Plain decoding: one token a step. The reference that speculation must equal."""

from __future__ import annotations

from dspine.engine.loop import Planned, Run, StepResult, whole_step
from dspine.engine.proposal import NOTHING, Ask, Proposal
from dspine.engine.trace import DecodeRecord
from dspine.engine.verify import accept_rows
from dspine.errors import LibraryError


class PlainStepper:
    """Decodes the anchor, emits the target's choice."""

    disabled_reason: str | None = None

    def __init__(self, run: Run) -> None:
        self._run = run

    def usable(self, common: int) -> int:
        return common

    def begin(self, kept: int) -> None:
        """Nothing to prepare."""

    def saw_prompt(self, position: int, count: int) -> None:
        """Nothing to remember."""

    def prompt_done(self) -> None:
        """Nothing to settle."""

    def step(self) -> StepResult:
        return whole_step(self, self._run.target)

    def plan(self) -> Planned:
        return self.prepare(NOTHING)

    def ask(self) -> Ask | None:
        return None

    def allowed(self, _proposal: Proposal) -> Proposal:
        return NOTHING

    def prepare(
        self,
        _proposal: Proposal,
        *,
        asked: bool = False,  # noqa: ARG002 - there are no drafts
        draft_ms: float = 0.0,
        extra_ms: float = 0.0,
    ) -> Planned:
        sequence = self._run.sequence
        return Planned(
            (sequence.anchor,), sequence.anchor_position, "all", NOTHING, False, draft_ms, extra_ms
        )

    def absorb(
        self,
        planned: Planned,
        verify_ms: float,
        *,
        filler: int = 0,
        sharing: int = 1,  # noqa: ARG002 - nothing is learned from it
        drafting: int = 1,  # noqa: ARG002
        mixed: bool = False,  # noqa: ARG002
    ) -> StepResult:
        run, position = self._run, planned.position
        verdict = accept_rows((), run.chooser, run.emitter)
        run.sequence.extend(verdict.tokens)
        if filler and not run.target.trim(position + 1):
            raise LibraryError("the library cannot cut its memory back: answer one at a time")
        if run.trace is not None:
            run.trace.steps.append(DecodeRecord(position, planned.feed, position + 1, 0, 1))
        return StepResult(verdict.tokens, 0, 0, "none", planned.draft_ms, verify_ms, verdict.reason)

    def undo(self) -> None:
        length = self._run.sequence.anchor_position
        target = self._run.target
        # Recurrent state has no earlier version; that after the anchor, which is confirmed, stays.
        if target.length() > length and not target.trim(length) and target.length() > length + 1:
            target.clear()
