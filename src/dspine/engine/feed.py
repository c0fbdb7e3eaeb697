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
        """Position of the first row that waits, or of the next one expected."""
        self.waiting = 0
        """Rows that are not handed over yet."""

    @property
    def held(self) -> tuple[int, int]:
        """[first, end) of the positions whose features are there, waiting or handed over."""
        first, end = self._drafter.first_held(self._seq), self._drafter.covered(self._seq)
        if not self.waiting:
            return first, end
        if first == end or self._first > end:
            first = self._first
        return first, self._first + self.waiting

    def take(self, position: int, row: int, count: int) -> None:
        """Keep rows `row` ... `row + count - 1` of the last decode; they sit at `position` ... ."""
        rows, waiting = self._rows, self.waiting
        if rows is None or position != self._first + waiting or waiting + count > MAX_PENDING:
            self._begin(position, row, count)
        else:
            self._target.copy_features(row, count, rows, waiting)
            self.waiting = waiting + count

    def _begin(self, position: int, row: int, count: int) -> None:
        """The same where those that wait, if any, are not to be continued."""
        if position != self._first + self.waiting:
            self.waiting = 0  # no block sees what lies before a gap
        self.flush(position)
        features = self._target.features(row, count)
        if self._rows is None:
            self._rows = RowBuffer(MAX_PENDING, features.shape[1])
            # Else the first steps would wait for the system to find memory, page by page.
            self._rows.rows.fill(0.0)
        if len(features) > MAX_PENDING:
            self._add(position, features)
            return
        self._rows.rows[: len(features)] = features
        self._first, self.waiting = position, len(features)

    def flush(self, anchor_position: int) -> None:
        """Hand over what a block anchored at `anchor_position` or later can see."""
        if not self.waiting or self._rows is None:
            return
        skip = max(0, self._drafter.first_visible(anchor_position) - self._first)
        if skip < self.waiting:
            self._add(self._first + skip, self._rows.rows[skip : self.waiting])
        self._first, self.waiting = self._first + self.waiting, 0

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on, waiting or handed over."""
        self._first = min(self._first, length)
        self.waiting = min(self.waiting, length - self._first)
        self._drafter.truncate(self._seq, length)

    def _add(self, position: int, rows: Features) -> None:
        self._drafter.add_context(self._seq, position, rows)
