"""Times target and drafter on this machine for n = 1 ... B rows, and keeps the result."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from dspine.drafters.base import Drafter
from dspine.engine.costs import CostTable, interpolate
from dspine.engine.target import Target

Case = TypeVar("Case", bound=Hashable)

FORMAT = 2
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Row counts that are timed; between them the cost is taken as linear."""

DEPTH = 128
"""Context tokens before the timed rows; decoding them is a good part of a measurement."""

REPEATS = 5
ROWS_BUDGET_MS = 1500.0
DRAFTS_BUDGET_MS = 500.0
"""Time after which nothing is timed again."""

FIRST_TURN = 4
"""Budgets after which what was not timed yet is taken from its neighbours."""

NOISY = 1.6
"""Typical over best time from which a measurement is used but not kept."""

STEADY = 1.15
"""The same for the times that were repeated, where the budget allowed that for some only."""


@dataclass(frozen=True, slots=True)
class RowTiming:
    """Best milliseconds by attention setting and row count, and how far typical ones were above."""

    ms: dict[bool, dict[int, float]]
    noise: float = 1.0


@dataclass(frozen=True, slots=True)
class DraftTiming:
    """Best milliseconds by block width, and how far typical ones were above."""

    ms: dict[int, float]
    noise: float = 1.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """`rows_ms[flash_attention][n]`: a target decode of n rows; `draft_ms[w]`: a draft of width w.

    `draft_ms` is empty without a drafter.
    """

    rows_ms: dict[bool, dict[int, float]]
    draft_ms: dict[int, float]
    noise: float = 1.0

    @property
    def is_noisy(self) -> bool:
        """Good enough for now, not for later starts."""
        return self.noise >= NOISY

    def costs(self, flash_attention: bool) -> CostTable:
        """What a step's parts cost with that attention setting."""
        return CostTable(self.rows_ms[flash_attention], self.draft_ms, DEPTH)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "rows_ms": {
                "on" if flash else "off": {str(n): ms for n, ms in table.items()}
                for flash, table in self.rows_ms.items()
            },
            "draft_ms": {str(width): ms for width, ms in self.draft_ms.items()},
            "noise": self.noise,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_json`; ValueError, KeyError or TypeError for anything else."""
        rows = {
            {"on": True, "off": False}[flash]: _table(table)
            for flash, table in document["rows_ms"].items()
        }
        if not rows or any(1 not in table for table in rows.values()):
            raise ValueError("no cost of one row")
        return cls(rows, _table(document["draft_ms"]), float(document["noise"]))


def time_rows(
    targets: Mapping[bool, Target],
    tokens: Sequence[int],
    counts: Sequence[int],
    *,
    depth: int = DEPTH,
    repeats: int = REPEATS,
    budget_ms: float = ROWS_BUDGET_MS,
) -> RowTiming:
    """Best time of decoding n rows after `depth` of `tokens`, arg-max of every row included.

    `targets` are contexts of one model by flash attention setting. Settings and counts (at least
    two) take turns, so that a disturbance does not fall on one of them. The memories are empty
    afterwards. `tokens` has at least depth + max(counts) entries.
    """
    for target in targets.values():
        target.clear()
        for start in range(0, depth, target.n_batch):
            chunk = tokens[start : min(start + target.n_batch, depth)]
            target.decode(chunk, start, "none")
        target.checkpoint()

    def once(case: tuple[int, bool]) -> float:
        count, flash = case
        target = targets[flash]
        started = perf_counter()
        target.decode(tokens[depth : depth + count], depth, "all")
        for row in range(count):
            target.argmax(row)
        spent = (perf_counter() - started) * 1000.0
        target.restore()
        return spent

    cases = [(count, flash) for count in _in_turn(counts) for flash in sorted(targets)]
    times = _take_turns(once, cases, len(targets), repeats, budget_ms)
    for target in targets.values():
        target.clear()
    best = {
        flash: _complete({n: min(times[n, on]) for n, on in times if on is flash}, counts)
        for flash in sorted(targets)
    }
    return RowTiming(best, spread(times, len(cases)))


def time_drafter(
    drafter: Drafter,
    feature_size: int,
    widths: Sequence[int],
    *,
    depth: int = DEPTH,
    repeats: int = REPEATS,
    budget_ms: float = DRAFTS_BUDGET_MS,
    seq: int = 0,
) -> DraftTiming:
    """Best time of a draft of each width after `depth` positions, plus the context of its rows.

    A step hands over as many feature rows as it confirmed; two are taken as typical.
    """
    rows = np.random.default_rng(0).standard_normal((depth, feature_size), np.float32)
    drafter.truncate(seq, 0)
    drafter.add_context(seq, 0, rows[: depth - 2])

    def once(width: int) -> float:
        started = perf_counter()
        drafter.add_context(seq, depth - 2, rows[depth - 2 :])
        drafter.draft(seq, 0, width)
        spent = (perf_counter() - started) * 1000.0
        drafter.truncate(seq, depth - 2)
        return spent

    for width in widths:
        once(width)  # builds its graph
    times = _take_turns(once, _in_turn(widths), 1, repeats, budget_ms)
    drafter.truncate(seq, 0)
    best = _complete({width: min(values) for width, values in times.items()}, widths)
    return DraftTiming(best, spread(times, len(widths)))


def cached(
    key: Mapping[str, Any],
    folder: Path,
    measure: Callable[[], Calibration],
    *,
    anew: bool = False,
) -> tuple[Calibration, bool]:
    """The calibration kept under `key`, else a new one; (calibration, whether it was kept).

    `anew` measures in any case and replaces what is kept. A damaged file counts as none. A
    folder that cannot be written costs the next start a measurement, nothing else. Noisy
    measurements and empty ones are not kept.
    """
    text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
    file = folder / "calibration" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["key"] == text and not anew:
            return Calibration.from_json(document), True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # nothing usable is there: measure
    calibration = measure()
    if calibration.rows_ms and not calibration.is_noisy:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8"
            ) as out:
                json.dump({"key": text, **calibration.to_json()}, out)
            Path(out.name).replace(file)
    return calibration, False


def file_identity(path: Path) -> list[str | int]:
    """Name, size and time of a file: what a cached measurement is tied to."""
    facts = path.stat()
    return [path.name, facts.st_size, facts.st_mtime_ns]


def row_counts(most: int) -> tuple[int, ...]:
    """The counts to time for blocks of up to `most` rows, the largest one included."""
    return tuple(sorted({*(count for count in ROWS if count < most), most}))


def never_cheaper(table: Mapping[int, float]) -> dict[int, float]:
    """More rows never cost less: measured dips are noise, the lower time of the wider one holds."""
    smooth: dict[int, float] = {}
    best = math.inf
    for count in sorted(table, reverse=True):
        best = min(best, table[count])
        smooth[count] = best
    return dict(sorted(smooth.items()))


def spread(times: Mapping[Any, Sequence[float]], cases: int) -> float:
    """How far typical times lie above the best of their kind; at least NOISY when in doubt.

    Where the budget ended before all of the `cases` were repeated, as with a large target or on
    a busy machine, what was repeated must agree closely.
    """
    ratios = [statistics.median_high(v) / min(v) for v in times.values() if len(v) > 1]
    if not ratios:
        return NOISY
    typical = statistics.median(ratios)
    hurried = len(ratios) < cases and max(ratios) > STEADY
    return max(typical, NOISY) if hurried else typical


def _take_turns(
    once: Callable[[Case], float],
    cases: Sequence[Case],
    settings: int,
    repeats: int,
    budget_ms: float,
) -> dict[Case, list[float]]:
    """Times of the cases in turn, `repeats` times over or until the budget is spent.

    `cases` begin with the smallest and the largest count in each of `settings`. Those are always
    timed and the smallest twice; the first turn of the others ends at FIRST_TURN budgets.
    """
    smallest, first = list(cases[:settings]), list(cases[: 2 * settings])
    turns = [*first, *smallest, *cases[2 * settings :], *list(cases) * (repeats - 1)]
    times: dict[Case, list[float]] = {}
    started = perf_counter()
    for turn, case in enumerate(turns):
        spent = (perf_counter() - started) * 1000.0
        limit = budget_ms if len(times) == len(cases) else FIRST_TURN * budget_ms
        if turn >= len(first) + settings and spent > limit:
            break
        times.setdefault(case, []).append(once(case))
    return times


def _in_turn(counts: Sequence[int]) -> list[int]:
    """The smallest, the largest, then those between which a line says least about the cost."""
    small, *middle, large = sorted({*counts})
    return [small, large, *sorted(middle, key=lambda n: (n & (n - 1) != 0, abs(n - 4)))]


def _complete(times: Mapping[int, float], counts: Sequence[int]) -> dict[int, float]:
    """Every count: what there was no time for lies on the line between its neighbours."""
    return never_cheaper({count: interpolate(times, count) for count in counts})


def _table(document: Mapping[str, Any]) -> dict[int, float]:
    table = {int(count): float(ms) for count, ms in document.items()}
    if any(count < 1 or not (math.isfinite(ms) and ms > 0) for count, ms in table.items()):
        raise ValueError("a time that is no time")
    return table
