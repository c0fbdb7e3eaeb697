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
from dspine.engine.target import Target
from dspine.measured import DEPTH as DEPTH
from dspine.measured import FORMAT, interpolate
from dspine.measured import NOISY as NOISY
from dspine.measured import Calibration as Calibration

Case = TypeVar("Case", bound=Hashable)

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Row counts that are timed; between them the cost is taken as linear."""

DEEP = 512
"""Context at which a few counts are timed again, to know what a longer context costs."""

DEEP_BUDGET_MS = 800.0
"""Time for decoding that context; what a slow target reaches in it must do."""

CONTEXT_ROWS = 32
"""Feature rows that are handed over at once to time one of them."""

THREADS_BUDGET_MS = 300.0
"""Time after which no number of threads is tried again."""

FEWER_THREADS_FROM = 0.97
"""Share of the time from which fewer threads are preferred: they leave cores to others."""

REPEATS = 5
ROWS_BUDGET_MS = 1500.0
DRAFTS_BUDGET_MS = 500.0
"""Time after which nothing is timed again."""

FIRST_TURN = 4
"""Budgets after which what was not timed yet is taken from its neighbours."""

STEADY = 1.15
"""The same for the times that were repeated, where the budget allowed that for some only."""


@dataclass(frozen=True, slots=True)
class RowTiming:
    """Best milliseconds by attention setting and row count, and how far typical ones were above."""

    ms: dict[bool, dict[int, float]]
    noise: float = 1.0


@dataclass(frozen=True, slots=True)
class DraftTiming:
    """Best milliseconds by block width, and how far typical ones were above.

    `context_ms` is the time of one of many feature rows.
    """

    ms: dict[int, float]
    noise: float = 1.0
    context_ms: float = 0.0


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
        _read(target, tokens, 0, depth)

    def finish(target: Target, count: int) -> None:
        for row in range(count):
            target.argmax(row)

    return _time_after(targets, tokens, depth, counts, finish, repeats, budget_ms)


def time_deep(
    targets: Mapping[bool, Target],
    tokens: Sequence[int],
    counts: Sequence[int],
    *,
    repeats: int = 3,
    budget_ms: float = DEEP_BUDGET_MS,
) -> tuple[int, RowTiming]:
    """(depth, times) of a few counts after all of `tokens` that fit the budget.

    The depth is the same for all settings. The last max(counts) tokens are the timed rows.
    """
    depth, most = 0, max(counts)
    for target in targets.values():
        target.clear()
    started = perf_counter()
    while depth + most < len(tokens) and (perf_counter() - started) * 1000.0 < budget_ms:
        end = min(depth + DEPTH, len(tokens) - most)
        for target in targets.values():
            _read(target, tokens, depth, end)
        depth = end
    times = _time_after(
        targets, tokens, depth, counts, lambda target, _: target.wait(), repeats, budget_ms
    )
    return depth, times


def choose_threads(
    target: Target,
    set_threads: Callable[[int], None],
    candidates: Sequence[int],
    tokens: Sequence[int],
    *,
    repeats: int = 5,
    budget_ms: float = THREADS_BUDGET_MS,
) -> tuple[int, float]:
    """(threads, noise): the number with the shortest time of one row and four after `tokens`.

    All candidates take turns. Fewer threads win where they are about as fast; but where that
    is because other programs use the cores, the noise is NOISY, so that it is not kept.
    """
    if len(candidates) == 1:
        return candidates[0], 1.0
    target.clear()
    context, rows = tokens[:-4], tokens[-4:]
    _read(target, context, 0, len(context))
    target.checkpoint()
    times: dict[tuple[int, int], list[float]] = {}
    began = perf_counter()
    for turn in range(repeats):
        if turn and (perf_counter() - began) * 1000.0 > budget_ms:
            break
        for threads in candidates:
            set_threads(threads)
            for count in (1, 4):
                started = perf_counter()
                target.decode(rows[:count], len(context), "all")
                target.wait()
                times.setdefault((threads, count), []).append(perf_counter() - started)
                target.restore()
    target.clear()
    most = max(candidates)
    best, best_share = most, 1.0
    for threads in sorted(candidates, reverse=True):
        share = 0.5 * sum(min(times[threads, n]) / min(times[most, n]) for n in (1, 4))
        if share * FEWER_THREADS_FROM < best_share and share < 1.0 / FEWER_THREADS_FROM:
            best, best_share = threads, share
    set_threads(best)
    steady = all(
        len(values) > 1 and statistics.median_high(values) < STEADY * min(values)
        for (threads, _), values in times.items()
        if threads == most
    )
    return best, 1.0 if best == most or steady else NOISY


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
    many = min(CONTEXT_ROWS, depth - 2)
    context_ms = math.inf
    for _ in range(3):
        drafter.truncate(seq, depth - many)
        started = perf_counter()
        drafter.add_context(seq, depth - many, rows[depth - many :])
        context_ms = min(context_ms, (perf_counter() - started) * 1000.0 / many)
    drafter.truncate(seq, 0)
    best = _complete({width: min(values) for width, values in times.items()}, widths)
    return DraftTiming(best, spread(times, len(widths)), context_ms)


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


def _read(target: Target, tokens: Sequence[int], first: int, end: int) -> None:
    """Decode tokens first ... end - 1 at their own positions, without logits."""
    for start in range(first, end, target.n_batch):
        target.decode(tokens[start : min(start + target.n_batch, end)], start, "none")


def _time_after(
    targets: Mapping[bool, Target],
    tokens: Sequence[int],
    depth: int,
    counts: Sequence[int],
    finish: Callable[[Target, int], None],
    repeats: int,
    budget_ms: float,
) -> RowTiming:
    """Best time of decoding n rows in memories that hold `depth` of `tokens`, emptied afterwards.

    `finish` belongs to the time: it waits for the decode, or looks at its rows.
    """
    for target in targets.values():
        target.checkpoint()

    def once(case: tuple[int, bool]) -> float:
        count, flash = case
        target = targets[flash]
        started = perf_counter()
        target.decode(tokens[depth : depth + count], depth, "all")
        finish(target, count)
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
