"""Answers several requests at once: one step is one decode for all that answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from dspine.engine.answering import Answering
from dspine.engine.events import Event, Finish
from dspine.engine.parts import EngineParts
from dspine.engine.prompt import Prompt
from dspine.engine.request import AnswerOptions, Requests
from dspine.engine.shared_step import SharedStep
from dspine.engine.slots import SlotFacts, choose_slot, make_slot
from dspine.errors import ClosedError, UsageError

CHUNK = 64
"""Tokens of a prompt that are decoded at once while others answer: what they wait at most."""


class Scheduler:
    """Answers several requests at once on the sequences of one engine; one thread only.

    `Engine.scheduler` makes it. Each answer has a slot, which is a sequence of its own, so its
    text is the one that it would be alone.
    """

    def __init__(
        self,
        parts: EngineParts,
        n_slots: int,
        *,
        chunk: int = CHUNK,
        requests: Requests | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`n_slots` sequences are used, at most as many as the target was loaded with. While
        others answer, a prompt is decoded in pieces of `chunk` tokens. `requests` has the
        compiled grammars of before.
        """
        if not 1 <= n_slots <= parts.n_slots:
            raise UsageError(
                f"{n_slots} slots were asked for, the target was loaded with {parts.n_slots}: "
                f"load it with parallel={max(1, n_slots)}"
            )
        self.n_slots = n_slots
        self._chunk = chunk
        self._requests = requests or Requests(parts)
        self._slots = [make_slot(parts, number) for number in range(n_slots)]
        self._answers: dict[int, Answering] = {}
        self._happened: list[tuple[int, Event | Exception]] = []
        self._started = 0
        self._read_last = 0
        """The answer whose prompt had the last turn."""
        self._on_close = on_close
        self._closed = False
        self._shared = None
        if parts.together is not None:
            self._shared = SharedStep(
                parts.together,
                parts.drafter,
                can_trim=not parts.is_recurrent and parts.rollback in (None, "trim"),
                rows_ms=parts.rows_ms,
            )

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

        It takes the idle slot whose memory the prompt goes on from, else the one used longest ago
        (`choose_slot`). Raises UsageError when no slot is free, and what
        `Engine.generate` raises for a prompt or options that cannot be.
        """
        self._check_open()
        busy = {answer.slot.id for answer in self._answers.values()}
        idle = [slot for slot in self._slots if slot.id not in busy]
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
        self._answers[self._started] = Answering(self._started, slot, run, stepper)
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
        try:
            for answer in list(self._answers.values()):
                if answer.is_cancelled:
                    self._report(answer, answer.cancelled())
            self._read()
            self._answer()
        except BaseException:
            for answer in self._answers.values():
                answer.undo()
            raise  # what happened before the interrupt is told by the next step
        happened, self._happened = self._happened, []
        return happened

    def _read(self) -> None:
        """One piece of one prompt, each in its turn."""
        waiting = sorted(number for number, a in self._answers.items() if not a.answers)
        if not waiting:
            return
        later = [number for number in waiting if number > self._read_last]
        answer = self._answers[(later or waiting)[0]]
        self._read_last = answer.number
        alone = len(waiting) == len(self._answers)
        try:
            events = answer.read(answer.slot.target.n_batch if alone else self._chunk)
        except Exception as error:  # noqa: BLE001 - whoever asked is told, the others go on
            self._report(answer, error)
        else:
            self._report(answer, events)

    def _answer(self) -> None:
        """One verify of all whose prompts are in memory."""
        answers = sorted(
            (a for a in self._answers.values() if a.answers), key=lambda answer: answer.slot.id
        )
        if len(answers) > 1 and self._shared is not None:
            busy = {answer.slot.id for answer in answers}
            others = [slot for slot in self._slots if slot.id not in busy]
            self._shared.run(answers, others, self._report)
            return
        for answer in answers:
            started = perf_counter()
            answer.slot.policy.share(1)
            answer.mark()
            try:
                events = answer.took(answer.stepper.step(), started)
            except Exception as error:  # noqa: BLE001 - whoever asked is told, the others go on
                self._report(answer, error)
            else:
                self._report(answer, events)

    def _report(self, answer: Answering, outcome: list[Event] | Exception) -> None:
        """Note what an answer gave; its slot is free after the end."""
        failed = isinstance(outcome, Exception)
        events = [outcome] if isinstance(outcome, Exception) else outcome
        self._happened += [(answer.number, event) for event in events]
        if failed or any(isinstance(event, Finish) for event in events):
            del self._answers[answer.number]
            answer.close(certain=not failed)

    def slots(self) -> list[SlotFacts]:
        """Every slot as it is now."""
        answers = {answer.slot.id: answer for answer in self._answers.values()}
        return [
            answers[slot.id].facts
            if slot.id in answers
            else SlotFacts(slot.id, None, "idle", 0, 0, slot.target.n_ctx, slot.held.facts.tokens)
            for slot in self._slots
        ]

    def close(self) -> None:
        """Give up all answers without further events; the engine is free again."""
        if self._closed:
            return
        self._closed = True
        for answer in self._answers.values():
            answer.close(certain=False)
        self._answers.clear()
        for slot in self._slots:
            slot.policy.share(1)  # the engine's own policy goes on alone
        self._on_close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this scheduler is closed: make a new one")
