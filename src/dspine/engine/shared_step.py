"""One step of several answers: drafts for all, one decode for all, each absorbs its own rows.

A piece of the prompt of one more may be part of that decode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

from dspine.drafters.base import Draft, DraftAsk, Drafter
from dspine.engine.answering import Answering, Piece, PromptPiece
from dspine.engine.loop import Planned
from dspine.engine.proposal import NOTHING, Ask, Proposal
from dspine.engine.slots import Slot
from dspine.engine.target import Rows, Together
from dspine.errors import LibraryError

log = logging.getLogger("dspine")


@dataclass(slots=True)
class _Turn:
    """What one answer is up to in this step."""

    answer: Answering
    ask: Ask | None = None
    wish: DraftAsk | None = None
    draft: Draft | Exception | None = None
    proposal: Proposal = NOTHING
    planned: Planned | None = None


class SharedStep:
    """Makes steps of several answers on the sequences of one context.

    The library takes rows of several sequences through the weights in one pass only if each has
    as many of them and their numbers follow each other. So all answers verify the same number of
    rows, and sequences in between add rows that are cut off again. A prompt's first rows go
    through with theirs, the others in a second pass. Recurrent states cannot be cut: there, answers
    with equal rows are decoded together, without any filler, and prompts apart.
    """

    def __init__(
        self,
        together: Together,
        drafter: Drafter | None,
        *,
        can_trim: bool,
        rows_ms: Callable[[int], float] | None = None,
    ) -> None:
        """`can_trim`: any last positions can be cut off the memory. `rows_ms(n)` is the time of a
        decode of n rows, None where nobody knows.
        """
        self._together = together
        self._drafter = drafter
        self._can_trim = can_trim
        self._rows_ms = rows_ms
        self.mixes = can_trim and together.mixes
        """Whether a piece of a prompt may be in the decode."""

    def run(
        self,
        answers: Sequence[Answering],
        others: Sequence[Slot],
        reading: PromptPiece | None = None,
    ) -> None:
        """A step of all `answers`, slot numbers going up; `others` are slots that do not answer.
        `reading` belongs to one of these and is decoded as well.

        What goes wrong in one answer ends that one alone. When a decode of several fails, each
        of them makes its step by itself.
        """
        started = perf_counter()
        turns = self._proposed([_Turn(answer) for answer in answers])
        drafted_ms = (perf_counter() - started) * 1000.0
        self._choose(turns)

        def prepare(turn: _Turn) -> None:
            stepper = turn.answer.stepper
            turn.planned = stepper.prepare(
                stepper.allowed(turn.proposal), asked=turn.ask is not None, draft_ms=drafted_ms
            )

        turns = _each(turns, prepare)
        drafting = sum(turn.wish is not None for turn in turns) or 1
        if reading is not None and not self._fits(reading[1], turns, others):
            _read(reading)
            reading = None
        for group in self._groups(turns):
            self._verify(group, others, drafting, reading)

    # -- drafts ----------------------------------------------------------------------------------

    def _proposed(self, turns: list[_Turn]) -> list[_Turn]:
        """Those that go on, with what their proposers chose."""
        sharing = len(turns)

        def begin(turn: _Turn) -> None:
            answer = turn.answer
            answer.steps.begin()
            answer.slot.policy.share(sharing)
            turn.ask = answer.stepper.ask()
            if turn.ask is not None:
                turn.wish = answer.slot.proposer.wish(turn.ask)

        def choose(turn: _Turn) -> None:
            if turn.ask is not None:
                turn.proposal = turn.answer.slot.proposer.choose(turn.draft)

        turns = _each(turns, begin)
        self._draft([turn for turn in turns if turn.wish is not None])
        return _each(turns, choose)

    def _draft(self, turns: Sequence[_Turn]) -> None:
        if not turns or self._drafter is None:
            return
        wishes = [turn.wish for turn in turns if turn.wish is not None]
        try:
            drafts = self._drafter.draft_many(wishes)
        except Exception as error:  # noqa: BLE001 - each alone says whose fault it is
            log.warning("drafts for %d answers failed, each gets its own: %s", len(turns), error)
            for turn, wish in zip(turns, wishes, strict=True):
                try:
                    turn.draft = self._drafter.draft(*wish)
                except Exception as own:  # noqa: BLE001 - survivable, the proposer is told
                    turn.draft = own
            return
        for turn, draft in zip(turns, drafts, strict=True):
            turn.draft = draft

    def _choose(self, turns: Sequence[_Turn]) -> None:
        """One number of drafts for all, where rows without meaning can be cut off again."""
        if self._can_trim and len(turns) > 1:
            drafts = common_drafts(turns)
            for turn in turns:
                if turn.ask is not None and drafts is not None:
                    turn.proposal = turn.answer.slot.policy.widened(min(drafts, turn.ask.limit))

    # -- decodes ---------------------------------------------------------------------------------

    def _fits(self, piece: Piece, turns: Sequence[_Turn], others: Sequence[Slot]) -> bool:
        """Whether a piece can be in the decode of `turns`: none of them needs a further pass
        because of it, and there is room for all.
        """
        widths = [len(turn.planned.feed) for turn in turns if turn.planned is not None]
        if not widths or max(widths) > len(piece.tokens):
            return False
        rows = max(widths) * (len(turns) + len(others)) + len(piece.tokens)
        return rows <= self._together.n_batch

    def _groups(self, turns: Sequence[_Turn]) -> list[list[_Turn]]:
        """Turns that are decoded together."""
        groups: dict[int, list[_Turn]] = {}
        for turn in turns:
            assert turn.planned is not None
            groups.setdefault(0 if self._can_trim else len(turn.planned.feed), []).append(turn)
        return list(groups.values())

    def _verify(
        self,
        turns: Sequence[_Turn],
        others: Sequence[Slot],
        drafting: int,
        reading: PromptPiece | None,
    ) -> None:
        """One decode for these and for `reading`, to which `others` may add rows."""
        plans = [turn.planned for turn in turns if turn.planned is not None]
        width = max(len(planned.feed) for planned in plans)
        # A row that would be beyond the context cannot be filled: such a slot has fewer.
        fillers = [
            min(width - len(p.feed), turn.answer.slot.target.n_ctx - p.position - len(p.feed))
            for p, turn in zip(plans, turns, strict=True)
        ]
        rows = [
            Rows(turn.answer.slot.id, p.feed, p.position, p.logits, filler)
            for turn, p, filler in zip(turns, plans, fillers, strict=True)
        ]
        reader = None if reading is None else reading[0].slot
        between = self._between([row.sequence for row in rows], others, width, reader)
        dummies = [Rows(slot.id, (0,) * width, slot.target.length(), "none") for slot in between]
        if reading is not None:
            answer, piece = reading
            rows.append(Rows(answer.slot.id, piece.tokens, piece.position, "none"))
        began = perf_counter()
        try:
            self._together.decode(sorted([*rows, *dummies], key=lambda part: part.sequence))
            self._together.wait()
        except Exception as error:  # noqa: BLE001 - each alone says whose fault it is
            log.warning(
                "a decode of %d answers failed, each makes its step alone: %s", len(turns), error
            )
            if reading is not None:
                _read(reading)
            self._alone(turns)
            return
        finally:
            self._restore(between, [part.position for part in dummies])
        verify_ms = (perf_counter() - began) * 1000.0
        if reading is not None:
            try:
                reading[0].saw(reading[1], verify_ms)
            except Exception as error:  # noqa: BLE001 - whoever asked is told, the others go on
                reading[0].fail(error)
        for turn, planned, filler in zip(turns, plans, fillers, strict=True):
            stepper = turn.answer.stepper
            try:
                result = stepper.absorb(
                    planned,
                    verify_ms,
                    filler=filler,
                    sharing=len(turns),
                    drafting=drafting,
                    mixed=reading is not None,
                )
                turn.answer.steps.end(result)
            except Exception as error:  # noqa: BLE001 - whoever asked is told, the others go on
                turn.answer.fail(error)

    def _alone(self, turns: Iterable[_Turn]) -> None:
        def alone(turn: _Turn) -> None:
            turn.answer.steps.undo()
            turn.answer.slot.policy.share(1)
            turn.answer.step()

        _each(turns, alone)

    def _between(
        self,
        numbers: Sequence[int],
        others: Sequence[Slot],
        width: int,
        reader: Slot | None,
    ) -> list[Slot]:
        """Slots that add rows, so that sequences left and right of them share a pass; `reader` is
        there with rows of its own.
        """
        if not self._can_trim or numbers[-1] - numbers[0] + 1 == len(numbers):
            return []
        free = {slot.id: slot for slot in others}
        chosen: list[Slot] = []
        run = 1
        for before, after in pairwise(numbers):
            gap = [
                free.get(n) for n in range(before + 1, after) if reader is None or n != reader.id
            ]
            fitting = [s for s in gap if s and s.target.length() + width <= s.target.n_ctx]
            if len(fitting) == len(gap) and self._pays(run, len(gap), width):
                chosen += fitting
                run += after - before
            else:
                run = 1
        return chosen

    def _pays(self, run: int, gap: int, width: int) -> bool:
        """Whether `gap` more sequences cost less than another pass over the weights."""
        if not gap:
            return True
        if self._rows_ms is None:
            return gap <= run
        joined = self._rows_ms((run + gap + 1) * width)
        return joined < self._rows_ms(run * width) + self._rows_ms(width)

    def _restore(self, between: Sequence[Slot], lengths: Sequence[int]) -> None:
        for slot, length in zip(between, lengths, strict=True):
            if slot.target.length() > length and not slot.target.trim(length):
                slot.target.clear()
                slot.held.forget()


def common_drafts(turns: Sequence[_Turn]) -> int | None:
    """The number of drafts that gives most tokens for the time of all; None: each its own.

    Every answer pays for the rows of all, those that cannot draft included.
    """
    asked = [turn for turn in turns if turn.ask is not None]
    outlooks = [turn.answer.slot.policy.outlook() for turn in asked]
    known = [outlook for outlook in outlooks if outlook is not None]
    if not known or len(known) < len(asked):
        return None
    burden = len(turns) / len(known)
    most = min(len(outlook.tokens) for outlook in known)
    values = [
        sum(outlook.tokens[k] - burden * outlook.prices[k] for outlook in known)
        for k in range(most)
    ]
    return max(range(most), key=values.__getitem__)


def _read(reading: PromptPiece) -> None:
    """Decode a piece by itself."""
    answer, piece = reading
    target = answer.slot.target
    try:
        if target.length() > piece.position and not target.trim(piece.position):
            raise LibraryError("the library cannot cut its memory back: answer one at a time")
        answer.read(piece)
    except Exception as error:  # noqa: BLE001 - whoever asked is told, the others go on
        answer.fail(error)


def _each(turns: Iterable[_Turn], action: Callable[[_Turn], None]) -> list[_Turn]:
    """The turns for which `action` went well."""
    left = []
    for turn in turns:
        try:
            action(turn)
        except Exception as error:  # noqa: BLE001 - whoever asked is told, the others go on
            turn.answer.fail(error)
        else:
            left.append(turn)
    return left
