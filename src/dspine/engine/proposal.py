"""What a proposer hands to the verify, and what a proposer is.

What is made at every step is a named tuple: making one takes a third of the time of a frozen
dataclass, and after a decode, when the caches hold the weights, even less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dspine.drafters.base import Draft, DraftAsk, Draw, Drawn
from dspine.engine.waiting import Copies
from dspine.text.forced import NOT_FORCED, Forced

DRAFTER = "dspine"
"""What options and width policies call the drafter, whatever its kind."""


JOINT = "+"
"""Between the names of two proposers, the second of which continued a chain of the first."""

NGRAM, TABLE, GRAMMAR = "ngram", "table", "grammar"
"""Names under which proposals that cost nothing are counted: of what repeats, of the table of
likely tokens, of what a grammar forces."""

CONTINUED = f"{TABLE}{JOINT}{NGRAM}"
"""The name of a table's chain that a repeat continues."""

MOST = 1 << 30
"""More drafts than there ever are."""


class Proposal(NamedTuple):
    """Drafts for the slots after the anchor, each with the chance its proposer gives it.

    A score is the probability that the draft is right, given that all before it are. Scores must
    not depend on what was drawn: a cut that prefers some draws would change the distribution
    of the text.
    """

    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    proposer: str
    drawn: tuple[Drawn, ...] = ()
    """For each draft what it was drawn from; empty where nothing was drawn."""
    own: int = MOST
    """Drafts of the first proposer; those after them are of lookups, and `proposer` names both."""

    def continued(self, tokens: Sequence[int], scores: Sequence[float], proposer: str) -> Proposal:
        """The proposal with what another proposer expects after its end."""
        if not tokens:
            return self
        name = f"{self.proposer}{JOINT}{proposer}"
        own = min(self.own, len(self.tokens))
        return Proposal((*self.tokens, *tokens), (*self.scores, *scores), name, self.drawn, own)

    def after(self, count: int) -> Proposal:
        """What is left once the first `count` drafts, none of them drawn, have come true."""
        own = MOST if self.own == MOST else max(0, self.own - count)
        return Proposal(self.tokens[count:], self.scores[count:], self.proposer, (), own)

    def first(self, count: int) -> Proposal:
        """The proposal cut to its first `count` drafts.

        Of the drawn ones the next one stays: that it was drawn must not be forgotten, and the
        row after the last draft can judge it.
        """
        if count >= len(self.tokens):
            return self
        name, own = (self.proposer, self.own) if count else ("none", MOST)
        if count <= own < MOST:
            name, own = name.rpartition(JOINT)[0], MOST
        return Proposal(
            self.tokens[:count], self.scores[:count], name, self.drawn[: count + 1], own
        )


NOTHING = Proposal((), (), "none")
"""No drafts: the step is a plain one."""


class Ask(NamedTuple):
    """Drafts wanted after `anchor`, which sits at `position`: at most `limit`.

    The decode repeats `extra` confirmed rows in front of the anchor.
    """

    anchor: int
    position: int
    limit: int
    draw: Draw | None = None
    """How to pick among candidates; None: the best ones."""
    extra: int = 0
    copies: Copies | None = None
    """What taking drafts back costs; None where they are cut off for nothing."""
    forced: Forced = NOT_FORCED
    """What a grammar suggests."""

    @property
    def rejects(self) -> bool:
        """Whether drafts are drawn to be judged by rejection."""
        return self.draw is not None and self.draw.with_distributions


class Confirmed(NamedTuple):
    """What a verify confirmed: `tokens`, the last of which is the new anchor.

    Row `row` of the decode, and those after it, hold `position` and those after it (the old
    anchor first): as many rows as there are tokens.
    """

    position: int
    row: int
    tokens: tuple[int, ...]


class Proposer(Protocol):
    """Proposes drafts for one sequence. It hears about every confirmed token and feature."""

    @property
    def name(self) -> str:
        """none, ngram, auto, or the kind of the drafter, as in dflash2."""

    @property
    def disabled_reason(self) -> str | None:
        """Why it no longer drafts, if it should."""

    def usable(self, prompt: Sequence[int], common: int) -> int:
        """Of the first `common` positions, which are in memory: how many may stay there.

        The rest is decoded again so that `saw_prompt` shows it. Answers for a sequence that
        was truncated to `common` and goes on with `prompt`.
        """

    def begin(self, prompt: Sequence[int], kept: int = 0) -> None:
        """A sequence whose last token is the first anchor; its first `kept` positions are those
        of the sequence before, and what is known of them stays."""

    def saw_prompt(self, position: int, count: int) -> None:
        """The target's last decode was prompt rows at `position` ... ."""

    def propose(self, ask: Ask) -> Proposal:
        """At most `ask.limit` drafts for the slots after the anchor."""

    def confirm(self, confirmed: Confirmed) -> None:
        """A verify is over."""

    def flush(self, position: int) -> None:
        """Hand over what waits and a block anchored at `position` or later can see."""

    def truncate(self, length: int) -> None:
        """Only the first `length` tokens still count (an interrupted step)."""


class SharingProposer(Proposer, Protocol):
    """One whose drafter serves several sequences: `propose` is `wish`, a draft, `choose`."""

    def wish(self, ask: Ask) -> DraftAsk | None:
        """The draft that is wanted now, None for none."""

    def choose(self, draft: Draft | Exception | None) -> Proposal:
        """What to verify, given that draft, or why there is none although it was wanted."""
