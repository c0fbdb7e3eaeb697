"""What a step costs here and now: measured times at two depths, corrected by the steps' own."""

from __future__ import annotations

from bisect import bisect_left
from math import exp, log

from dspine.measured import CostTable as CostTable
from dspine.measured import interpolate as interpolate

GROUPS = (1, 2, 4, 8, 16)
"""Row counts up to these share a correction: a disturbance does not hit all of them alike."""

PACE = 1.0 / 16.0
"""Share of a new time in the correction."""

FIRST = 2
"""Drafts that their measured time counts for, against the first ones of an engine."""

MOST_AT_ONCE = 0.4
"""Logarithm by which one time moves the correction at most, before PACE: stalls are rare."""

EVERY = 16
"""Times of decodes that change the costs together: at each step that would be work for little."""

NEAR = 16
"""Positions that share a cost, a power of two."""

MOST = log(4.0)
"""Times further off than this factor are taken as that far off."""

EACH = 0.35
"""Share of a draft's time that each of several sequences costs when they draft together; what is
left is paid once. A first guess, corrected by the times of the running steps."""


class StepCosts:
    """Costs at the current depth, as far as the running steps confirm them.

    With several sequences in one decode a row count stands for the rows of one sequence, and the
    cost for its share of the decode, or of the drafts that are made together.
    """

    def __init__(self, table: CostTable, most_rows: int, *, sequences: int = 1) -> None:
        counts = [count * sequences for count in range(1, most_rows + 1)]
        slopes = table.slope_ms or {}
        base = [interpolate(table.rows_ms, count) / sequences for count in counts]
        slope = [(interpolate(slopes, count) if slopes else 0.0) / sequences for count in counts]
        groups = [bisect_left(GROUPS, count) for count in range(1, most_rows + 1)]
        self._table = list(zip(base, slope, groups, strict=True))
        share = EACH + (1.0 - EACH) / sequences
        self._drafts = [
            share * interpolate(table.draft_ms, width) if table.draft_ms and width > 1 else 0.0
            for width in range(most_rows + 1)
        ]
        self.change_ms = table.change_ms / sequences
        """Milliseconds that a decode costs more where the one before had other rows."""
        self._depth = table.depth
        self._context = table.context_ms
        self._verify_shift = 0.0
        self._group_shift = [0.0] * (len(GROUPS) + 1)
        self._factors = [1.0] * (len(GROUPS) + 1)
        self._told = self._factors
        """Those in the costs that were told last: several sequences ask before any observes."""
        self._observed: list[tuple[float, int, float, list[float]]] = []
        """Times of decodes since they last changed the costs, and the factors they are against."""
        self._rows: list[float] = []
        self._rows_at = -1
        self._draft_shift = self._cold_shift = 0.0
        self._warm_drafts = self._cold_drafts = 0
        self._draft_factor = self._cold_factor = 1.0
        self._usual = list(self._drafts)

    def rows(self, position: int) -> list[float]:
        """Milliseconds of decoding 1, 2, ... rows with an anchor at `position`."""
        place = position // NEAR
        if place == self._rows_at:
            return self._rows
        beyond, factors = place * NEAR - self._depth, self._factors
        # A short context never makes a decode cheaper than half of what was measured.
        rows = [
            max(base + slope * beyond, 0.5 * base) * factors[group]
            for base, slope, group in self._table
        ]
        self._rows, self._rows_at, self._told = rows, place, factors
        return rows

    def drafts(self) -> list[float]:
        """Milliseconds of drafting blocks of width 0, 1, 2, ... at every step.

        A draft was measured with two feature rows; widths under 2 stand for no draft.
        """
        return self._usual

    def draft(self, width: int, waiting: int, *, warm: bool) -> float:
        """The same for one block with `waiting` feature rows, `warm` if the step before had one."""
        ms = self._drafts[width] + self._context * max(0, waiting - 2)
        return ms * self._draft_factor * (1.0 if warm else self._cold_factor)

    def observe_rows(self, expected: float, count: int, ms: float) -> None:
        """A decode of `count` rows took `ms` where `rows` had said `expected`."""
        self._observed.append((expected, count, ms, self._told))
        if len(self._observed) < EVERY:
            return
        for expected, count, ms, told in self._observed:
            group = bisect_left(GROUPS, count)
            # What the times before have corrected meanwhile is not to be corrected once more.
            known = exp(self._verify_shift + self._group_shift[group]) / told[group]
            error = _error(expected * known, ms)
            self._verify_shift = _clamp(self._verify_shift + PACE * error, MOST)
            own = self._group_shift[group] + 0.5 * PACE * error
            self._group_shift[group] = _clamp(own, 0.5 * MOST)
        self._observed.clear()
        self._factors = [exp(self._verify_shift + shift) for shift in self._group_shift]
        self._rows_at = -1

    def observe_draft(self, expected: float, ms: float, *, warm: bool) -> None:
        """A draft took `ms` where `draft` had said `expected`."""
        error = _error(expected, ms)
        if warm:
            self._warm_drafts += 1
            share = max(PACE, 1.0 / (self._warm_drafts + FIRST))
            self._draft_shift = _clamp(self._draft_shift + share * error, MOST)
            self._draft_factor = factor = exp(self._draft_shift)
            self._usual = [ms * factor for ms in self._drafts]
        else:
            self._cold_drafts += 1
            share = max(PACE, 1.0 / (self._cold_drafts + FIRST))
            self._cold_shift = _clamp(self._cold_shift + share * error, MOST)
            self._cold_factor = exp(self._cold_shift)


def _error(expected: float, ms: float) -> float:
    if expected <= 0.0 or ms <= 0.0:
        return 0.0
    return min(max(log(ms / expected), -MOST_AT_ONCE), MOST_AT_ONCE)


def _clamp(shift: float, most: float) -> float:
    return min(max(shift, -most), most)
