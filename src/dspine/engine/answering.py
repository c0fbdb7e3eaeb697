"""One answer in pieces, so that others can go on between them: prompt chunks, then steps."""

from __future__ import annotations

from time import perf_counter

from dspine.engine.emit import EmitterMark
from dspine.engine.events import Event, Finish, FinishReason, Prefill, Step
from dspine.engine.loop import Run, Stepper, StepResult, read_chunk
from dspine.engine.slots import Slot, SlotFacts


class Answering:
    """The life of an answer: `read` until its prompt is in memory, then steps.

    `mark` comes before a step and `took` after it; `undo` takes a step back that was broken off.
    """

    def __init__(self, number: int, slot: Slot, run: Run, stepper: Stepper) -> None:
        self.number = number
        self.slot = slot
        self.run = run
        self.stepper = stepper
        self.answers = False
        """Whether the prompt is in memory."""
        self._position: int | None = None
        """How much of the prompt is in memory; None: find out."""
        self._read_ms = 0.0
        self._began: tuple[int, EmitterMark, object] | None = None
        """Tokens, text and choices where the step under way began."""

    @property
    def is_cancelled(self) -> bool:
        """Whether it is to end now."""
        return self.run.cancel.is_set()

    @property
    def facts(self) -> SlotFacts:
        """The slot as others see it."""
        sequence, target = self.run.sequence, self.slot.target
        return SlotFacts(
            id=self.slot.id,
            answer=self.number,
            state="answer" if self.answers else "prompt",
            prompt_tokens=sequence.prompt_length,
            decoded_tokens=sequence.emitted,
            n_ctx=target.n_ctx,
            held_tokens=target.length(),
        )

    def read(self, most: int) -> list[Event]:
        """Decode the next piece of the prompt, at most `most` tokens; Prefill after the last."""
        started = perf_counter()
        run, stepper, held = self.run, self.stepper, self.slot.held
        recorder, end = run.recorder, len(run.sequence.tokens) - 1
        position, self._position = self._position, None  # nothing is sure when it is broken off
        if position is None:
            position = held.begin(run.sequence.tokens, stepper.usable, reuse=run.reuse)
            recorder.prompt_tokens, recorder.cached_tokens = end + 1, position
            stepper.begin(position)
        if position < end:
            position = read_chunk(run, stepper, held, position, most)
        if position >= end:
            stepper.prompt_done()
        self._position, self.answers = position, position >= end
        self._read_ms += (perf_counter() - started) * 1000.0
        if not self.answers:
            return []
        recorder.prefill_ms = self._read_ms
        return [Prefill(end + 1, self._read_ms, recorder.cached_tokens)]

    def mark(self) -> None:
        """A step begins."""
        run = self.run
        self._began = len(run.sequence.tokens), run.emitter.mark(), run.chooser.mark()

    def undo(self) -> None:
        """Everything back to where the step began, if one is under way."""
        if self._began is None:
            return
        length, text, choices = self._began
        self.run.sequence.truncate(length)
        self.run.emitter.restore(text)
        self.run.chooser.restore(choices)
        self._began = None
        self.stepper.undo()

    def took(self, result: StepResult, started: float) -> list[Event]:
        """What a step that began at `started` gave: its Step, and Finish after the last one."""
        run, recorder, reason = self.run, self.run.recorder, result.reason
        if reason is None and run.target.n_ctx <= run.sequence.anchor_position:
            reason = "context"
        text = run.emitter.finish_text() if reason else run.emitter.take_text()
        spent_ms = (perf_counter() - started) * 1000.0
        host_ms = max(0.0, spent_ms - result.draft_ms - result.verify_ms)
        times = result.draft_ms, result.verify_ms, host_ms
        step = Step(
            result.tokens,
            text,
            result.drafted,
            result.accepted,
            result.proposer,
            *times,
            run.take_logprobs(),
        )
        self._began = None
        count = len(result.tokens), result.drafted, result.accepted
        recorder.add(result.proposer, *count, *times)
        recorder.wall_ms += spent_ms
        return [step] if reason is None else [step, self._finish(reason)]

    def cancelled(self) -> list[Event]:
        """It ends here: what was held back of the text, and Finish."""
        finish = self._finish("cancelled")
        rest = self.run.emitter.finish_text()
        if not rest:
            return [finish]
        return [Step((), rest, 0, 0, "none", 0.0, 0.0, 0.0, self.run.take_logprobs()), finish]

    def close(self, *, certain: bool) -> None:
        """It is over; `certain`: what the memory holds is known."""
        self.run.chooser.close()
        if certain:
            self.slot.held.end(self.run.sequence.tokens)
        else:
            self.slot.held.forget()

    def _finish(self, reason: FinishReason) -> Finish:
        self.run.recorder.disabled_reason = self.stepper.disabled_reason
        return Finish(reason, self.run.recorder.snapshot())
