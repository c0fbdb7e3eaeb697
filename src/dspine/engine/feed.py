"""Brings the target's features to the drafter: late, in bulk, and only what it can ever see."""

from __future__ import annotations

from dspine.drafters.base import Drafter, Features
from dspine.engine.target import Target
from dspine.llama.taps import RowBuffer

MAX_PENDING = 256
"""Rows kept back before they are handed over although no draft was asked for."""


class FeatureFeed:
    """Feature rows of confirmed positions wait here until the drafter is next asked.

    Saves one drafter graph per step while another proposer does the work.
    """

    def __init__(self, target: Target, drafter: Drafter, seq: int) -> None:
        self._target, self._drafter, self._seq = target, drafter, seq
        self._rows: RowBuffer | None = None
        self._first = 0
        self._count = 0

    @property
    def held(self) -> tuple[int, int]:
        """[first, end) of the positions whose features are there, waiting or handed over."""
        first, end = self._drafter.first_held(self._seq), self._drafter.covered(self._seq)
        if not self._count:
            return first, end
        if first == end or self._first > end:
            first = self._first
        return first, self._first + self._count

    @property
    def waiting(self) -> int:
        """Rows that are not handed over yet."""
        return self._count

    def take(self, position: int, row: int, count: int) -> None:
        """Keep rows `row` ... `row + count - 1` of the last decode; they sit at `position` ... ."""
        if position != self._first + self._count:
            self._count = 0  # no block sees what lies before a gap
        if self._count + count > MAX_PENDING:
            self.flush(position)
        if count > MAX_PENDING or self._rows is None:
            self._begin(position, self._target.features(row, count))
            return
        if not self._count:
            self._first = position
        self._target.copy_features(row, count, self._rows, self._count)
        self._count += count

    def _begin(self, position: int, features: Features) -> None:
        """The first rows of all, or more of them than can wait."""
        if self._rows is None:
            self._rows = RowBuffer(MAX_PENDING, features.shape[1])
            # Else the first steps would wait for the system to find memory, page by page.
            self._rows.rows.fill(0.0)
        if len(features) > MAX_PENDING:
            self._add(position, features)
            return
        self._rows.rows[: len(features)] = features
        self._first, self._count = position, len(features)

    def flush(self, anchor_position: int) -> None:
        """Hand over what a block anchored at `anchor_position` or later can see."""
        if not self._count or self._rows is None:
            return
        skip = max(0, self._drafter.first_visible(anchor_position) - self._first)
        if skip < self._count:
            self._add(self._first + skip, self._rows.rows[skip : self._count])
        self._count = 0

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on, waiting or handed over."""
        self._count = max(0, min(self._count, length - self._first))
        self._drafter.truncate(self._seq, length)

    def _add(self, position: int, rows: Features) -> None:
        self._drafter.add_context(self._seq, position, rows)
