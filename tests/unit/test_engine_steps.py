"""Interrupts at every place of a step: it is told and counted whole, or there is no trace of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Self

import pytest

import dspine.engine.steps
from dspine.engine.engine import EngineParts
from dspine.engine.events import Event, Finish, Prefill, Step
from dspine.engine.loop import generate
from dspine.engine.plain import PlainStepper
from dspine.engine.stats import StatsRecorder
from tests.support.engine_runs import PIECES, make_run
from tests.support.fake_engine import make_parallel
from tests.support.fake_target import FakeTarget, mixing, plain_answer
from tests.support.scheduling import NEXT, Heard, Listener, drafter, start, targets

ENGINE = Path(dspine.engine.steps.__file__).parent
OUTER = ("scheduler.py", "answering.py", "steps.py", "shared_step.py", "stats.py", "loop.py")


class Signal:
    """KeyboardInterrupt where Python would deliver a signal: as a function of these files begins,
    or in them after the call of a C function; the `at`-th of such moments.
    """

    def __init__(self, at: int) -> None:
        self.at, self.moments = at, 0
        self._files = {str(ENGINE / name) for name in OUTER}

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in self._files:
            self.moments += 1
            if self.moments == self.at:
                raise KeyboardInterrupt

    def __enter__(self) -> Self:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


def check(heard: Heard, expected: list[int]) -> None:
    assert heard.tokens == expected
    finish = heard.events[-1]
    assert isinstance(finish, Finish) and finish.stats.tokens == len(expected)
    steps = [event for event in heard.events if isinstance(event, Step)]
    assert finish.stats.steps == len(steps)
    assert finish.stats.drafted == sum(step.drafted for step in steps)
    assert sum(isinstance(event, Prefill) for event in heard.events) == 1


def several() -> EngineParts:
    return make_parallel(targets(3, n_ctx=128), drafter(), proposer="auto")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("before", [0, 2, 5])
def test_an_interrupt_anywhere_in_a_step_of_the_scheduler_loses_nothing(
    count: int, before: int
) -> None:
    prompts = ([1, 2, 3], [4, 5, 6, 7, 1, 2], [2] * 9)[:count]
    at = moments = 0
    while at <= moments:
        at += 1
        listener = start(several(), prompts, max_tokens=7)
        for _ in range(before):
            listener.step()
        happened: list[tuple[int, Event | Exception]] = []
        with Signal(at) as signal, contextlib.suppress(KeyboardInterrupt):
            happened = listener.scheduler.step()
        moments = signal.moments
        sort(listener, happened)
        listener.finish()
        for number, prompt in enumerate(prompts, 1):
            check(listener.heard[number], plain_answer(NEXT, prompt, 7))
    assert moments > 10


def sort(listener: Listener, happened: list[tuple[int, Event | Exception]]) -> None:
    for number, event in happened:
        assert not isinstance(event, Exception)
        listener.heard[number].events.append(event)


def test_an_interrupt_anywhere_in_the_plain_loop_leaves_counts_that_match_what_was_told() -> None:
    next_token = mixing(len(PIECES), 4)
    at = moments = 0
    while at <= moments:
        at += 1
        run = make_run(FakeTarget(next_token, len(PIECES)), [1, 2], max_tokens=5, end=None)
        heard = Heard()
        events: Iterator[Event] = generate(run, PlainStepper(run))
        with Signal(at) as signal:
            try:
                for event in events:
                    heard.events.append(event)
                    if isinstance(event, Step) and event.tokens and signal.moments >= at:
                        break
            except KeyboardInterrupt:
                # Only before its first line, or while it was ending: no step may let it out.
                assert not heard.events or heard.tokens == plain_answer(next_token, [1, 2], 5)
                continue
            finally:
                moments = signal.moments
        heard.events += events
        finish = heard.events[-1]
        assert isinstance(finish, Finish)
        assert finish.stats.tokens == len(heard.tokens) == len(run.sequence.tokens) - 2
        assert heard.tokens == plain_answer(next_token, [1, 2], len(heard.tokens))
    assert moments > 20


def test_counts_of_steps_are_summed_up() -> None:
    recorder = StatsRecorder()
    recorder.steps = [
        Step((1,), "", 0, 0, "none", 0.0, 2.0, 0.5),
        Step((1, 2, 3), "", 3, 2, "dspine", 1.0, 4.0, 0.5),
        Step((1, 2), "", 1, 1, "dspine", 1.0, 3.0, 0.0),
    ]
    recorder.wall_ms = 12.0
    stats = recorder.snapshot()
    assert (stats.tokens, stats.steps, stats.drafted, stats.accepted) == (6, 3, 4, 3)
    assert (stats.draft_ms, stats.verify_ms, stats.host_ms, stats.wall_ms) == (2, 9, 1, 12)
    assert stats.drafted_at_slot == (2, 1, 1) and stats.accepted_at_slot == (2, 1, 0)
    assert stats.proposers["dspine"].emitted == 5 and stats.proposers["none"].steps == 1
