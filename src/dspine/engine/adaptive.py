"""The adaptive policy: at each step, who proposes, how many drafts are made, how many verified.

It maximises tokens per second. A step is worth its expected tokens less its time at the rate of
tokens reached lately, so that a row is verified where it earns more than its time would earn
elsewhere. Pure: no clock, no library; what it knows it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from math import sqrt

from dspine.engine.acceptance import Reliability, ScorePrior, score_bin
from dspine.engine.asking import LEAST_REACH, Judgement, Prices, Prospects, typical_chains
from dspine.engine.costs import StepCosts
from dspine.engine.offers import ALONE, Offer, watched
from dspine.engine.onward import OnwardProspects
from dspine.engine.proposal import CONTINUED, DRAFTER, GRAMMAR, NGRAM, NOTHING, TABLE, Ask, Proposal
from dspine.engine.sequence import common_prefix
from dspine.engine.trial import Trial, would_have
from dspine.engine.waiting import owed_ms
from dspine.engine.width import Outcome, Outlook

NETWORK_PRIORS = (
    ScorePrior(-0.3, 0.8),
    ScorePrior(0.5, 0.8),
    ScorePrior(-1.0, 0.6),
    ScorePrior(),
)
"""By kind. Scores of a network promise too much; that another proposer agrees is good news."""

LOOKUP_PRIORS = (ScorePrior(), ScorePrior(0.8), ScorePrior(-1.0))

FREE = (NGRAM, TABLE, GRAMMAR)
"""Names of proposals that cost nothing."""

SITUATIONS = 4
WEAK, STRONG = 0.45, 0.75
"""No free draft, a weak one, a fair one, a strong one: what the drafter adds depends on it."""

PACE = 1.0 / 48.0
"""Share of a step in the rate of tokens that counts as usual."""

CREDIT = 5.0
"""Plain tokens' time that drafting may have lost against plain decoding at any moment."""

ALLOWED_LOSS = 0.005
"""Share of each token's time by which that loss may grow."""

STALL = 2.0
"""Times of its price that a draft counts for at most in what drafting has lost."""

DOUBTS, DOUBTFUL = 5, 0.2
"""Drafts in a row that are made in spite of an expected loss (at most that many tokens each)
before a stretch of drafts ends: without them nothing more is learned of the text."""

CHANGES = 0.0025
"""Chance at each step that a text where the drafter does not pay has become one where it does."""

PROBE_FIRST, PROBE_LAST = 16, 128
"""Least and most steps between two questions of that kind."""


class AdaptiveWidth:
    """Learns from every step of an engine; `begin` starts another text with what is usual."""

    # More attributes than Python keeps beside an object: in a dict they would be apart in memory.
    __slots__ = (
        "_all", "_behind", "_block", "_change", "_costs", "_credit", "_doubts", "_draft_ms",
        "_drafted", "_extra", "_follows", "_free", "_has_rivals", "_instead", "_is_rest", "_last",
        "_lead", "_led", "_lookups", "_most", "_network", "_nothing", "_offers", "_onward",
        "_open", "_owed", "_plain", "_probing", "_prospects", "_rate", "_restore", "_rows",
        "_save", "_sequences", "_shared", "_since", "_situation", "_sources", "_speed", "_time",
        "_tokens", "_trial", "_warm", "_width", "_worth",
    )  # fmt: skip

    def __init__(
        self,
        costs: StepCosts,
        *,
        most_drafts: int,
        block_size: int = 1,
        curve: Sequence[float] = (),
        shared: Callable[[int], StepCosts] | None = None,
        follows: bool = False,
    ) -> None:
        """`block_size` is the drafter's (1 without one), `curve` its stored acceptance; `follows`
        says whether it can follow drafts of a lookup.

        `shared(n)` are the costs where n sequences answer at once.
        """
        self._costs = costs
        self._shared = shared
        self._follows = follows
        self._sequences = 1
        self._most = most_drafts
        self._block = block_size
        self._network = Reliability(NETWORK_PRIORS)
        self._sources = [Reliability(LOOKUP_PRIORS) for _ in FREE]
        self._lookups = dict(zip(FREE, self._sources, strict=True))
        self._lookups[CONTINUED] = self._lookups[TABLE]
        typical = typical_chains(curve[: block_size - 1] or (0.5,), NETWORK_PRIORS[ALONE])
        self._prospects = Prospects(
            self._network, typical, situations=SITUATIONS, most_drafts=max(1, block_size - 1)
        )
        self._onward = OnwardProspects(typical[len(typical) // 2])
        self._since = self._doubts = 0
        self._trial = Trial()
        self._has_rivals = False
        """Whether lookups have ever proposed anything."""
        self._speed = 1.0
        self._nothing = [0.0] * (max(most_drafts, block_size) + 1)
        self._start()

    def _start(self) -> None:
        self._tokens, self._time = 16.0 * self._speed, 16.0
        self._credit = CREDIT
        self._open: Offer | None = None
        self._free: list[Offer] = []
        self._offers: list[Offer] = []
        self._all: list[Offer] = []
        self._worth: list[tuple[int, float]] = []
        self._instead: tuple[Offer, int] | None = None
        """The best lookup, and how many of its drafts."""
        self._behind = 0.0
        """Tokens by which the rest of a chain of the network is better than that."""
        self._is_rest = False
        self._drafted: Offer | None = None
        self._rows: list[float] = [1.0]
        self._plain = 1.0
        self._owed: list[float] = self._nothing
        self._save = self._restore = 0.0
        self._extra = 0
        self._last = -1
        """Rows of the decode before, but for one; -1 before the first."""
        self._change = 0.0
        self._draft_ms = 0.0
        self._width = self._situation = 0
        self._probing = self._warm = False
        self._lead: tuple[Offer, int] | None = None
        """The lookup, and how many of its drafts, that a draft should follow as well."""
        self._led: Offer | None = None
        self._rate = 0.0
        self._prospects.forget()

    def begin(self, drafts: int | None = None) -> None:  # noqa: ARG002 - the rows asked for are limited
        self._speed = max(1.0, self._tokens / self._time)
        self._network.begin()
        self._onward.begin()
        for source in self._sources:
            source.begin()
        self._start()

    def most(self, proposer: str) -> int:
        return self._block - 1 if proposer == DRAFTER else self._most

    # -- one step --------------------------------------------------------------------------------

    def ask(self, free: Sequence[Proposal], request: Ask, waiting: int | None) -> int:
        self._look_at(free, request)
        if self._block < 2 or waiting is None:
            return 0
        # Where not even the shortest draft may be tried, judging one costs more than it is worth.
        cheapest = self._costs.draft(2, waiting, warm=self._warm)
        may_ask = self._rate * cheapest <= self._trial.left
        if not may_ask and self._open is None:
            return 0
        best, first = self._weighed()
        if not may_ask:
            return 0
        situation = (first > 0.0) + (first >= WEAK) + (first >= STRONG)
        judgement = self._prospects.judge(
            situation, best, min(self._block - 1, request.limit), self._prices
        )
        goes_on = self._warm and situation == self._situation
        self._situation = situation
        if self._follows and not request.rejects and self._leads(request, waiting, judgement):
            return self._width - 1
        width = judgement.width
        if width < 2:
            return 0
        draft_ms = self._costs.draft(width, waiting, warm=self._warm)
        if not (self._affords(draft_ms, 1) and self._wants(judgement, draft_ms, goes_on=goes_on)):
            return 0
        self._width, self._draft_ms = width, draft_ms
        return width - 1

    def _look_at(self, free: Sequence[Proposal], request: Ask) -> None:
        """What a step costs here, and what is to be had without a draft."""
        rows = self._costs.rows(request.position)
        speed = max(1.0, self._tokens / self._time)
        self._plain = plain = rows[0]
        self._rate = speed / plain
        self._change = self._costs.change_ms
        self._extra, copies = request.extra, request.copies
        if copies is None:
            self._owed, self._save, self._restore = self._nothing, 0.0, 0.0
        else:
            most = len(self._nothing) - 1
            self._owed = owed_ms(rows, request.extra, most, speed, copies)
            self._save, self._restore = copies.save_ms, copies.restore_ms
        self._rows = rows[request.extra :] if request.extra else rows
        found: list[Offer] = []
        for proposal in free:
            if proposal.tokens:
                slots = list(map(score_bin, proposal.scores))
                found.append(Offer(self._lookups[proposal.proposer], proposal, slots))
        if found:
            self._has_rivals = True
        self._free = self._offers = found
        if self._open is not None:
            self._offers = [*found, self._open.rest(request.limit)]
        self._drafted, self._width, self._probing = None, 0, False
        self._lead = self._led = None
        self._worth, self._instead, self._behind = [], None, 0.0

    def _weighed(self) -> tuple[float, float]:
        """(tokens that the best step without a draft is worth, best chance of a first draft)."""
        best, first = self._undrafted(), 0.0
        for index, chain in enumerate(self._offers):
            found = self._best(chain)
            self._worth.append(found)
            if found[1] > best:
                self._behind = found[1] - best
                best = found[1]
                if index < len(self._free):
                    self._instead, self._behind = (chain, found[0]), 0.0
            first = max(first, next(iter(chain.reaches())))
        return best, first

    def _affords(self, draft_ms: float, drafts: int) -> bool:
        """Whether such a draft and a verify of that many may be lost."""
        least = draft_ms + self._rows[drafts] - self._rows[0] + self._save + self._owed[drafts]
        return least <= self._credit * self._plain and self._rate * draft_ms <= self._trial.left

    def _wants(self, judgement: Judgement, draft_ms: float, *, goes_on: bool) -> bool:
        """Whether to draft: for what it gains, to end a stretch in doubt, or as a probe."""
        if judgement.value > 0.0:
            self._doubts = 0
            return True
        if goes_on and self._doubts < DOUBTS and judgement.now > -DOUBTFUL:
            self._doubts += 1
            self._prospects.forget()
            return True
        usual_ms = self._costs.drafts()[judgement.width]
        return self._probe(self._rate * (draft_ms - usual_ms) - judgement.now, judgement.usually)

    def lead(self) -> Proposal:
        if self._lead is None:
            return NOTHING
        offer, count = self._lead
        return offer.proposal.first(count)

    def choose(self, drafted: Proposal, led: Proposal = NOTHING) -> Proposal:
        offers = self._offers
        if led.tokens and self._lead is not None:
            self._led = self._onward.watch(led, *self._lead, self._free)
            offers = [*offers, self._led]
        if drafted.tokens:
            self._drafted = watched(self._network, drafted, self._free)
            self._prospects.add(self._situation, self._drafted.slots[: drafted.own])
            offers = [*offers, self._drafted]
        self._all = offers
        value, chosen = self._undrafted(), NOTHING
        if drafted.drawn:
            # Not forgotten even if it is not verified: see Proposal.first.
            chosen = drafted.first(0)
        # Without a draft the offers are worth what they were when it was decided against.
        self._is_rest = False
        known = self._worth if not (self._width or drafted.tokens) else []
        for index, chain in enumerate(offers):
            count, worth = known[index] if known else self._best(chain)
            if worth > value:
                value, chosen = worth, chain.proposal.first(count)
                self._is_rest = self._open is not None and index == len(self._free)
        if drafted.tokens:
            self._since = 0
        return chosen

    def observe(self, outcome: Outcome) -> None:
        confirmed, rows = outcome.confirmed, self._rows
        for chain in self._free:
            chain.follow(confirmed)
        if self._open is not None and not self._open.follow(confirmed):
            self._open = None
        drafted = self._drafted
        if drafted is not None:
            if drafted.follow(confirmed) and not drafted.proposal.drawn:
                self._open = drafted
            if self._probing:
                self._probed(drafted, confirmed)
        led = self._led
        if led is not None and led.follow(confirmed) and self._open is None:
            self._open = led
        cost = rows[outcome.drafts]
        others = self._extra + outcome.drafts
        if others != self._last:
            cost += self._change
        self._costs.observe_rows(cost, others + 1, outcome.verify_ms)
        self._last = others
        if outcome.drafts:
            cost += self._save
            if len(confirmed) <= outcome.drafts:
                cost += self._restore
        if self._width:
            # After steps without drafts the drafter's weights have left the caches: such a draft
            # says nothing about what drafting at every step costs. One that failed says less.
            if drafted is not None:
                self._costs.observe_draft(self._draft_ms, outcome.draft_ms, warm=self._warm)
            # What it took, but for stalls of the machine.
            cost += min(outcome.draft_ms or self._draft_ms, STALL * self._draft_ms)
        # Without lookups the alternative is plain decoding, and that loss is bounded above.
        if (self._width or self._is_rest) and self._has_rivals and self._sequences == 1:
            self._trial.gained(self._gain(confirmed, cost))
        self._trial.emitted(len(confirmed))
        self._warm = drafted is not None
        cost /= self._plain
        self._tokens += len(confirmed) - PACE * self._tokens
        self._time += cost - PACE * self._time
        change = len(confirmed) * (1.0 + ALLOWED_LOSS) - cost
        self._credit = min(CREDIT, self._credit + change)

    def passed(self, confirmed: Sequence[int]) -> None:
        if self._open is not None and not self._open.follow(confirmed):
            self._open = None
        self._warm = False
        self._trial.emitted(len(confirmed))

    # -- several sequences in one decode -----------------------------------------------------------

    def share(self, sequences: int) -> None:
        if self._shared is not None and sequences != self._sequences:
            self._sequences = sequences
            self._costs = self._shared(sequences)
            self._prospects.forget()

    def outlook(self) -> Outlook:
        rows, rate = self._rows, self._rate
        tokens = [1.0] * len(rows)
        for chain in self._all:
            expected = chain.expected(len(rows) - 1)
            expected += [expected[-1]] * (len(rows) - len(expected))
            tokens = list(map(max, tokens, expected))
        return Outlook(tokens, [rate * ms for ms in rows])

    def widened(self, drafts: int) -> Proposal:
        value, chosen = 1.0, NOTHING
        if self._drafted is not None and self._drafted.proposal.drawn:
            chosen = self._drafted.proposal.first(0)
        for chain in self._all if drafts else ():
            expected = chain.expected(drafts)[-1]
            if expected > value:
                value, chosen = expected, chain.proposal.first(drafts)
        return chosen

    # -- arithmetic ------------------------------------------------------------------------------

    def _undrafted(self) -> float:
        """What a step without drafts is worth."""
        change = self._change if self._last != self._extra else 0.0
        return 1.0 - self._rate * (self._rows[0] + change)

    def _best(self, chain: Offer) -> tuple[int, float]:
        """(drafts, value) of the best part of a chain, as far as its loss can be afforded."""
        rows, rate = self._rows, self._rate
        owed, save, lost = self._owed, self._save, 0.0
        allowed = self._credit * self._plain + rows[0] - save
        if self._width:
            allowed -= self._draft_ms
        before, tokens, best, value = 1.0, 1.0, 0, self._undrafted()
        same, change = self._last - self._extra, rate * self._change
        for count, reached in enumerate(chain.reaches(), 1):
            lost += (before - reached) * owed[count]
            before = reached
            if reached < LEAST_REACH or rows[count] + owed[count] > allowed:
                break
            tokens += reached
            worth = tokens - rate * (rows[count] + save + lost)
            if count != same:
                worth -= change
            if worth > value:
                best, value = count, worth
        return best, value

    def _prices(self) -> Prices:
        """As long as it goes on: a draft right after plain steps costs more, once."""
        rate, save, owed = self._rate, self._save, self._owed
        return Prices(
            [rate * (ms + save) for ms in self._rows[: self._block]],
            [rate * ms for ms in self._costs.drafts()],
            [rate * ms for ms in owed] if owed is not self._nothing else owed,
        )

    def _probe(self, loss: float, gain: float) -> bool:
        """Whether to ask although that is expected to lose `loss` tokens: texts change.

        `gain` is what each step would gain where the text has changed. Asking every n steps
        loses loss / n a step, and what is noticed n / 2 steps late CHANGES * gain * n / 2; the
        sum is least at this n.
        """
        self._since += 1
        if self._since < PROBE_FIRST or gain <= 0.0:
            return False
        # A draft after plain steps may turn out to be the cheaper one.
        wait = sqrt(2.0 * max(0.0, loss) / (CHANGES * gain))
        if self._since < min(wait, PROBE_LAST):
            return False
        self._network.relax(self._since)
        self._since = 0
        self._probing = True
        return True

    def _probed(self, drafted: Offer, confirmed: Sequence[int]) -> None:
        """Drafts that nobody else had are followed up at once: it may be another text."""
        right = common_prefix(drafted.proposal.tokens, confirmed)
        free = (common_prefix(chain.proposal.tokens, confirmed) for chain in self._free)
        if right > max(free, default=0):
            self._since = PROBE_LAST
            self._network.relax(PROBE_FIRST)
            self._prospects.forget()

    def _gain(self, confirmed: Sequence[int], cost: float) -> float:
        """Tokens that the drafter brought a step beyond the best of what was there without it."""
        other, other_cost = 1.0, self._rows[0]
        if self._instead is not None:
            chain, count = self._instead
            drafts = chain.proposal.tokens[:count]
            other, right = would_have(drafts, chain.slots, confirmed, chain.source)
            other_cost = self._rows[count] + self._save + (0.0 if right else self._restore)
        return len(confirmed) - other - self._rate * (cost - other_cost)

    def _leads(self, request: Ask, waiting: int, judgement: Judgement) -> bool:
        """Chooses the lookup that a draft should follow as well, and says whether that alone is
        worth a draft: more than one that follows none, as `judgement` has it.
        """
        if self._instead is None:
            return False
        offer, given = self._instead
        most = min(self._block - 1, request.limit) - given
        if most < 1:
            return False
        reached = next(islice(offer.reaches(), given - 1, None))
        own, promised = self._onward.judge(reached, given, most, self._prices())
        width = judgement.width
        if width > given + 1 or own:
            self._lead = self._instead
        if promised - self._behind <= max(judgement.value, 0.0):
            return False
        own = max(own, width)
        draft_ms = self._costs.draft(own, waiting, warm=self._warm)
        if not self._affords(draft_ms, given + 1):
            return False
        self._width, self._draft_ms = own, draft_ms
        return True
