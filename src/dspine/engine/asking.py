"""What asking the drafter promises before its scores are known, judged by its last chains.

The text at hand may be one on which the drafter is good or one on which it is not, and only
drafts tell. So a draft is worth what it is expected to gain now, and, where it may turn out that
drafting pays, some of what that would gain later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dspine.engine.acceptance import Reliability

Array = npt.NDArray[np.float64]

REMEMBERED = 16
"""Chains from which the next one is guessed, for each situation."""

LEAST_WEIGHT = 0.02
"""Possible texts less likely than that are left out."""

FORESIGHT = 8.0
"""Steps whose gain counts for a draft that shows whether there is one."""

HOLDS = 12
"""Steps for which asking is taken not to pay: without drafts, little is learned."""

PACE = 1.0 / 48.0
"""Share of a step in how often a situation occurs."""

SAME = 0.1
"""Tokens by which the alternative may become worse meanwhile."""


@dataclass(frozen=True, slots=True)
class Prices:
    """What a step costs in tokens, at the rate of tokens reached lately.

    `rows[k]` verifies k drafts, `drafts[w]` makes a block of width w where the step before made
    one too, `owed[k]` is what a rejection after k - 1 right drafts costs later.
    """

    rows: Sequence[float]
    drafts: Sequence[float]
    owed: Sequence[float]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The best width to ask for (0: none) and the tokens it gains beyond the alternative.

    `now` is expected of this step. Where that is a loss, `hope` is the part of it in which the
    text turns out to suit the drafter, `usually` the same for a text that is not known yet; both
    for the share of steps that are in this situation.
    """

    width: int
    now: float
    hope: float
    usually: float

    @property
    def value(self) -> float:
        """What asking is worth, what it tells included."""
        return self.now + FORESIGHT * self.hope


class Prospects:
    """Remembers chains by situation: what else is proposed for the same slots."""

    def __init__(
        self,
        network: Reliability,
        typical: Sequence[Sequence[int]],
        *,
        situations: int,
        most_drafts: int,
    ) -> None:
        """`typical` chains stand for those not seen yet, slot numbers as in `Reliability`."""
        self._network = network
        self._typical = _Chains(most_drafts)
        for chain in typical:
            self._typical.add(chain)
        self._seen = [_Chains(most_drafts) for _ in range(situations)]
        self._held: list[tuple[int, float, int, Judgement] | None] = [None] * situations
        self._clock = 0
        self._shares = [1.0] + [0.0] * (situations - 1)
        """How many of the last steps were in each situation."""

    def add(self, situation: int, slots: Sequence[int]) -> None:
        """A chain was drafted."""
        self._seen[situation].add(slots)

    def forget(self) -> None:
        """Judge anew at the next step: something changed."""
        self._held = [None] * len(self._held)

    def judge(
        self, situation: int, best: float, most: int, prices: Callable[[], Prices]
    ) -> Judgement:
        """Blocks of at most `most` drafts against an alternative that is worth `best` tokens."""
        self._clock += 1
        self._shares = [share - PACE * share for share in self._shares]
        self._shares[situation] += PACE
        held = self._held[situation]
        if held is not None:
            until, then, drafts, found = held
            # Against a better alternative it does not pay either.
            if self._clock < until and drafts == most and best > then - SAME:
                return found
        if most < 1:
            return Judgement(0, -1e9, 0.0, 0.0)
        found = self._judged(situation, best, most, prices())
        against = found.value <= 0.0
        self._held[situation] = (self._clock + HOLDS, best, most, found) if against else None
        return found

    def _judged(self, situation: int, best: float, most: int, prices: Prices) -> Judgement:
        chains = self._chains(situation)
        likely, usual, factors = self._network.texts(LEAST_WEIGHT)
        tokens = chains.tokens(factors, self._network.odds(), most, prices.owed)
        costs = np.array(prices.rows[1 : most + 1]) + best
        drafts = np.array(prices.drafts[2 : most + 2])
        mixed = (likely @ tokens.reshape(len(likely), -1)).reshape(-1, most)
        now = _gains(chains.shares, mixed, costs) - drafts
        width = int(now.argmax())
        if now[width] > 0.0:
            return Judgement(width + 2, float(now[width]), 0.0, 0.0)
        suits = (_gains(chains.shares, tokens, costs) - drafts).max(axis=-1).clip(0.0)
        suits *= self._shares[situation]
        return Judgement(width + 2, float(now[width]), float(likely @ suits), float(usual @ suits))

    def _chains(self, situation: int) -> _Chains:
        """Those of this situation, else of the next ones to it, else typical ones."""
        seen, last = self._seen, len(self._seen)
        for distance in range(last):
            for near in (situation - distance, situation + distance):
                if 0 <= near < last and seen[near].count:
                    return seen[near]
        return self._typical


class _Chains:
    """The last chains of a situation, the newest at the end."""

    def __init__(self, most_drafts: int) -> None:
        self.count = 0
        self.shares: Array = np.zeros(0)
        """What each counts: later ones more."""
        self._slots = np.zeros((REMEMBERED, most_drafts), np.intp)
        self._lengths = np.zeros((REMEMBERED, 1), np.intp)
        self._steps = np.arange(most_drafts)

    def add(self, slots: Sequence[int]) -> None:
        """Remember one more chain, of at least one draft."""
        self._slots[:-1] = self._slots[1:]
        self._lengths[:-1] = self._lengths[1:]
        self._slots[-1, : len(slots)] = slots
        self._lengths[-1] = len(slots)
        if self.count < REMEMBERED:
            self.count += 1
            ages = np.arange(1.0, self.count + 1.0)
            self.shares = ages / ages.sum()

    def tokens(self, factors: Array, odds: Array, most: int, owed: Sequence[float]) -> Array:
        """(text, chain, most): tokens of a step with 1, 2, ... drafts of a chain in a text.

        What rejections cost later is taken off. Beyond what was drafted, slots are usual ones.
        """
        drafted = self._steps[:most] < self._lengths[-self.count :]
        against = odds[self._slots[-self.count :, :most]]
        chances = factors[:, None, None] / (factors[:, None, None] + against)
        usual = (chances * drafted).sum(axis=(1, 2)) / drafted.sum()
        chances = np.where(drafted, chances, usual[:, None, None])
        reached: Array = chances.cumprod(axis=2)
        if any(owed):
            missed = reached / chances * (1.0 - chances)
            reached = reached - missed * np.array(owed[1 : most + 1])
        found: Array = 1.0 + reached.cumsum(axis=2)
        return found


def _gains(shares: Array, tokens: Array, costs: Array) -> Array:
    """(..., most): tokens that asking for 1, 2, ... drafts brings on average.

    Of the drafts of a chain, as many are verified as pay most.
    """
    worths = np.maximum.accumulate(np.maximum(tokens - costs, 0.0), axis=-1)
    found: Array = shares @ worths
    return found
