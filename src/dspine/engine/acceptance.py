"""How likely a draft is right: scores turned into chances, and corrected by what was confirmed.

Two things are learned. A map from score to chance, slowly and over all requests of an engine. And
a shift of that map for the text at hand, quickly: a filter over a few possible shifts, each of
which may turn into any other at any time, so that a change of the text is followed in few steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import exp, log
from operator import add, mul

BIN = 0.5
"""Width of a score's bin in logits."""

LOWEST, HIGHEST = -4.0, 8.0
BINS = int((HIGHEST - LOWEST) / BIN) + 1

SHIFTS = (-6.0, -3.5, -2.0, -1.1, -0.5, 0.0, 0.5, 1.1, 2.0)
"""Shifts in logits that the filter tells apart: the first means that nothing is ever right."""

PRIOR = (0.03, 0.05, 0.08, 0.14, 0.20, 0.22, 0.16, 0.08, 0.04)
"""How likely each of them is for an unknown text."""

CHANGE = 0.015
"""Chance that the text changes between two outcomes."""

_STAY = 1.0 - CHANGE

USUAL_EVERY = 4
"""Outcomes between two looks at what the text seems to be."""

USUAL_PACE, WHOLE_TEXT = 0.08, 12
"""Share of a text in what is usual, and the looks that make a whole one."""

OPEN = 0.15
"""Share of PRIOR in what is usual, whatever was seen: any text may come next."""

MAP_WEIGHT = 20.0
"""Outcomes that a bin's starting value is worth."""

MAP_WINDOW = 400.0
"""Outcomes of a bin after which older ones fade."""

_FACTORS = tuple(exp(shift) for shift in SHIFTS)


@dataclass(frozen=True, slots=True)
class ScorePrior:
    """What a score means before anything was seen: logit(chance) = offset + slope logit(score)."""

    offset: float = 0.0
    slope: float = 1.0


@lru_cache(4096)
def score_bin(score: float) -> int:
    """The bin of a score between 0 and 1."""
    if score <= 0.0:
        return 0
    if score >= 1.0:
        return BINS - 1
    logit = log(score / (1.0 - score))
    return round((min(max(logit, LOWEST), HIGHEST) - LOWEST) / BIN)


class Reliability:
    """Chances of one source of drafts, which may be of several kinds.

    A slot number stands for kind and score: `BINS * kind + score_bin(score)`. Each kind has a
    score map of its own; the shift is common to all.
    """

    def __init__(self, priors: Sequence[ScorePrior]) -> None:
        """`priors[kind]`."""
        self._odds = [
            exp(-prior.offset - prior.slope * (LOWEST + BIN * index))
            for prior in priors
            for index in range(BINS)
        ]
        """For each slot number what is against such a draft, before the text shifts it."""
        self._chances = [_by_text(odds) for odds in self._odds]
        self._count = [MAP_WEIGHT] * len(self._odds)
        self._usual = self._weights = list(PRIOR)
        self._seen = self._looks = 0
        self._sums = [0.0] * len(SHIFTS)
        self._known: dict[int, float] = {}
        """Chances worked out since something was last learned."""

    def begin(self) -> None:
        """A new request: its text is unknown, what is usual for this engine is not."""
        if self._looks:
            seen = self._mixed(OPEN, [total / self._looks for total in self._sums], PRIOR)
            share = USUAL_PACE * min(1.0, self._looks / WHOLE_TEXT)
            self._usual = self._mixed(share, self._usual, seen)
            self._looks, self._sums = 0, [0.0] * len(SHIFTS)
        self._weights = self._usual
        self._known.clear()

    def chance(self, slot: int) -> float:
        """Chance that a draft of that kind and score is right, all before it being so."""
        known = self._known.get(slot)
        if known is None:
            known = self._known[slot] = sum(map(mul, self._weights, self._chances[slot]))
        return known

    def reaches(self, slots: Iterable[int]) -> Iterator[float]:
        """For each of a chain's slots the chance that it and all before it are right."""
        return accumulate(map(self.chance, slots), mul)

    def by_text(self, slot: int) -> list[float]:
        """The same chance in each of the texts that this may be, the least suitable first."""
        return self._chances[slot]

    def texts(self, least: float) -> tuple[list[float], list[float]]:
        """(likelihood, usual likelihood) of each of the texts that this may be.

        Texts that are less likely than `least` now are taken as impossible now.
        """
        likely = [weight if weight >= least else 0.0 for weight in self._weights]
        scale = 1.0 / sum(likely)
        return [weight * scale for weight in likely], self._usual

    def learn(self, slot: int, right: bool) -> None:
        """A draft of that kind and score turned out right or wrong."""
        # In loops: a comprehension for every step of this would be one more function each, which
        # after a decode takes longer than the arithmetic.
        raw: list[float] = []
        found = 0.0
        for w, u, p in zip(self._weights, self._usual, self._chances[slot], strict=True):
            weight = (_STAY * w + CHANGE * u) * (p if right else 1.0 - p)
            raw.append(weight)
            found += weight
        count = self._count[slot]
        if count < MAP_WINDOW:
            self._count[slot] = count + 1.0
        # A Newton step of the logarithmic loss, on the map alone.
        spread = max(found * (1.0 - found), 0.05) * count
        odds = self._odds[slot] * exp((found - 1.0 if right else 1.0 - found) / spread)
        weights: list[float] = []
        chances: list[float] = []
        for weight, factor in zip(raw, _FACTORS, strict=True):
            weights.append(weight / found)
            chances.append(factor / (factor + odds))
        self._weights = weights
        self._odds[slot], self._chances[slot] = odds, chances
        self._known.clear()
        self._seen += 1
        if self._seen % USUAL_EVERY == 0:
            self._looks += 1
            self._sums = list(map(add, self._sums, weights))

    def relax(self, steps: int) -> None:
        """Nothing was seen for so many steps: the text may have changed meanwhile."""
        gone = 1.0 - (1.0 - CHANGE) ** steps
        self._weights = self._mixed(gone, self._weights, self._usual)
        self._known.clear()

    @staticmethod
    def _mixed(share: float, main: Sequence[float], other: Sequence[float]) -> list[float]:
        stay = 1.0 - share
        return [stay * a + share * b for a, b in zip(main, other, strict=True)]


def _by_text(odds: float) -> list[float]:
    return [factor / (factor + odds) for factor in _FACTORS]
