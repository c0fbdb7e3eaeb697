"""How many rows to verify: arithmetic on measured costs and acceptance, and the policy seam."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

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


def interpolate(table: Mapping[int, float], count: int) -> float:
    """Milliseconds for `count` rows between (or beyond) measured counts, linearly."""
    known = sorted(table)
    if not known:
        return 0.0
    if count in table:
        return table[count]
    if len(known) == 1:
        return table[known[0]] * count / known[0]
    if count < known[0]:
        return table[known[0]]
    for low, high in pairwise(known):
        if low < count < high:
            return table[low] + (table[high] - table[low]) * (count - low) / (high - low)
    low, high = known[-2], known[-1]
    slope = max(0.0, (table[high] - table[low]) / (high - low))
    return table[high] + slope * (count - high)


def expected_tokens(curve: Sequence[float], width: int) -> float:
    """Tokens per verify of `width` rows: 1 + a1 + a1 a2 + ... with the conditional curve.

    `curve[i]` is the chance that slot i + 1 is right if all before it are; beyond its end the
    last value holds. An empty curve means that nothing is ever accepted.
    """
    total, reached = 1.0, 1.0
    for slot in range(width - 1):
        reached *= curve[min(slot, len(curve) - 1)] if curve else 0.0
        total += reached
    return total


def best_width(
    cost_ms: Mapping[int, float],
    draft_ms: Mapping[int, float],
    curve: Sequence[float],
    max_width: int,
) -> WidthChoice:
    """The width of most expected tokens per second; the narrower one on a tie.

    `cost_ms[n]` is the target's time for n rows, `draft_ms[w]` the drafter's for a block of
    width w (empty: drafting is free). Gains under PAYS_FROM count as none.
    """
    plain_ms = interpolate(cost_ms, 1)
    plain = WidthChoice(1, 1.0, plain_ms, 1000.0 / plain_ms, 1.0)
    best = plain
    for width in range(2, max_width + 1):
        tokens = expected_tokens(curve, width)
        step_ms = interpolate(cost_ms, width) + interpolate(draft_ms, width)
        speed = tokens / step_ms * 1000.0
        if speed > best.tokens_per_second:
            best = WidthChoice(width, tokens, step_ms, speed, speed / plain.tokens_per_second)
    return best if best.speedup >= PAYS_FROM else plain


@dataclass(frozen=True, slots=True)
class WidthPlan:
    """What the measurements say: attention setting, and how wide each proposer should go."""

    flash_attention: bool
    cost_ms: dict[int, float]
    """Target cost of n rows with that setting."""
    ngram: WidthChoice
    drafter: WidthChoice | None
    """None without a drafter."""


def plan_widths(
    rows_ms: Mapping[bool, Mapping[int, float]],
    draft_ms: Mapping[int, float],
    drafter_curve: Sequence[float],
    ngram_curve: Sequence[float],
    max_width: int,
    block_size: int,
) -> WidthPlan:
    """Choose flash attention and widths together: the setting with the fastest best case.

    `rows_ms[flash_attention][n]` as measured; off wins a tie. `draft_ms` is empty without a
    drafter, whose blocks go up to `block_size`; n-gram proposals up to `max_width`.
    """
    plans = []
    for flash in sorted(rows_ms):
        costs = dict(rows_ms[flash])
        ngram = best_width(costs, {}, ngram_curve, max_width)
        drafter = None
        if draft_ms:
            drafter = best_width(costs, draft_ms, drafter_curve, block_size)
        plans.append(WidthPlan(flash, costs, ngram, drafter))

    def speed(plan: WidthPlan) -> float:
        choice = plan.drafter or plan.ngram
        return choice.tokens_per_second

    return max(plans, key=speed)


class WidthPolicy(Protocol):
    """Decides how far each proposer goes. One instance lives as long as the engine."""

    def drafts(self, proposer: str) -> int:
        """Most drafts to ask of this proposer now; 0 leaves it out."""

    def keep(self, proposer: str, scores: Sequence[float]) -> int:
        """How many drafts of a proposal with these scores to verify."""

    def worth(self, proposer: str, scores: Sequence[float]) -> float:
        """Expected tokens per millisecond of verifying the best part of such a proposal."""

    def prospect(self, proposer: str) -> float:
        """Expected tokens per millisecond of asking this proposer, before it drafts."""

    def observe(self, proposer: str, drafted: int, accepted: int) -> None:
        """What became of a proposal."""


class FixedWidth:
    """The same number of drafts at every step, one number per proposer; costs are unknown."""

    def __init__(self, drafts: Mapping[str, int]) -> None:
        self._drafts = dict(drafts)

    def drafts(self, proposer: str) -> int:
        return self._drafts.get(proposer, 0)

    def keep(self, proposer: str, scores: Sequence[float]) -> int:
        return min(len(scores), self.drafts(proposer))

    def worth(self, proposer: str, scores: Sequence[float]) -> float:
        """Any draft beats none."""
        return float(self.keep(proposer, scores) > 0)

    def prospect(self, proposer: str) -> float:
        """Nothing is known in advance."""
        return 0.0 if self.drafts(proposer) else -1.0

    def observe(self, proposer: str, drafted: int, accepted: int) -> None:
        """A fixed width learns nothing."""


class MeasuredWidth(FixedWidth):
    """Fixed widths on measured costs: a scored proposal is cut to what its scores earn.

    For the proposers in `scored` a score is the chance that a draft is right; what is kept is
    the prefix with the most expected tokens per millisecond. The others are verified in full.
    """

    def __init__(
        self,
        drafts: Mapping[str, int],
        cost_ms: Mapping[int, float],
        scored: frozenset[str],
        prospects: Mapping[str, float],
    ) -> None:
        super().__init__(drafts)
        most = max(drafts.values(), default=0) + 1
        self._cost = [interpolate(cost_ms, count) for count in range(1, most + 1)]
        self._scored = scored
        self._prospects = dict(prospects)

    def keep(self, proposer: str, scores: Sequence[float]) -> int:
        return self._best(proposer, scores)[0]

    def worth(self, proposer: str, scores: Sequence[float]) -> float:
        return self._best(proposer, scores)[1]

    def prospect(self, proposer: str) -> float:
        return self._prospects.get(proposer, 1.0 / self._cost[0])

    def _best(self, proposer: str, scores: Sequence[float]) -> tuple[int, float]:
        limit = super().keep(proposer, scores)
        plain = 1.0 / self._cost[0]
        if proposer not in self._scored:
            return limit, self.prospect(proposer) if limit else plain
        best, best_rate = 0, plain
        tokens, reached = 1.0, 1.0
        for slot in range(limit):
            reached *= scores[slot]
            tokens += reached
            rate = tokens / self._cost[slot + 1]
            if rate > best_rate:
                best, best_rate = slot + 1, rate
        return best, best_rate
