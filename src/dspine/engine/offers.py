"""Chains of drafts that a policy chooses from: their chances, and how far they were confirmed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import mul

from dspine.engine.acceptance import BINS, Reliability, score_bin
from dspine.engine.proposal import Proposal

ALONE, AGREE, DIFFER, LOOKED_UP = 0, 1, 2, 3
"""Kinds of a draft: nobody else proposes for its slot, or the same, or another token; or it is
a lookup's that continues a chain of the network."""


@dataclass(slots=True)
class Offer:
    """Drafts of one source, slot by slot, and how far they were confirmed."""

    source: Reliability
    proposal: Proposal
    slots: list[int]
    at: int = 0
    lead: tuple[float, ...] = ()
    """Chances of the first drafts where they are another source's; `slots` are those after them."""

    def follow(self, confirmed: Sequence[int]) -> bool:
        """Learn from confirmed tokens; whether the chain is right so far and goes on."""
        tokens, lead, at = self.proposal.tokens, len(self.lead), self.at
        for token, draft in zip(confirmed, tokens[at:], strict=False):
            if at >= lead:
                self.source.learn(self.slots[at - lead], draft == token)
            at += 1
            if draft != token:
                self.at = at
                return False
        self.at = at
        return at < len(tokens)

    def reaches(self) -> Iterable[float]:
        """For each draft the chance that it and all before it are right."""
        chances = map(self.source.chance, self.slots)
        return accumulate(chain(self.lead, chances) if self.lead else chances, mul)

    def expected(self, drafts: int) -> list[float]:
        """Tokens of a step that verifies 0, 1, ... of its drafts, at most so many."""
        if not self.lead:
            return list(accumulate(self.source.reaches(self.slots[:drafts]), initial=1.0))
        return list(accumulate(self.reaches(), initial=1.0))[: drafts + 1]

    def rest(self, limit: int) -> Offer:
        """What is left of a chain that was right so far."""
        left = self.proposal.after(self.at).first(limit)
        lead = self.lead[self.at : self.at + limit]
        first = max(0, self.at - len(self.lead))
        return Offer(self.source, left, self.slots[first : first + limit - len(lead)], lead=lead)


def kinds_after(tokens: Sequence[int], given: int, others: Iterable[Offer]) -> list[int]:
    """For each draft but the first `given` whether an offer that begins with those agrees."""
    kinds = [ALONE] * (len(tokens) - given)
    for other in others:
        theirs = other.proposal.tokens
        if theirs[:given] != tuple(tokens[:given]):
            continue
        for slot, kind in enumerate(_compared(tokens[given:], theirs[given:])):
            if kinds[slot] != AGREE:
                kinds[slot] = kind
    return kinds


def _compared(tokens: Sequence[int], others: Sequence[int]) -> Iterator[int]:
    """Slot by slot whether the others agree, up to the first that differs."""
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            yield DIFFER
            return
        yield AGREE


def watched(network: Reliability, drafted: Proposal, free: Iterable[Offer]) -> Offer:
    """A network's chain beside the free offers: it and they are told where the others agree."""
    own = min(drafted.own, len(drafted.tokens))
    kinds = [ALONE] * own + [LOOKED_UP] * (len(drafted.tokens) - own)
    # A choice that depends on what was drawn would change the distribution of the text.
    for offer in free if not drafted.drawn else ():
        offer.slots = slots = list(offer.slots)
        for slot, kind in enumerate(_compared(drafted.tokens[:own], offer.proposal.tokens)):
            slots[slot] += BINS * kind
            if kinds[slot] != AGREE:
                kinds[slot] = kind
    return Offer(network, drafted, slots_of(kinds, drafted.scores))


def slots_of(kinds: Iterable[int], scores: Iterable[float]) -> list[int]:
    """Slots of drafts as `Reliability` counts them: bins of the scores, kind after kind."""
    return [BINS * kind + score_bin(score) for kind, score in zip(kinds, scores, strict=True)]
