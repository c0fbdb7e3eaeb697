"""How many rows to verify: arithmetic on measured costs and acceptance, and the policy seam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dspine.engine.costs import StepCosts, interpolate
from dspine.engine.proposal import DRAFTER, GRAMMAR, NGRAM, NOTHING, Ask, Proposal
from dspine.engine.waiting import Copies, StoringRule, owed_ms
from dspine.measured import expected_tokens as expected_tokens

PAYS_FROM = 1.02
"""Expected speed-up below which drafting is not worth its noise."""


@dataclass(frozen=True, slots=True)
class WidthChoice:
    """The best fixed width of one proposer. Width 1 means: decode plainly."""

    width: int
    expected_tokens: float
    """Tokens per verify, bonus included."""
    step_ms: float
    tokens_per_second: float
    speedup: float
    """Against plain decoding on the same machine."""


def best_width(
    cost_ms: Mapping[int, float],
    draft_ms: Mapping[int, float],
    curve: Sequence[float],
    max_width: int,
    copies: Copies | None = None,
) -> WidthChoice:
    """The width of most expected tokens per second; the narrower one on a tie.

    `cost_ms[n]` is the target's time for n rows, `draft_ms[w]` the drafter's for a block of
    width w (empty: drafting is free). `copies` is what taking drafts back costs, None where they
    are cut off for nothing. Gains under PAYS_FROM count as none.
    """
    nearest = nearest_width(cost_ms, draft_ms, curve, max_width, copies)
    if nearest is not None and nearest.speedup >= PAYS_FROM:
        return nearest
    plain_ms = interpolate(cost_ms, 1)
    return WidthChoice(1, 1.0, plain_ms, 1000.0 / plain_ms, 1.0)


def nearest_width(
    cost_ms: Mapping[int, float],
    draft_ms: Mapping[int, float],
    curve: Sequence[float],
    max_width: int,
    copies: Copies | None = None,
) -> WidthChoice | None:
    """The best width with drafts, also where it does not pay; None where there can be none."""
    plain_ms = interpolate(cost_ms, 1)
    best: WidthChoice | None = None
    for width in range(2, max_width + 1):
        tokens = expected_tokens(curve, width)
        step_ms = interpolate(cost_ms, width) + interpolate(draft_ms, width)
        if copies is not None:
            step_ms += copying_ms(cost_ms, curve, width, copies, tokens * plain_ms / step_ms)
        speed = tokens / step_ms * 1000.0
        if best is None or speed > best.tokens_per_second:
            best = WidthChoice(width, tokens, step_ms, speed, speed * plain_ms / 1000.0)
    return best


def copying_ms(
    cost_ms: Mapping[int, float],
    curve: Sequence[float],
    width: int,
    copies: Copies,
    speedup: float,
) -> float:
    """What taking drafts back costs a step of `width` rows on average, with a saved state: the
    copy before it, and after a rejection the copy back and the rows that are decoded again.
    """
    rows = [interpolate(cost_ms, count) for count in range(1, width + 1)]
    owed = owed_ms(rows, 0, width - 1, max(1.0, speedup), copies)
    reached, lost = 1.0, 0.0
    for slot in range(1, width):
        chance = curve[min(slot, len(curve)) - 1] if curve else 0.0
        lost += reached * (1.0 - chance) * owed[slot]
        reached *= chance
    return copies.save_ms + lost


@dataclass(frozen=True, slots=True)
class WidthPlan:
    """What the measurements say: attention setting, and how wide each proposer should go."""

    flash_attention: bool
    cost_ms: dict[int, float]
    """Target cost of n rows with that setting."""
    ngram: WidthChoice
    drafter: WidthChoice | None
    """None without a drafter."""
    nearest: WidthChoice | None = None
    """The drafter's best width even if it does not pay."""


def plan_widths(
    rows_ms: Mapping[bool, Mapping[int, float]],
    draft_ms: Mapping[int, float],
    drafter_curve: Sequence[float],
    ngram_curve: Sequence[float],
    max_width: int,
    block_size: int,
    copies: Copies | None = None,
) -> WidthPlan:
    """Choose flash attention and widths together: the setting with the fastest best case.

    `rows_ms[flash_attention][n]` as measured; off wins a tie. `draft_ms` is empty without a
    drafter, whose blocks go up to `block_size`; n-gram proposals up to `max_width`. `copies` as
    for `best_width`.
    """
    plans = []
    for flash in sorted(rows_ms):
        costs = dict(rows_ms[flash])
        ngram = best_width(costs, {}, ngram_curve, max_width, copies)
        drafter = nearest = None
        if draft_ms:
            drafter = best_width(costs, draft_ms, drafter_curve, block_size, copies)
            nearest = nearest_width(costs, draft_ms, drafter_curve, block_size, copies)
        plans.append(WidthPlan(flash, costs, ngram, drafter, nearest))

    def speed(plan: WidthPlan) -> float:
        choice = plan.drafter or plan.ngram
        return choice.tokens_per_second

    return max(plans, key=speed)


class Outcome(NamedTuple):
    """What became of a step: `drafts` were verified, `confirmed` is what it emitted.

    Times are milliseconds; a time of 0 is not known.
    """

    drafts: int
    confirmed: tuple[int, ...]
    draft_ms: float = 0.0
    verify_ms: float = 0.0


class Outlook(NamedTuple):
    """A step with 0, 1, 2, ... drafts: the tokens it is expected to give, and what the time of
    its rows is worth in tokens.
    """

    tokens: list[float]
    prices: list[float]


class WidthPolicy(Protocol):
    """Decides who proposes and how far, for one sequence, whose answers follow each other.

    A step is `ask`, then `choose`, then `observe`; one that can have no drafts only `passed`.
    Where several sequences share a decode, `outlook` and `widened` come after `choose`.
    """

    def begin(self, drafts: int | None = None) -> None:
        """A new request; `drafts` is what it wants at a step, None as usual."""

    def most(self, proposer: str) -> int:
        """Most drafts that this proposer may be asked for, ever."""

    def ask(self, free: Sequence[Proposal], request: Ask, waiting: int | None) -> int:
        """Drafts to ask of the drafter, 0 for none, given proposals that cost nothing.

        `waiting` feature rows are still to be handed to the drafter; None: it cannot draft now.
        """

    def lead(self) -> Proposal:
        """After `ask`, a lookup's first drafts that the draft should follow too; else NOTHING."""

    def choose(self, drafted: Proposal, led: Proposal = NOTHING) -> Proposal:
        """What to verify: part of what `ask` saw, or of `drafted` (NOTHING if it did not ask), or
        of `led`, which is the lead and what the drafter says after it.
        """

    def observe(self, outcome: Outcome) -> None:
        """How the step ended."""

    def passed(self, confirmed: Sequence[int]) -> None:
        """A step for which there was no ask confirmed these tokens."""

    def share(self, sequences: int) -> None:
        """So many sequences answer at once from now on, with the same rows each in a decode."""

    def outlook(self) -> Outlook | None:
        """After `choose`, what more or fewer drafts would give; None where it wants its number."""

    def widened(self, drafts: int) -> Proposal:
        """After `choose`, what to verify instead with that many drafts at most."""


PACE = 1.0 / 16.0
"""Share of a step in what a token costs lately."""

TRUSTED = 0.6
"""Score of a free first draft from which a policy without measurements prefers it."""


class FixedWidth:
    """The same number of drafts at every step, one number per proposer.

    With `costs`, steps that should store waiting rows have no drafts (`StoringRule`).
    """

    def __init__(
        self,
        drafts: Mapping[str, int],
        costs: StepCosts | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        """A request may want other numbers up to `limits`, without them no more than `drafts`."""
        self._usual = self._drafts = dict(drafts)
        self._limits = dict(limits or drafts)
        self._found = self._forced = self._chosen = NOTHING
        self._costs = costs
        self._rule = StoringRule()
        self._is_due = False
        self._rows: list[float] = []
        self._plain = 1.0
        self._pace = 1.0
        """Time of a token lately, as a share of a plain one's."""

    def begin(self, drafts: int | None = None) -> None:
        self._drafts = self._usual
        if drafts is not None:
            self._drafts = {name: min(drafts, most) for name, most in self._limits.items()}

    def most(self, proposer: str) -> int:
        if proposer == GRAMMAR:
            return max(self._drafts.values(), default=0)
        return self._drafts.get(proposer, 0)

    def ask(self, free: Sequence[Proposal], request: Ask, waiting: int | None) -> int:
        """A free proposal with a good score is taken; else the drafter is asked.

        What a grammar forces corrects either of them.
        """
        self._found = self._forced = NOTHING
        for proposal in free:
            if proposal.proposer == GRAMMAR:
                self._forced = proposal
            elif not self._found.tokens or _first_score(proposal) > _first_score(self._found):
                self._found = proposal
        self._is_due = self._should_store(request, drafts=waiting is not None)
        if self._is_due or waiting is None or _first_score(self._found) >= TRUSTED:
            return 0
        return self.most(DRAFTER)

    def lead(self) -> Proposal:
        return NOTHING

    def choose(self, drafted: Proposal, led: Proposal = NOTHING) -> Proposal:  # noqa: ARG002 - see lead
        self._chosen = NOTHING
        if not self._is_due:
            chosen = drafted if drafted.tokens else self._found
            chosen = chosen.first(self.most(DRAFTER if drafted.tokens else NGRAM))
            self._chosen = _likelier(chosen, self._forced) if self._forced.tokens else chosen
        return self._chosen

    def share(self, sequences: int) -> None:
        """The numbers are the same."""

    def outlook(self) -> Outlook | None:
        return None

    def widened(self, drafts: int) -> Proposal:
        return self._chosen.first(drafts)

    def observe(self, outcome: Outcome) -> None:
        """It learns no chances, only what a token costs where rows may wait."""
        if self._rows:
            share = self._rows[outcome.drafts] / len(outcome.confirmed) / self._plain
            self._pace += PACE * (share - self._pace)

    def passed(self, confirmed: Sequence[int]) -> None:
        """Such a step has one price, whatever the width."""

    def _should_store(self, request: Ask, *, drafts: bool) -> bool:
        self._rows = []
        if self._costs is None or request.copies is None:
            return False
        rows = self._costs.rows(request.position)
        self._rows, self._plain = rows[request.extra :], rows[0]
        wanted = self.most(DRAFTER) if drafts else 0
        wanted = max(wanted, min(len(self._found.tokens), self.most(NGRAM)))
        width = 1 + min(wanted, request.limit)
        token_ms = min(1.0, self._pace) * self._plain
        return self._rule.due(rows, request.extra, width, token_ms)


def _likelier(one: Proposal, other: Proposal) -> Proposal:
    """The one that scores higher where they part, or that goes on where the other ends.

    Of what was drawn the tokens must not matter, so the first scores alone decide.
    """
    place = 0
    if not one.drawn:
        pairs = zip(one.tokens, other.tokens, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
    if place < 0 or min(len(one.tokens), len(other.tokens)) <= place:
        return one if len(one.tokens) >= len(other.tokens) else other
    return one if one.scores[place] >= other.scores[place] else other


def _first_score(proposal: Proposal) -> float:
    return proposal.scores[0] if proposal.scores else 0.0
