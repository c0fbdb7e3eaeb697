"""Times target and drafter on this machine for n = 1 ... B rows, and keeps the result."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from dspine.drafters.base import Drafter
from dspine.engine.target import Target

FORMAT = 1
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Row counts that are timed; between them the cost is taken as linear."""

DEPTH = 256
"""Context tokens before the timed rows."""

REPEATS = 5
BUDGET_MS = 1200.0
"""Time after which no further round is started (two are always done)."""

NOISY = 1.6
"""Typical over best time from which a measurement is used but not kept."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Best milliseconds per row count (or block width), and how far typical ones were above."""

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
    target: Target,
    tokens: Sequence[int],
    counts: Sequence[int],
    *,
    depth: int = DEPTH,
    repeats: int = REPEATS,
    budget_ms: float = BUDGET_MS,
) -> Timing:
    """Best time of decoding n rows after `depth` of `tokens`, arg-max of every row included.

    Counts take turns, so that a disturbance does not fall on one of them. The memory is empty
    afterwards. `tokens` has at least depth + max(counts) entries.
    """
    target.clear()
    for start in range(0, depth, target.n_batch):
        chunk = tokens[start : min(start + target.n_batch, depth)]
        target.decode(chunk, start, "none")
    target.checkpoint()

    def once(count: int) -> float:
        started = perf_counter()
        target.decode(tokens[depth : depth + count], depth, "all")
        for row in range(count):
            target.argmax(row)
        spent = (perf_counter() - started) * 1000.0
        target.restore()
        return spent

    timing = _rounds(once, counts, repeats, budget_ms)
    target.clear()
    return timing


def time_drafter(
    drafter: Drafter,
    feature_size: int,
    widths: Sequence[int],
    *,
    depth: int = DEPTH,
    repeats: int = REPEATS,
    budget_ms: float = BUDGET_MS,
    seq: int = 0,
) -> Timing:
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

    timing = _rounds(once, widths, repeats, budget_ms)
    drafter.truncate(seq, 0)
    return timing


def cached(
    key: Mapping[str, Any], folder: Path, measure: Callable[[], Calibration]
) -> tuple[Calibration, bool]:
    """The calibration kept under `key`, else a new one; (calibration, whether it was kept).

    A damaged file counts as none. A folder that cannot be written costs the next start a
    measurement, nothing else. Noisy measurements are not kept.
    """
    text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
    file = folder / "calibration" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["key"] == text:
            return Calibration.from_json(document), True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # nothing usable is there: measure
    calibration = measure()
    if calibration.noise < NOISY:
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


def _rounds(
    once: Callable[[int], float], counts: Sequence[int], repeats: int, budget_ms: float
) -> Timing:
    times: dict[int, list[float]] = {count: [] for count in counts}
    once(max(counts))  # makes buffers, wakes threads
    started = perf_counter()
    for turn in range(repeats):
        if turn >= 2 and (perf_counter() - started) * 1000.0 > budget_ms:
            break
        for count in counts:
            times[count].append(once(count))
    best = {count: min(values) for count, values in times.items()}
    noise = statistics.median(statistics.median(values) / min(values) for values in times.values())
    return Timing(never_cheaper(best), noise)


def _table(document: Mapping[str, Any]) -> dict[int, float]:
    table = {int(count): float(ms) for count, ms in document.items()}
    if any(count < 1 or not (math.isfinite(ms) and ms > 0) for count, ms in table.items()):
        raise ValueError("a time that is no time")
    return table
