"""A device with given costs and a drafter whose true acceptance the policy cannot see."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dspine.engine.adaptive import AdaptiveWidth
from dspine.engine.costs import CostTable, StepCosts, interpolate
from dspine.engine.proposal import MOST as ALL
from dspine.engine.proposal import NOTHING, Ask, Proposal
from dspine.engine.width import Outcome, WidthPolicy

MOST = 16
BLOCK = 8

Acceptance = Callable[[int], float]
"""True chance of every slot of a block anchored at a position."""


@dataclass(frozen=True)
class SimulatedStep:
    position: int
    asked: int
    proposer: str
    drafts: int
    confirmed: int
    ms: float


@dataclass(frozen=True)
class Device:
    """Milliseconds of n rows and of a draft of width w, and what a decode of other rows than the
    one before takes longer; what is measured of it is exact.
    """

    rows_ms: Mapping[int, float]
    draft_ms: Mapping[int, float]
    change_ms: float = 0.0

    def table(self) -> CostTable:
        return CostTable(self.rows_ms, self.draft_ms, change_ms=self.change_ms)

    def policy(
        self, curve: Sequence[float] = (0.6,) * (BLOCK - 1), *, follows: bool = False
    ) -> AdaptiveWidth:
        costs = StepCosts(self.table(), MOST)
        return AdaptiveWidth(
            costs, most_drafts=MOST - 1, block_size=BLOCK, curve=curve, follows=follows
        )

    @property
    def plain_ms(self) -> float:
        return self.rows_ms[1]

    def time(self, drafts: int, asked: int) -> float:
        draft = interpolate(self.draft_ms, asked + 1) if asked else 0.0
        return interpolate(self.rows_ms, drafts + 1) + draft


def simulate(
    device: Device,
    policy: WidthPolicy,
    network: Acceptance,
    *,
    tokens: int,
    lookup: Acceptance | None = None,
    lookup_drafts: int = MOST - 1,
    led: Acceptance = lambda position: 0.0,
    seed: int = 1,
    informed: bool = False,
    slow: Callable[[int], float] = lambda position: 1.0,
) -> list[SimulatedStep]:
    """Decode `tokens` tokens. The text is 0, 1, 2, ...; a wrong draft is -1.

    Scores tell nothing (0.5) unless `informed`. `slow` multiplies the times that are reported.
    A lookup ends after `lookup_drafts`; drafts after a lead that is right are so as `led` says.
    """
    chance = random.Random(seed)

    def chain(source: str, count: int, rate: float, start: int, *, right: bool = True) -> Proposal:
        drafts = []
        for slot in range(count):
            right = right and chance.random() < rate
            drafts.append(start + slot if right else -1)
        score = rate if informed else 0.5
        return Proposal(tuple(drafts), (score,) * count, source)

    steps: list[SimulatedStep] = []
    done, last = 0, -1
    while done < tokens:
        free = [] if lookup is None else [chain("ngram", lookup_drafts, lookup(done), done)]
        asked = policy.ask(free, Ask(0, done, MOST - 1), 0)
        drafted = chain("dspine", asked, network(done), done) if asked else NOTHING
        lead = policy.lead() if asked else NOTHING
        count = len(lead.tokens)
        if 0 < count < asked:
            right = lead.tokens == tuple(range(done, done + count))
            rest = chain("dspine", asked - count, led(done), done + count, right=right)
            longer = lead._replace(own=ALL)
            lead = longer.continued(rest.tokens, rest.scores, "dspine")
        chosen = policy.choose(drafted, lead if len(lead.tokens) > count else NOTHING)
        accepted = 0
        while accepted < len(chosen.tokens) and chosen.tokens[accepted] == done + accepted:
            accepted += 1
        confirmed = tuple(range(done, done + accepted + 1))
        change = device.change_ms if len(chosen.tokens) != last else 0.0
        last = len(chosen.tokens)
        ms = device.time(last, asked) + change
        factor = slow(done)
        policy.observe(
            Outcome(
                len(chosen.tokens),
                confirmed,
                draft_ms=factor * interpolate(device.draft_ms, asked + 1) if asked else 0.0,
                verify_ms=factor * (interpolate(device.rows_ms, last + 1) + change),
            )
        )
        steps.append(
            SimulatedStep(done, asked, chosen.proposer, len(chosen.tokens), len(confirmed), ms)
        )
        done += len(confirmed)
    return steps


def speedup(device: Device, steps: Sequence[SimulatedStep]) -> float:
    """Against plain decoding of the same tokens."""
    tokens = sum(step.confirmed for step in steps)
    return tokens * device.plain_ms / sum(step.ms for step in steps)


def best_fixed(device: Device, rate: float) -> tuple[int, float]:
    """(drafts, speed-up) of the best fixed width where every slot is right with that chance."""
    best = (0, 1.0)
    for drafts in range(1, BLOCK):
        tokens = sum(rate**slot for slot in range(drafts + 1))
        gain = tokens * device.plain_ms / device.time(drafts, drafts)
        if gain > best[1]:
            best = (drafts, gain)
    return best


def expected_speedup(device: Device, step: SimulatedStep, rate: float) -> float:
    """What a step gives on average against plain ones, every slot right with that chance."""
    tokens = sum(rate**slot for slot in range(step.drafts + 1))
    return tokens * device.plain_ms / step.ms


def worst_window(device: Device, steps: Sequence[SimulatedStep], tokens: int = 200) -> float:
    """Largest time of `tokens` consecutive tokens (in whole steps), as a share of plain time."""
    worst = 0.0
    for first in range(len(steps)):
        ms, count = 0.0, 0
        for step in steps[first:]:
            ms, count = ms + step.ms, count + step.confirmed
            if count >= tokens:
                worst = max(worst, ms / (count * device.plain_ms))
                break
    return worst
