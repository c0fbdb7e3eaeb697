"""What was measured of a machine and a pair, and the arithmetic on it; read by engine and plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

FORMAT = 4
"""Of what is kept of a measurement; part of its key."""

DEPTH = 64
"""Context tokens before the timed rows; decoding them is a good part of a measurement."""

FURTHER = 128
"""Least tokens between two depths that tell what a longer context costs."""

NOISY = 1.6
"""Typical over best time from which a measurement is used but not kept."""


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


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured milliseconds. `rows_ms[n]` and `draft_ms[width]` were taken at `depth`.

    `slope_ms[n]` is what a decode of n rows costs more for each token of context beyond that.
    `context_ms` is what the drafter needs for a feature row that waited. Without a drafter
    `draft_ms` is empty. `change_ms` is what a decode with another number of rows than the one
    before costs more.
    """

    rows_ms: Mapping[int, float]
    draft_ms: Mapping[int, float]
    depth: int = 0
    slope_ms: Mapping[int, float] | None = None
    context_ms: float = 0.0
    change_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """`rows_ms[flash_attention][n]`: a target decode of n rows; `draft_ms[w]`: a draft of width w.

    `draft_ms` is empty without a drafter. Both were taken at `depth`, and some counts again at
    `deep` (`deep_ms`: with the settings that are of use, empty where the target is too slow for
    that). `context_ms` is what the drafter needs for a feature row that waited. All with
    `n_threads`, 0 for as many as asked for. Measuring took `seconds`, 0 where nobody knows.
    `change_ms` is what a decode with another number of rows than the one before costs more.
    """

    rows_ms: dict[bool, dict[int, float]]
    draft_ms: dict[int, float]
    noise: float = 1.0
    depth: int = DEPTH
    deep: int = 0
    deep_ms: dict[bool, dict[int, float]] = field(default_factory=dict)
    context_ms: float = 0.0
    n_threads: int = 0
    seconds: float = 0.0
    change_ms: float = 0.0

    @property
    def is_noisy(self) -> bool:
        """Good enough for now, not for later starts."""
        return self.noise >= NOISY

    def costs(self, flash_attention: bool) -> CostTable:
        """What a step's parts cost with that attention setting."""
        rows = self.rows_ms[flash_attention]
        # A setting that is of no use was not timed there: it grows like the other one.
        timed = flash_attention if flash_attention in self.deep_ms else not flash_attention
        slopes = {}
        for count, ms in self.deep_ms.get(timed, {}).items():
            near = interpolate(self.rows_ms[timed], count)
            # At most in proportion to the context: what is beyond that was a disturbance.
            further = min(max(ms, near), near * self.deep / self.depth)
            slopes[count] = (further - near) / (self.deep - self.depth)
        return CostTable(
            rows, self.draft_ms, self.depth, slopes or None, self.context_ms, self.change_ms
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "rows_ms": _by_flash(self.rows_ms),
            "draft_ms": {str(width): ms for width, ms in self.draft_ms.items()},
            "noise": self.noise,
            "depth": self.depth,
            "deep": self.deep,
            "deep_ms": _by_flash(self.deep_ms),
            "context_ms": self.context_ms,
            "n_threads": self.n_threads,
            "seconds": self.seconds,
            "change_ms": self.change_ms,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_json`; ValueError, KeyError or TypeError for anything else."""
        rows, deep_ms = _tables(document["rows_ms"]), _tables(document["deep_ms"])
        depth, deep = int(document["depth"]), int(document["deep"])
        context_ms, n_threads = float(document["context_ms"]), int(document["n_threads"])
        if not rows or any(1 not in table for table in rows.values()):
            raise ValueError("no cost of one row")
        change_ms = float(document.get("change_ms", 0.0))
        if (
            not (context_ms >= 0.0 and 0.0 <= change_ms < math.inf)
            or n_threads < 0
            or (deep_ms and not 0 < depth < deep)
        ):
            raise ValueError("depths or times that cannot be")
        return cls(
            rows,
            _table(document["draft_ms"]),
            float(document["noise"]),
            depth,
            deep,
            deep_ms,
            context_ms,
            n_threads,
            float(document.get("seconds", 0.0)),
            change_ms,
        )


def _by_flash(tables: Mapping[bool, Mapping[int, float]]) -> dict[str, dict[str, float]]:
    return {
        "on" if flash else "off": {str(n): ms for n, ms in table.items()}
        for flash, table in tables.items()
    }


def _tables(document: Mapping[str, Any]) -> dict[bool, dict[int, float]]:
    return {{"on": True, "off": False}[flash]: _table(table) for flash, table in document.items()}


def _table(document: Mapping[str, Any]) -> dict[int, float]:
    table = {int(count): float(ms) for count, ms in document.items()}
    if any(count < 1 or not (math.isfinite(ms) and ms > 0) for count, ms in table.items()):
        raise ValueError("a time that is no time")
    return table
