"""What a network promises that goes on after the first drafts of a lookup, judged by its last
chains of that kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dspine.engine.acceptance import Reliability, ScorePrior
from dspine.engine.asking import Prices
from dspine.engine.offers import Offer, kinds_after, slots_of
from dspine.engine.proposal import Proposal

PRIORS = (ScorePrior(-0.3, 0.8), ScorePrior(0.5, 0.8), ScorePrior(-1.0, 0.6))
"""By kind: no other lookup says anything for the slot, the same, or another token."""

REMEMBERED = 4
"""Chains from which the next one is guessed."""


class Onward(NamedTuple):
    """A block of `width` slots that begins with a lookup's drafts, and the tokens it gains beyond
    them alone (width 0: none).
    """

    width: int
    gain: float


class OnwardProspects:
    """Remembers chains that went on after a lookup; `reliability` knows what became of them."""

    def __init__(self, typical: Sequence[int]) -> None:
        """`typical` stands for those not seen yet, slot numbers as in `Reliability`."""
        self.reliability = Reliability(PRIORS)
        self._typical = list(typical)
        self._seen: deque[list[int]] = deque(maxlen=REMEMBERED)

    def begin(self) -> None:
        """A new request."""
        self.reliability.begin()
        self._seen.clear()

    def watch(self, led: Proposal, offer: Offer, given: int, free: Iterable[Offer]) -> Offer:
        """The first `given` drafts of `offer` and what the network says after them in `led`, told
        where free offers agree.
        """
        slots = slots_of(kinds_after(led.tokens, given, free), led.scores[given:])
        self.add(slots)
        lead = tuple(map(offer.source.chance, offer.slots[:given]))
        return Offer(self.reliability, led, slots, lead=lead)

    def add(self, slots: Sequence[int]) -> None:
        """A chain went on with these."""
        self._seen.append(list(slots))

    def judge(self, reached: float, given: int, most: int, prices: Prices) -> Onward:
        """The best block after `given` drafts of a lookup, which are all right with the chance
        `reached`, with at most `most` drafts after them.

        `prices.rows[k]` and `owed[k]` are those of k drafts in all, `drafts[w]` that of width w.
        """
        chance = self.reliability.chance
        rows, owed = prices.rows, prices.owed
        gains = [0.0] * most
        chains = self._seen or (self._typical,)
        for slots in chains:
            before, tokens, worth = reached, 0.0, 0.0
            slot = slots[-1]
            for index in range(most):
                if index < len(slots):
                    slot = slots[index]
                right = before * chance(slot)
                count = given + index + 1
                tokens += right - (before - right) * owed[count]
                worth = max(worth, tokens - rows[count] + rows[given])
                gains[index] += worth
                before = right
        best = Onward(0, 0.0)
        for index, total in enumerate(gains):
            width = given + index + 2
            gain = total / len(chains) - prices.drafts[width]
            if gain > best.gain:
                best = Onward(width, gain)
        return best
