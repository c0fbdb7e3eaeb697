"""Answers several requests at once: one step is one decode for all that answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dspine.engine.events import Event, Finish
from dspine.engine.loop import Run, generate
from dspine.engine.parts import EngineParts
from dspine.engine.prompt import Prompt
from dspine.engine.request import AnswerOptions, Requests
from dspine.engine.slots import Slot, SlotFacts, choose_slot, make_slot
from dspine.errors import ClosedError, UsageError


@dataclass(slots=True)
class _Answer:
    """One answer under way."""

    id: int
    slot: Slot
    run: Run
    events: Iterator[Event]
    answering: bool = False
    """Whether its prompt is decoded."""


class Scheduler:
    """Answers several requests at once on the sequences of one engine; one thread only.

    `Engine.scheduler` makes it. Each answer has a slot, which is a sequence of its own, so its
    text is the one that it would be alone.
    """

    def __init__(
        self, parts: EngineParts, n_slots: int, *, on_close: Callable[[], None] = lambda: None
    ) -> None:
        """`n_slots` sequences are used, at most as many as the target was loaded with."""
        if not 1 <= n_slots <= parts.n_slots:
            raise UsageError(
                f"{n_slots} slots were asked for, the target was loaded with {parts.n_slots}: "
                f"load it with parallel={max(1, n_slots)}"
            )
        self.n_slots = n_slots
        self._parts = parts
        self._requests = Requests(parts)
        self._slots = [make_slot(parts, number) for number in range(n_slots)]
        self._answers: dict[int, _Answer] = {}
        self._started = 0
        self._on_close = on_close
        self._closed = False

    def free_slots(self) -> int:
        """How many more answers can be started now."""
        return self.n_slots - len(self._answers)

    def start(
        self,
        prompt: Prompt,
        *,
        cancel: threading.Event | None = None,
        raw: bool = False,
        variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> int:
        """Begin an answer; its number, which no other answer has. Options as `Engine.generate`.

        It takes the idle slot that shares the longest beginning with the prompt, of equal ones
        the one used longest ago. Raises UsageError when no slot is free, and what
        `Engine.generate` raises for a prompt or options that cannot be.
        """
        self._check_open()
        busy = {id(answer.slot) for answer in self._answers.values()}
        idle = [slot for slot in self._slots if id(slot) not in busy]
        if not idle:
            raise UsageError(
                f"all {self.n_slots} slots are answering: wait until one is free (free_slots)"
            )
        tokens = self._requests.encode(prompt, raw=raw, variables=variables)
        slot = choose_slot(idle, tokens)
        wanted = AnswerOptions(cancel=cancel, **options)
        run = self._requests.run(tokens, slot.target, wanted)
        stepper = self._requests.stepper(run, slot, plain=wanted.plain)
        self._started += 1
        slot.last_used = self._started
        events = generate(run, stepper, slot.held)
        self._answers[self._started] = _Answer(self._started, slot, run, events)
        return self._started

    def cancel(self, answer: int) -> None:
        """End an answer within the next step, with Finish("cancelled"); no other is touched.

        An answer that is over already is left as it is.
        """
        if answer in self._answers:
            self._answers[answer].run.cancel.set()

    def step(self) -> list[tuple[int, Event | Exception]]:
        """One step of all answers: what happened, with the numbers of the answers.

        At most one piece of a prompt is decoded, and one verify of all that answer. An answer
        ends with Finish or with an exception; both free its slot. Nothing happens while no
        answer runs.
        """
        self._check_open()
        happened: list[tuple[int, Event | Exception]] = []
        for answer in list(self._answers.values()):
            try:
                event = next(answer.events)
            except Exception as error:  # noqa: BLE001 - whoever asked is told, the others go on
                happened.append((answer.id, error))
                answer.slot.held.forget()
                self._end(answer)
                continue
            happened.append((answer.id, event))
            answer.answering = True
            if isinstance(event, Finish):
                answer.slot.held.end(answer.run.sequence.tokens)
                self._end(answer)
        return happened

    def slots(self) -> list[SlotFacts]:
        """Every slot as it is now."""
        answers = {answer.slot.id: answer for answer in self._answers.values()}
        return [self._facts(slot, answers.get(slot.id)) for slot in self._slots]

    def close(self) -> None:
        """Give up all answers without further events; the engine is free again."""
        if self._closed:
            return
        self._closed = True
        for answer in list(self._answers.values()):
            answer.events = iter(())
            self._end(answer)
        self._on_close()

    def _end(self, answer: _Answer) -> None:
        answer.run.chooser.close()
        del self._answers[answer.id]

    @staticmethod
    def _facts(slot: Slot, answer: _Answer | None) -> SlotFacts:
        n_ctx = slot.target.n_ctx
        if answer is None:
            held = slot.held.facts.tokens
            return SlotFacts(slot.id, None, "idle", 0, 0, n_ctx, held)
        sequence = answer.run.sequence
        return SlotFacts(
            id=slot.id,
            answer=answer.id,
            state="answer" if answer.answering else "prompt",
            prompt_tokens=sequence.prompt_length,
            decoded_tokens=sequence.emitted,
            n_ctx=n_ctx,
            held_tokens=slot.target.length(),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this scheduler is closed: make a new one")
