"""What asking the drafter promises before its scores are known, judged by its last chains.

The text at hand may be one on which the drafter is good or one on which it is not, and only
drafts tell. So a draft is worth what it is expected to gain now, and, where it may turn out that
drafting pays, some of what that would gain later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from math import exp, log
from operator import itemgetter, mul
from typing import NamedTuple

from dspine.engine.acceptance import Reliability, ScorePrior, score_bin

REMEMBERED = 8
"""Chains from which the next one is guessed, for each situation."""

LEAST_WEIGHT = 0.02
"""Possible texts less likely than that are left out."""

FORESIGHT = 2.0
"""Steps whose gain counts for a draft that shows whether there is one."""

HOLDS = 32
"""Steps for which asking is taken not to pay: without drafts, little is learned."""

ASKS = 2
"""Steps for which it is taken to pay."""

LEAST_REACH = 0.03
"""Slots that are right less often than that add nothing."""

WIDER = 2
"""Drafts beyond the best number of the judgement before that are looked at."""

PACE = 1.0 / 48.0
"""Share of a step in how often a situation occurs."""

SAME = 0.1
"""Tokens by which the alternative may become worse meanwhile."""

SPREAD = (-1.5, 0.0, 1.5)
"""Logits by which typical chains differ from the mean one: most are good or bad."""


class Prices(NamedTuple):
    """What a step costs in tokens, at the rate of tokens reached lately.

    `rows[k]` verifies k drafts, `drafts[w]` makes a block of width w where the step before made
    one too, `owed[k]` is what a rejection after k - 1 right drafts costs later.
    """

    rows: Sequence[float]
    drafts: Sequence[float]
    owed: Sequence[float]


class Judgement(NamedTuple):
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
        self._typical = _Chains(network, most_drafts)
        for chain in typical:
            self._typical.add(chain)
        self._seen = [_Chains(network, most_drafts) for _ in range(situations)]
        self._held: list[tuple[int, float, int, Judgement] | None] = [None] * situations
        self._reach = [most_drafts] * situations
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
            worse = then - best
            if self._clock < until and drafts == most:
                # Against a better alternative a refusal holds all the more.
                if found.value <= 0.0:
                    if worse < SAME or found.value + 2.0 * worse <= 0.0:
                        return found
                elif abs(worse) < SAME:
                    return found
        if most < 1:
            return Judgement(0, -1e9, 0.0, 0.0)
        found = self._judged(situation, best, most, prices())
        holds = HOLDS if found.value <= 0.0 else ASKS
        self._held[situation] = (self._clock + holds, best, most, found)
        return found

    def _judged(self, situation: int, best: float, most: int, prices: Prices) -> Judgement:
        chains = self._chains(situation)
        likely, usual = self._network.texts(LEAST_WEIGHT)
        most = min(most, self._reach[situation])
        now, width = chains.gain(lambda row: sum(map(mul, likely, row)), best, most, prices)
        self._reach[situation] = width - 1 + WIDER
        if now > 0.0:
            return Judgement(width, now, 0.0, 0.0)
        hope = usually = 0.0
        # The more a text suits the drafter, the more it gains.
        for text in range(len(likely) - 1, -1, -1):
            gain, _ = chains.gain(itemgetter(text), best, most, prices)
            if gain <= 0.0:
                break
            hope += likely[text] * gain
            usually += usual[text] * gain
        share = self._shares[situation]
        return Judgement(width, now, hope * share, usually * share)

    def _chains(self, situation: int) -> _Chains:
        """Those of this situation, else of the next ones to it, else typical ones."""
        seen, last = self._seen, len(self._seen)
        for distance in range(last):
            for near in (situation - distance, situation + distance):
                if 0 <= near < last and seen[near].rows:
                    return seen[near]
        return self._typical


class _Chains:
    """The last chains of a situation, the newest at the end.

    Lists and loops: NumPy takes longer for so few numbers, above all right after a decode.
    """

    def __init__(self, network: Reliability, most_drafts: int) -> None:
        self._network, self._most = network, most_drafts
        self.rows: deque[list[list[float]]] = deque(maxlen=REMEMBERED)
        """For each chain and slot, how often the slot is reached and right, text by text."""
        self._count = 0
        self._usual: list[float] = []

    def add(self, slots: Sequence[int]) -> None:
        """Remember one more chain, of at least one draft. Beyond those, slots are usual ones."""
        chances = [self._network.by_text(slot) for slot in slots]
        self._count = min(REMEMBERED, self._count + 1)
        share = 1.0 / (self._count * len(slots))
        mean = [share * sum(column) for column in zip(*chances, strict=True)]
        if self._count > 1:
            stay = 1.0 - 1.0 / self._count
            mean = [stay * a + b for a, b in zip(self._usual, mean, strict=True)]
        self._usual = mean
        reached = chances[0]
        rows = [reached]
        for row in (*chances[1:], *repeat(mean, self._most - len(slots))):
            reached = list(map(mul, reached, row))
            rows.append(reached)
        self.rows.append(rows)

    def gain(
        self,
        reach: Callable[[list[float]], float],
        best: float,
        most: int,
        prices: Prices,
    ) -> tuple[float, int]:
        """(tokens, width): what asking for the best number of drafts brings on average beyond an
        alternative worth `best`; `reach` is how often a slot is right, given a row.

        Of the drafts of a chain, as many are verified as pay most. Later chains count more.
        """
        costs, owed = prices.rows, prices.owed
        gains = [0.0] * most
        for age, rows in enumerate(self.rows, 1):
            tokens, before, worth, slot = 1.0 - best, 1.0, 0.0, 0
            for slot in range(most):
                reached = reach(rows[slot])
                tokens += reached - (before - reached) * owed[slot + 1]
                worth = max(worth, tokens - costs[slot + 1])
                gains[slot] += age * worth
                before = reached
                if reached < LEAST_REACH:
                    break
            if worth > 0.0:
                for later in range(slot + 1, most):
                    gains[later] += age * worth
        total = 0.5 * len(self.rows) * (len(self.rows) + 1)
        drafts = prices.drafts
        found = [gain / total - drafts[slot + 2] for slot, gain in enumerate(gains)]
        now = max(found)
        return now, found.index(now) + 2


def typical_chains(curve: Sequence[float], prior: ScorePrior) -> list[list[int]]:
    """Slot numbers of chains whose chances are those of a stored acceptance curve, good and bad
    ones, where scores mean what `prior` says.
    """

    def slot(chance: float, shift: float) -> int:
        chance = min(max(chance, 0.01), 0.99)
        logit = (log(chance / (1.0 - chance)) + shift - prior.offset) / prior.slope
        return score_bin(1.0 / (1.0 + exp(-logit)))

    return [[slot(chance, shift) for chance in curve] for shift in SPREAD]
