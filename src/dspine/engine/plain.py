"""Plain decoding: one token a step. The reference that speculation must equal."""

from __future__ import annotations

from time import perf_counter

from dspine.engine.loop import Run, StepResult
from dspine.engine.trace import DecodeRecord
from dspine.engine.verify import accept_rows


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
        run, sequence = self._run, self._run.sequence
        anchor, position = sequence.anchor, sequence.anchor_position
        started = perf_counter()
        run.target.decode((anchor,), position, "all")
        run.target.wait()
        verify_ms = (perf_counter() - started) * 1000.0
        verdict = accept_rows((), run.chooser, run.emitter)
        sequence.extend(verdict.tokens)
        if run.trace is not None:
            run.trace.steps.append(DecodeRecord(position, (anchor,), position + 1, 0, 1))
        return StepResult(verdict.tokens, 0, 0, "none", 0.0, verify_ms, verdict.reason)

    def undo(self) -> None:
        length = self._run.sequence.anchor_position
        target = self._run.target
        # Recurrent state has no earlier version; that after the anchor, which is confirmed, stays.
        if target.length() > length and not target.trim(length) and target.length() > length + 1:
            target.clear()
