"""Answers several requests at once: one step is one decode for all that answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from dspine.engine.answering import Answering, PromptPiece
from dspine.engine.events import Event
from dspine.engine.parts import EngineParts
from dspine.engine.prompt import Prompt
from dspine.engine.request import AnswerOptions, Requests
from dspine.engine.shared_step import SharedStep
from dspine.engine.slots import SlotFacts, choose_slot, make_slot
from dspine.engine.steps import Told
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
        self._told = Told()
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
        """Begin an answer; its number, which no other answer has. Options as `Engine.generate`,
        and `tells_reading` for a Reading after each part of the prompt but the last.

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
        self._answers[self._started] = Answering(self._started, slot, run, stepper, self._told)
        return self._started

    def cancel(self, answer: int) -> None:
        """End an answer within the next step, with Finish("cancelled"); no other is touched.

        An answer that is over already is left as it is.
        """
        if answer in self._answers:
            self._answers[answer].run.cancel.set()

    def step(self) -> list[tuple[int, Event | Exception]]:
        """One step of all answers: what happened, with the numbers of the answers.

        At most one piece of a prompt is decoded, and one verify of all that answer, in one decode
        where the target allows it. An answer ends with Finish or with an exception; both free its
        slot. Nothing happens while no answer runs.
        """
        self._check_open()
        try:
            for answer in self._answers.values():
                if answer.is_cancelled and not answer.is_over:
                    answer.steps.reason = "cancelled"
            self._let_go()
            self._answer(self._read())
            self._let_go()
        except BaseException:
            for answer in self._answers.values():
                answer.steps.undo()
            raise  # what happened before the interrupt is told by the next step
        return self._told.take()

    def _read(self) -> PromptPiece | None:
        """One piece of one prompt, each in its turn; or that piece, to be decoded with a verify.

        The last piece is decoded before, so that its answer is part of the verify.
        """
        waiting = sorted(number for number, a in self._answers.items() if not a.answers)
        if not waiting:
            return None
        later = [number for number in waiting if number > self._read_last]
        answer = self._answers[(later or waiting)[0]]
        self._read_last = answer.number
        alone = len(waiting) == len(self._answers)
        try:
            piece = answer.piece(answer.slot.target.n_batch if alone else self._chunk)
            if not (alone or piece.is_last or self._shared is None) and self._shared.mixes:
                return answer, piece
            answer.read(piece)
        except Exception as error:  # noqa: BLE001 - whoever asked is told, the others go on
            answer.fail(error)
        return None

    def _answer(self, reading: PromptPiece | None) -> None:
        """One verify of all whose prompts are in memory, with `reading` in the same decode."""
        answers = [a for a in self._answers.values() if a.answers and not a.is_over]
        if self._shared is not None and (len(answers) > 1 or reading is not None):
            answers.sort(key=lambda answer: answer.slot.id)
            busy = {answer.slot.id for answer in answers}
            idle = [slot for slot in self._slots if slot.id not in busy]
            self._shared.run(answers, idle, reading)
            return
        for answer in answers:
            answer.slot.policy.share(1)
            try:
                answer.step()
            except Exception as error:  # noqa: BLE001 - whoever asked is told, the others go on
                answer.fail(error)

    def _let_go(self) -> None:
        """Answers that are over leave their slots."""
        for answer in [a for a in self._answers.values() if a.is_over]:
            answer.close()
            del self._answers[answer.number]

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
            answer.give_up()
        self._answers.clear()
        for slot in self._slots:
            slot.policy.share(1)  # the engine's own policy goes on alone
        self._on_close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this scheduler is closed: make a new one")
