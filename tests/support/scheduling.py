"""Several answers at once on fakes: a scheduler, and who sorts what it says by answer."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dspine.engine.adaptive import AdaptiveWidth
from dspine.engine.costs import CostTable, StepCosts
from dspine.engine.engine import EngineParts
from dspine.engine.events import Event, Finish, Step
from dspine.engine.scheduler import Scheduler
from dspine.engine.target import LogitRows
from dspine.engine.width import WidthPolicy
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_engine import VOCAB
from tests.support.fake_target import FakeTarget, FakeTargets, mixing, plain_answer

NEXT = mixing(8, 5)
"""Few different tokens, so that texts repeat themselves and n-gram drafts are right at times."""


def targets(count: int, **options: Any) -> list[FakeTarget]:
    return [FakeTarget(NEXT, VOCAB, n_batch=16, **options) for _ in range(count)]


def drafter(right: float = 0.7) -> FakeDrafter:
    """Its drafts are right with that chance, by the position's own coin."""

    def chain(tokens: Sequence[int], count: int) -> Sequence[int]:
        drafts = plain_answer(NEXT, tokens, count)
        for slot in range(count):
            if random.Random(31 * len(tokens) + slot).random() > right:
                drafts[slot] ^= 1
        return drafts

    return FakeDrafter(chain)


def adaptive() -> WidthPolicy:
    """Eight rows cost little more than one."""
    rows = {1: 10.0, 8: 12.0, 32: 24.0}
    table = CostTable(rows, {2: 0.5, 8: 0.6}, depth=1)
    return AdaptiveWidth(
        StepCosts(table, 24),
        most_drafts=7,
        block_size=8,
        curve=(0.6,),
        shared=lambda count: StepCosts(table, 24, sequences=count),
    )


@dataclass
class Heard:
    events: list[Event] = field(default_factory=list)
    error: Exception | None = None

    @property
    def tokens(self) -> list[int]:
        return [t for event in self.events if isinstance(event, Step) for t in event.tokens]

    @property
    def reason(self) -> str | None:
        last = self.events[-1] if self.events else None
        return last.reason if isinstance(last, Finish) else None

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.reason is not None


class Listener:
    """Steps a scheduler and sorts what it says by answer."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.heard: dict[int, Heard] = defaultdict(Heard)

    def step(self) -> list[tuple[int, Event | Exception]]:
        happened = self.scheduler.step()
        for number, event in happened:
            assert not self.heard[number].is_over, "something came after the end"
            if isinstance(event, Exception):
                self.heard[number].error = event
            else:
                self.heard[number].events.append(event)
        return happened

    def finish(self) -> dict[int, Heard]:
        for _ in range(1000):
            if self.scheduler.free_slots() == self.scheduler.n_slots:
                return self.heard
            self.step()
        raise AssertionError("the answers never end")


def start(parts: EngineParts, prompts: Sequence[Sequence[int]], **options: Any) -> Listener:
    scheduler = Scheduler(parts, parts.n_slots)
    for prompt in prompts:
        scheduler.start(list(prompt), **options)
    return Listener(scheduler)


def together(parts: EngineParts) -> FakeTargets:
    assert isinstance(parts.together, FakeTargets)
    return parts.together


def targets_of(parts: EngineParts) -> Sequence[FakeTarget]:
    return together(parts).targets


def interrupt_after_decode(target: FakeTarget) -> None:
    """Ctrl-C comes once: when the next rows of this target are decoded, before anything is made
    of them.
    """
    decode = target.decode

    def interrupted(tokens: Sequence[int], position: int, logits: LogitRows) -> None:
        decode(tokens, position, logits)
        target.decode = decode  # type: ignore[method-assign]
        raise KeyboardInterrupt

    target.decode = interrupted  # type: ignore[method-assign]
