"""The beginning and the end of a step of one answer: told and counted whole, or taken back."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from dspine.engine.emit import EmitterMark
from dspine.engine.events import Event, Finish, FinishReason, Step

if TYPE_CHECKING:
    from dspine.engine.loop import Run, Stepper, StepResult


class Told:
    """What is on its way to who asked: numbers of answers with their events, or their errors."""

    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events: list[tuple[int, Any]] = []
        """What `take` gives."""

    def take(self) -> list[tuple[int, Event | Exception]]:
        """Everything since the last call."""
        events, self.events = self.events, []
        return events


class AnswerSteps:
    """`begin` comes before a step and `end` after it; `undo` takes a step back that broke off.

    Python looks for interrupts where functions are called and where loops turn. So a step becomes
    part of the answer in a few plain assignments without either: an interrupt comes before all of
    them, and nothing of the step stays, or after them, and the step is told and counted.
    """

    def __init__(self, run: Run, stepper: Stepper, told: Told, number: int = 0) -> None:
        """Events go to `told` with this `number`."""
        self.told = told
        self.reason: FinishReason | None = None
        """Why the answer is complete, None while it goes on."""
        self._run = run
        self._stepper = stepper
        self._number = number
        self._began: tuple[int, EmitterMark, object] | None = None
        """Tokens, text and choices where the step under way began."""
        self._since = 0.0
        self._finished = False

    def start_clock(self) -> None:
        """What passes from now on is time of the next step; by itself that begins where the step
        before ended.
        """
        self._since = perf_counter()

    def begin(self) -> None:
        """A step begins."""
        if self._began is not None:
            self.undo()  # an interrupt came while the last one was taken back
        run = self._run
        self._began = len(run.sequence.tokens), run.emitter.mark(), run.chooser.mark()

    def end(self, result: StepResult) -> None:
        """The step gave `result`."""
        run, told, recorder = self._run, self.told, self._run.recorder
        tokens, drafted, accepted, proposer, draft_ms, verify_ms, reason = result
        if reason is None and run.target.n_ctx <= run.sequence.anchor_position:
            reason = "context"
        text = run.emitter.finish_text() if reason else run.emitter.take_text()
        logprobs = run.take_logprobs()
        ended = perf_counter()
        wall_ms = (ended - self._since) * 1000.0
        host_ms = max(0.0, wall_ms - draft_ms - verify_ms)
        step = Step(
            tokens, text, drafted, accepted, proposer, draft_ms, verify_ms, host_ms, logprobs
        )
        steps, events = [step], [(self._number, step)]
        wall_ms += recorder.wall_ms
        # No call and no loop from here on.
        told.events += events
        recorder.steps += steps
        recorder.wall_ms = wall_ms
        self.reason = reason
        self._began = None
        self._since = ended

    def undo(self) -> None:
        """Everything back to where the step began, if one is under way."""
        if self._began is None:
            return
        length, text, choices = self._began
        run = self._run
        run.sequence.truncate(length)
        run.emitter.restore(text)
        run.chooser.restore(choices)
        self._stepper.undo()
        self._began = None

    def finish(self) -> None:
        """Tell what comes last, once: Finish, and before it what was held back of a text that was
        cancelled.
        """
        assert self.reason is not None
        if self._finished:
            return
        run, told = self._run, self.told
        run.recorder.disabled_reason = self._stepper.disabled_reason
        finish = Finish(self.reason, run.recorder.snapshot())
        text = run.emitter.mark()
        try:
            rest = run.emitter.finish_text() if self.reason == "cancelled" else ""
            events: list[tuple[int, Event]] = [(self._number, finish)]
            if rest:
                last = Step((), rest, 0, 0, "none", 0.0, 0.0, 0.0, run.take_logprobs())
                events = [(self._number, last), *events]
        except BaseException:
            run.emitter.restore(text)
            raise
        # No call and no loop from here on.
        told.events += events
        self._finished = True
