"""Runs the two loops on fakes and collects what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspine.engine.choose import GreedyChooser
from dspine.engine.emit import Emitter
from dspine.engine.events import Event, Finish, Prefill, Step
from dspine.engine.loop import Run, generate
from dspine.engine.plain import PlainStepper
from dspine.engine.proposal import Proposer
from dspine.engine.rollback import TrimRollback
from dspine.engine.sequence import TokenSequence
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.trace import Trace
from dspine.engine.width import WidthPolicy
from tests.support.fake_target import FakeTarget

END = 0
PIECES = [b"", b"a", b"b", b"ab", b" ", b"x", b"\xe2\x82", b"\xac", b"aba", b"c", b"\n", b"yz"]
"""Small vocabulary: an end token, overlapping texts, a euro sign split over two tokens."""


@dataclass(frozen=True)
class Outcome:
    events: list[Event]
    tokens: list[int]
    text: str
    finish: Finish

    @property
    def steps(self) -> list[Step]:
        return [event for event in self.events if isinstance(event, Step)]


def make_run(
    target: FakeTarget,
    prompt: Sequence[int],
    *,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    pieces: Sequence[bytes] = PIECES,
    end: int | None = END,
) -> Run:
    emitter = Emitter(
        lambda token: pieces[token], lambda token: token == end, max_tokens=max_tokens, stop=stop
    )
    return Run(target, TokenSequence(prompt), emitter, GreedyChooser(target), trace=Trace())


def run_plain(run: Run) -> Outcome:
    return collect(list(generate(run, PlainStepper(run))))


def run_speculative(
    run: Run, policy: WidthPolicy, make_proposer: Callable[[FakeTarget], Proposer]
) -> Outcome:
    assert isinstance(run.target, FakeTarget)
    proposer = make_proposer(run.target)
    stepper = SpeculativeStepper(run, proposer, policy, TrimRollback(run.target))
    return collect(list(generate(run, stepper)))


def collect(events: list[Event]) -> Outcome:
    assert isinstance(events[0], Prefill)
    finish = events[-1]
    assert isinstance(finish, Finish)
    steps = [event for event in events if isinstance(event, Step)]
    assert len(steps) == len(events) - 2
    tokens = [token for step in steps for token in step.tokens]
    return Outcome(events, tokens, "".join(step.text for step in steps), finish)
