"""The proposers: none, n-gram lookup, a drafter, and auto, which picks between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from dspine.drafters.base import Draft, DraftAsk, Drafter
from dspine.engine.feed import FeatureFeed
from dspine.engine.lookups import make_lookups
from dspine.engine.ngram_table import NgramTable
from dspine.engine.promise import Promise
from dspine.engine.proposal import (
    DRAFTER,
    GRAMMAR,
    MOST,
    NGRAM,
    NOTHING,
    Ask,
    Confirmed,
    Proposal,
    Proposer,
)
from dspine.engine.sequence import common_prefix
from dspine.engine.target import Target
from dspine.engine.width import WidthPolicy

log = logging.getLogger("dspine")

T = TypeVar("T")

UNSCORED = 0.5
"""Score of a draft about which its drafter says nothing."""

MAX_FAILURES = 3
"""Failing drafts in a row after which a drafter is left alone."""


class NoProposer:
    """Never drafts: plain decoding through the speculative loop."""

    name = "none"
    disabled_reason: str | None = None

    def usable(self, _prompt: Sequence[int], common: int) -> int:
        return common

    def begin(self, prompt: Sequence[int], kept: int = 0) -> None:
        """Nothing to prepare."""

    def saw_prompt(self, position: int, count: int) -> None:
        """Nothing to remember."""

    def propose(self, _ask: Ask) -> Proposal:
        return NOTHING

    def wish(self, _ask: Ask) -> DraftAsk | None:
        return None

    def choose(self, _draft: Draft | Exception | None) -> Proposal:
        return NOTHING

    def confirm(self, confirmed: Confirmed) -> None:
        """Nothing to remember."""

    def flush(self, position: int) -> None:
        """Nothing waits."""

    def truncate(self, length: int) -> None:
        """Nothing to forget."""


class NgramProposer:
    """Continues the longest earlier occurrence of the newest tokens, else asks the table."""

    name = NGRAM
    disabled_reason: str | None = None

    def __init__(
        self,
        policy: WidthPolicy,
        *,
        min_match: int = 2,
        table: NgramTable | None = None,
        min_probability: float = 0.3,
    ) -> None:
        """`min_probability` is what a table entry needs to be proposed."""
        self._policy = policy
        self._lookups = make_lookups(min_match, table, min_probability)

    def usable(self, _prompt: Sequence[int], common: int) -> int:
        return common

    def begin(self, prompt: Sequence[int], _kept: int = 0) -> None:
        known = common_prefix(self._lookups.tokens, prompt)
        self._lookups.truncate(known)
        self._lookups.extend(prompt[known:])

    def saw_prompt(self, position: int, count: int) -> None:
        """Features are of no use here."""

    def propose(self, ask: Ask) -> Proposal:
        return max(self.look_up(ask), key=lambda found: found.scores[0], default=NOTHING)

    def look_up(self, ask: Ask) -> list[Proposal]:
        """What repeats and what the table knows: at most one proposal of each kind."""
        count = min(ask.limit, self._policy.most(NGRAM))
        return self._lookups.look_up(count) if count > 0 else []

    def continued(self, drafted: Proposal, limit: int) -> Proposal:
        """A chain with what repeats after its end, or else is known: at most `limit` drafts."""
        return self._lookups.continued(drafted, min(limit, self._policy.most(NGRAM)))

    def confirm(self, confirmed: Confirmed) -> None:
        self._lookups.extend(confirmed.tokens)

    def flush(self, position: int) -> None:
        """Nothing waits."""

    def truncate(self, length: int) -> None:
        self._lookups.truncate(length)


class DrafterProposer:
    """Asks a drafter network; three failures in a row switch it off with one warning."""

    def __init__(
        self,
        policy: WidthPolicy,
        drafter: Drafter,
        target: Target,
        *,
        max_positions: int,
        seq: int = 0,
        promise: Promise | None = None,
    ) -> None:
        """Anchors from `max_positions` on are beyond what the drafter was made for. `promise` is
        told how its first drafts turn out.
        """
        self.name = drafter.name
        self.disabled_reason: str | None = None
        self._policy = policy
        self._drafter = drafter
        self._feed = FeatureFeed(target, drafter, seq)
        self.max_positions = max_positions
        self._is_short = max_positions < target.n_ctx
        self.has_ended = False
        """Whether the running answer went beyond what the drafter was made for."""
        self._seq = seq
        self._promise = promise or Promise()
        self._first: int | None = None
        """The first draft of the block that is not confirmed yet."""
        self._draws = False
        self._failures = 0
        self._first_visible = 0

    def usable(self, prompt: Sequence[int], common: int) -> int:
        """Positions that a block after the prompt sees must have features, or be decoded again."""
        first = self._drafter.first_visible(len(prompt) - 1)
        end = min(common, self.max_positions)
        if first >= end or self.disabled_reason is not None:
            return common
        held_from, held_to = self._feed.held
        if first < held_from or first > held_to:
            return first
        return common if held_to >= end else held_to

    def begin(self, prompt: Sequence[int], kept: int = 0) -> None:
        self.has_ended = False
        if self.disabled_reason is None:
            self._first_visible = self._drafter.first_visible(len(prompt) - 1)
            self._guarded(lambda: self._feed.truncate(kept))

    def saw_prompt(self, position: int, count: int) -> None:
        first = max(position, self._first_visible)
        end = min(position + count, self.max_positions)
        if first < end and self.disabled_reason is None:
            self._guarded(lambda: self._feed.take(first, first - position, end - first))

    def waiting(self, ask: Ask) -> int | None:
        """Feature rows that the next draft hands over first; None where it is off or the anchor
        beyond its reach. That is remembered as `has_ended`.
        """
        is_beyond = ask.position + 1 >= self.max_positions
        self.has_ended = is_beyond and self._is_short
        return self._feed.waiting if self.disabled_reason is None and not is_beyond else None

    def propose(self, ask: Ask) -> Proposal:
        return self.draft(ask, ask.limit)[0]

    def draft(self, ask: Ask, limit: int, lead: Proposal = NOTHING) -> tuple[Proposal, Proposal]:
        """At most `limit` drafts, which may be fewer than the ask's; and the lead with what
        follows it, where the drafter can tell that.
        """
        width = self._width(ask, limit)
        if not width:
            return NOTHING, NOTHING
        try:
            self._feed.flush(ask.position)
            told = self._told(ask, width, lead)
            draft = self._drafter.draft(self._seq, ask.anchor, width, ask.draw, told)
        except Exception as error:  # noqa: BLE001 - any failure of a drafter is survivable
            self._failed(error)
            return NOTHING, NOTHING
        return self.proposal(draft), self.led(draft, lead)

    def wish(self, ask: Ask, limit: int, lead: Proposal = NOTHING) -> DraftAsk | None:
        """The same, as a draft to be made outside; hands over what waits for it."""
        width = self._width(ask, limit)
        if not width or self._guarded(lambda: self._flushed(ask.position)) is None:
            return None
        return DraftAsk(self._seq, ask.anchor, width, ask.draw, self._told(ask, width, lead))

    def proposal(self, draft: Draft | Exception) -> Proposal:
        """What became of a draft."""
        if isinstance(draft, Exception):
            self._failed(draft)
            return NOTHING
        self._failures = 0
        tokens = draft.tokens
        if not tokens:
            return NOTHING
        if not self._draws:
            self._first = tokens[0]
        scores = draft.scores or (UNSCORED,) * len(tokens)
        return Proposal(tokens, scores, self.name, draft.drawn)

    def led(self, draft: Draft | Exception, lead: Proposal) -> Proposal:
        """The lead and what follows it."""
        if isinstance(draft, Exception) or draft.led is None:
            return NOTHING
        tokens = draft.led.tokens
        scores = draft.led.scores or (UNSCORED,) * len(tokens)
        return lead._replace(own=MOST).continued(tokens, scores, self.name)

    def _told(self, ask: Ask, width: int, lead: Proposal) -> tuple[int, ...]:
        """The tokens of the lead, if such a block has a slot after them. Where drafts are drawn to
        be judged by rejection, all of a block must be.
        """
        if ask.rejects or len(lead.tokens) > width - 2 or not self._drafter.follows:
            return ()
        return lead.tokens

    def _width(self, ask: Ask, limit: int) -> int:
        """Of the block for at most `limit` drafts; 0 where there can be none."""
        self._draws = ask.draw is not None
        if self.disabled_reason is not None:
            return 0
        count = min(
            limit,
            self._policy.most(DRAFTER),
            self.max_positions - ask.position - 1,
            self._drafter.block_size - 1,
        )
        return count + 1 if count > 0 else 0

    def confirm(self, confirmed: Confirmed) -> None:
        position, row, tokens = confirmed
        if self._first is not None:
            self._promise.compare(self._first, tokens[0])
            self._first = None
        if position < self.max_positions and self.disabled_reason is None:
            try:
                self._feed.take(position, row, len(tokens))
            except Exception as error:  # noqa: BLE001 - any failure of a drafter is survivable
                self._failed(error)

    def flush(self, position: int) -> None:
        if self.disabled_reason is None:
            self._guarded(lambda: self._feed.flush(position))

    def truncate(self, length: int) -> None:
        self._first = None
        if self.disabled_reason is None:
            self._guarded(lambda: self._feed.truncate(length - 1))

    def _flushed(self, position: int) -> bool:
        self._feed.flush(position)
        return True

    def _guarded(self, action: Callable[[], T]) -> T | None:
        """The answer goes on without the drafter, whatever it met; the reason is kept."""
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - any failure of a drafter is survivable
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            self.disabled_reason = (
                f"the drafter failed {MAX_FAILURES} times in a row, last with: {error}"
            )
            log.warning("drafting is off: %s", self.disabled_reason)


class AutoProposer:
    """Lookups, a drafter, or both, as the policy says at each step."""

    def __init__(
        self,
        policy: WidthPolicy,
        ngram: NgramProposer | None,
        drafter: DrafterProposer | None,
        *,
        name: str = "auto",
    ) -> None:
        self.name = name
        self._policy = policy
        self._ngram, self._drafter = ngram, drafter
        self._parts: list[Proposer] = [part for part in (ngram, drafter) if part is not None]
        self._limit = 0
        """Of the ask behind the last wish."""

    @property
    def disabled_reason(self) -> str | None:
        drafter = self._drafter
        if drafter is None:
            return None
        if drafter.disabled_reason is None and drafter.has_ended:
            return (
                f"the drafter was made for {drafter.max_positions} positions, beyond which it is "
                f"not asked"
            )
        return drafter.disabled_reason

    def usable(self, prompt: Sequence[int], common: int) -> int:
        return min((part.usable(prompt, common) for part in self._parts), default=common)

    def begin(self, prompt: Sequence[int], kept: int = 0) -> None:
        for part in self._parts:
            part.begin(prompt, kept)

    def saw_prompt(self, position: int, count: int) -> None:
        for part in self._parts:
            part.saw_prompt(position, count)

    def propose(self, ask: Ask) -> Proposal:
        wanted = self._look(ask)
        drafted = led = NOTHING
        if wanted and self._drafter is not None:
            lead = self._policy.lead()
            drafted, led = self._drafter.draft(ask, min(wanted, ask.limit), lead)
            drafted = self._continued(drafted, ask.limit)
        return self._policy.choose(drafted, led)

    def wish(self, ask: Ask) -> DraftAsk | None:
        wanted = self._look(ask)
        if not wanted or self._drafter is None:
            return None
        self._limit = ask.limit
        return self._drafter.wish(ask, min(wanted, ask.limit), self._policy.lead())

    def choose(self, draft: Draft | Exception | None) -> Proposal:
        drafted = led = NOTHING
        if draft is not None and self._drafter is not None:
            drafted = self._drafter.proposal(draft)
            led = self._drafter.led(draft, self._policy.lead())
        return self._policy.choose(self._continued(drafted, self._limit), led)

    def _continued(self, drafted: Proposal, limit: int) -> Proposal:
        """A draft of the network, longer where lookups know what follows. What was drawn stays
        as it is: how much of it is verified must not depend on its tokens.
        """
        if self._ngram is None or not drafted.tokens or drafted.drawn:
            return drafted
        return self._ngram.continued(drafted, limit)

    def _look(self, ask: Ask) -> int:
        """Drafts that are wanted of the drafter, given what is to be had without it."""
        ngram, drafter = self._ngram, self._drafter
        found = ngram.look_up(ask) if ngram is not None else []
        if ask.forced.tokens:
            count = min(ask.limit, self._policy.most(GRAMMAR))
            forced = Proposal(ask.forced.tokens, ask.forced.scores, GRAMMAR).first(count)
            found += [forced] if forced.tokens else []
        waiting = drafter.waiting(ask) if drafter is not None else None
        return self._policy.ask(found, ask, waiting)

    def confirm(self, confirmed: Confirmed) -> None:
        for part in self._parts:
            part.confirm(confirmed)

    def flush(self, position: int) -> None:
        for part in self._parts:
            part.flush(position)

    def truncate(self, length: int) -> None:
        for part in self._parts:
            part.truncate(length)
