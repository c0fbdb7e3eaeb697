"""What asking the drafter promises before its scores are known, judged by its last chains.

The text at hand may be one on which the drafter is good or one on which it is not, and only
drafts tell. So a draft is worth what it is expected to gain now, and, where it may turn out that
drafting pays, some of what that would gain later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dspine.engine.acceptance import Reliability

REMEMBERED = 16
"""Chains from which the next one is guessed, for each situation."""

LEAST_REACH = 0.03
"""Slots that are right less often than that are not looked at."""

LEAST_WEIGHT = 0.02
"""Possible texts less likely than that are left out."""

FORESIGHT = 8.0
"""Steps whose gain counts for a draft that shows whether there is one."""

HOLDS = 8
"""Steps for which a judgement against asking holds: without drafts, little is learned."""

SAME = 0.1
"""Tokens by which the alternative may change meanwhile."""


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
    text turns out to suit the drafter, `usually` the same for a text that is not known yet.
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
        self, network: Reliability, typical: Sequence[Sequence[int]], situations: int
    ) -> None:
        """`typical` chains stand for those not seen yet, slot numbers as in `Reliability`."""
        self._network = network
        self._typical = [list(chain) for chain in typical]
        self._seen: list[deque[list[int]]] = [deque(maxlen=REMEMBERED) for _ in range(situations)]
        self._held: list[tuple[int, float, int, Judgement] | None] = [None] * situations
        self._clock = 0

    def add(self, situation: int, slots: list[int]) -> None:
        """A chain was drafted."""
        self._seen[situation].append(slots)

    def forget(self) -> None:
        """Judge anew at the next step: something changed."""
        self._held = [None] * len(self._held)

    def judge(self, situation: int, best: float, most: int, prices: Prices) -> Judgement:
        """Blocks of at most `most` drafts against an alternative that is worth `best` tokens."""
        self._clock += 1
        held = self._held[situation]
        if held is not None:
            until, then, drafts, found = held
            if self._clock < until and drafts == most and abs(best - then) < SAME:
                return found
        found = self._judged(self._samples(situation), best, most, prices)
        against = found.value <= 0.0
        self._held[situation] = (self._clock + HOLDS, best, most, found) if against else None
        return found

    def _judged(
        self, samples: Sequence[Sequence[int]], best: float, most: int, prices: Prices
    ) -> Judgement:
        if most < 1:
            return Judgement(0, -1e9, 0.0, 0.0)
        odds = [[self._network.odds(slot) for slot in sample] for sample in samples]
        texts = self._network.texts(LEAST_WEIGHT)
        mixed = [[0.0] * (most + 1) for _ in samples]
        for weight, _, factor in texts:
            if weight:
                for chain, whole in zip(_worths(odds, factor, most, prices), mixed, strict=True):
                    for count, worth in enumerate(chain):
                        whole[count] += weight * worth
        gains = _gains(mixed, best, prices)
        now = max(gains)
        width = gains.index(now) + 2
        if now > 0.0:
            return Judgement(width, now, 0.0, 0.0)
        hope = usually = 0.0
        for weight, before, factor in texts:
            suits = max(0.0, *_gains(_worths(odds, factor, most, prices), best, prices))
            hope += weight * suits
            usually += before * suits
        return Judgement(width, now, hope, usually)

    def _samples(self, situation: int) -> Sequence[list[int]]:
        """Chains of this situation, else of the next ones to it, else typical ones."""
        seen, last = self._seen, len(self._seen)
        for distance in range(last):
            for near in (situation - distance, situation + distance):
                if 0 <= near < last and seen[near]:
                    return seen[near]
        return self._typical


def _worths(
    odds: Sequence[Sequence[float]], factor: float, most: int, prices: Prices
) -> list[list[float]]:
    """For each chain the tokens of a step with 0, 1, ... `most` drafts in a certain text.

    What rejections cost later is taken off. Beyond what was drafted, slots are usual ones.
    """
    chains = [[factor / (factor + one) for one in chain] for chain in odds]
    usual = sum(map(sum, chains)) / sum(map(len, chains))
    owed, found = prices.owed, []
    for chances in chains:
        known, reached, worth = len(chances), 1.0, 1.0
        worths = [worth]
        for count in range(1, most + 1):
            p = chances[count - 1] if count <= known else usual
            worth += reached * (p - (1.0 - p) * owed[count])
            reached *= p
            worths.append(worth)
            if reached < LEAST_REACH:
                worths += [worth] * (most - count)
                break
        found.append(worths)
    return found


def _gains(chains: Sequence[Sequence[float]], best: float, prices: Prices) -> list[float]:
    """Tokens beyond `best` that asking for 1, 2, ... drafts is worth on average.

    Of the drafts of a chain, as many are verified as pay most. Later chains count for more.
    """
    rows, drafts = prices.rows, prices.drafts
    sums = [0.0] * (len(chains[0]) - 1)
    for age, worths in enumerate(chains, 1):
        gain = 0.0
        for count in range(1, len(worths)):
            gain = max(gain, worths[count] - rows[count] - best)
            sums[count - 1] += age * gain
    shares = 0.5 * len(chains) * (len(chains) + 1)
    return [total / shares - drafts[count] for count, total in enumerate(sums, 2)]
