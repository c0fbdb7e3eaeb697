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

MOST_AT_ONCE = 0.4
"""Logarithm by which one time moves the correction at most, before PACE: stalls are rare."""

MOST = log(4.0)
"""Times further off than this factor are taken as that far off."""


class StepCosts:
    """Costs at the current depth, as far as the running steps confirm them.

    With several sequences in one decode a row count stands for the rows of one sequence, and the
    cost for its share of the decode.
    """

    def __init__(self, table: CostTable, most_rows: int, *, sequences: int = 1) -> None:
        counts = [count * sequences for count in range(1, most_rows + 1)]
        slopes = table.slope_ms or {}
        base = [interpolate(table.rows_ms, count) / sequences for count in counts]
        slope = [(interpolate(slopes, count) if slopes else 0.0) / sequences for count in counts]
        groups = [bisect_left(GROUPS, count) for count in range(1, most_rows + 1)]
        self._table = list(zip(base, slope, groups, strict=True))
        self._drafts = [
            interpolate(table.draft_ms, width) if table.draft_ms and width > 1 else 0.0
            for width in range(most_rows + 1)
        ]
        self._depth = table.depth
        self._context = table.context_ms
        self._verify_shift = 0.0
        self._group_shift = [0.0] * (len(GROUPS) + 1)
        self._factors = [1.0] * (len(GROUPS) + 1)
        self._draft_shift = 0.0
        self._draft_factor = 1.0

    def rows(self, position: int) -> list[float]:
        """Milliseconds of decoding 1, 2, ... rows with an anchor at `position`."""
        beyond, factors = position - self._depth, self._factors
        if beyond >= 0:
            return [(base + slope * beyond) * factors[group] for base, slope, group in self._table]
        # A short context never makes a decode cheaper than half of what was measured.
        return [
            max(base + slope * beyond, 0.5 * base) * factors[group]
            for base, slope, group in self._table
        ]

    def drafts(self, waiting: int) -> list[float]:
        """Milliseconds of drafting blocks of width 0, 1, 2, ... with `waiting` feature rows.

        A draft was measured with two rows; widths under 2 stand for no draft.
        """
        factor = self._draft_factor
        extra = self._context * max(0, waiting - 2)
        return [(ms + extra) * factor if ms else 0.0 for ms in self._drafts]

    def observe_rows(self, expected: float, count: int, ms: float) -> None:
        """A decode of `count` rows took `ms` where `rows` had said `expected`."""
        error = _error(expected, ms)
        self._verify_shift = _clamp(self._verify_shift + PACE * error, MOST)
        group = bisect_left(GROUPS, count)
        own = self._group_shift[group] + 0.5 * PACE * error
        self._group_shift[group] = _clamp(own, 0.5 * MOST)
        self._factors = [exp(self._verify_shift + shift) for shift in self._group_shift]

    def observe_draft(self, expected: float, ms: float) -> None:
        """A draft took `ms` where `drafts` had said `expected`."""
        self._draft_shift = _clamp(self._draft_shift + PACE * _error(expected, ms), MOST)
        self._draft_factor = exp(self._draft_shift)


def _error(expected: float, ms: float) -> float:
    if expected <= 0.0 or ms <= 0.0:
        return 0.0
    return min(max(log(ms / expected), -MOST_AT_ONCE), MOST_AT_ONCE)


def _clamp(shift: float, most: float) -> float:
    return min(max(shift, -most), most)
