"""One answer in pieces, so that others can go on between them: prompt chunks, then steps."""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from dspine.engine.events import Event, Prefill, Reading
from dspine.engine.loop import Run, Stepper, next_chunk, saw_chunk
from dspine.engine.slots import Slot, SlotFacts
from dspine.engine.steps import AnswerSteps, Told


class Piece(NamedTuple):
    """What is decoded next of a prompt: `tokens` at `position` and after it."""

    tokens: tuple[int, ...]
    position: int
    is_last: bool
    """Whether the answer begins after it."""


class Answering:
    """The life of an answer: pieces of its prompt until all is in memory, then steps.

    A piece is decoded by `read`, or with the rows of others, and then `saw` is told. What happens
    goes to `told`; what each step does to the answer is the business of `steps`.
    """

    def __init__(self, number: int, slot: Slot, run: Run, stepper: Stepper, told: Told) -> None:
        self.number = number
        self.slot = slot
        self.run = run
        self.stepper = stepper
        self.steps = AnswerSteps(run, stepper, told, number)
        self.answers = False
        """Whether the prompt is in memory."""
        self.failed = False
        """Whether it ended with an error."""
        self._told = told
        self._position: int | None = None
        """How much of the prompt is in memory; None: find out."""
        self._read_ms = 0.0

    @property
    def is_cancelled(self) -> bool:
        """Whether it is to end now."""
        return self.run.cancel.is_set()

    @property
    def is_over(self) -> bool:
        """Whether no step comes any more."""
        return self.failed or self.steps.reason is not None

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

    def piece(self, most: int) -> Piece:
        """What comes next of the prompt, at most `most` tokens."""
        started = perf_counter()
        run, stepper, held = self.run, self.stepper, self.slot.held
        end = len(run.sequence.tokens) - 1
        position, self._position = self._position, None  # nothing is sure when it is broken off
        if position is None or position != self.slot.target.length():
            # Or its memory was emptied, as rows without meaning could not be cut off it.
            position = held.begin(run.sequence.tokens, stepper.usable, reuse=run.reuse)
            run.recorder.prompt_tokens, run.recorder.cached_tokens = end + 1, position
            stepper.begin(position)
        tokens = next_chunk(run, held, position, most)
        self._read_ms += (perf_counter() - started) * 1000.0
        return Piece(tokens, position, position + len(tokens) >= end)

    def read(self, piece: Piece) -> None:
        """Decode a piece by itself."""
        started = perf_counter()
        if piece.tokens:
            self.slot.target.decode(piece.tokens, piece.position, "none")
        self.saw(piece, (perf_counter() - started) * 1000.0)

    def saw(self, piece: Piece, decode_ms: float) -> None:
        """The last decode, of `decode_ms`, had this piece; Prefill after the last one."""
        started = perf_counter()
        run, stepper, told = self.run, self.stepper, self._told
        recorder, end = run.recorder, len(run.sequence.tokens) - 1
        position = piece.position
        if piece.tokens:
            position = saw_chunk(run, stepper, self.slot.held, position, piece.tokens)
        events: list[tuple[int, Event]] = []
        self._read_ms += decode_ms + (perf_counter() - started) * 1000.0
        if piece.is_last:
            stepper.prompt_done()
            recorder.prefill_ms = self._read_ms
            events = [(self.number, Prefill(end + 1, self._read_ms, recorder.cached_tokens))]
            self.steps.start_clock()
        elif run.tells_reading:
            part = Reading(end + 1, position, self._read_ms, recorder.cached_tokens)
            events = [(self.number, part)]
        # No call and no loop from here on: an interrupt comes before or after all of it.
        self._position = position
        told.events += events
        self.answers = piece.is_last

    def step(self) -> None:
        """A step that shares its decode with no other answer."""
        self.steps.begin()
        self.steps.end(self.stepper.step())

    def fail(self, error: Exception) -> None:
        """It ends here, with this."""
        told, events = self._told, [(self.number, error)]
        # As in `saw`.
        told.events += events
        self.failed = True

    def close(self) -> None:
        """It is over; what is left to tell is told."""
        if not self.failed:
            self.steps.finish()
        self.give_up(certain=not self.failed)

    def give_up(self, *, certain: bool = False) -> None:
        """Leave the slot; `certain`: what its memory holds is known."""
        self.run.chooser.close()
        if certain:
            self.slot.held.end(self.run.sequence.tokens)
        else:
            self.slot.held.forget()


PromptPiece = tuple[Answering, Piece]
"""An answer whose prompt is being decoded, and what comes next of it."""
