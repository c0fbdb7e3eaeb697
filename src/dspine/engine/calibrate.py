"""Times target and drafter on this machine for n = 1 ... B rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from dspine.drafters.base import Drafter
from dspine.engine.target import Target, read_tokens
from dspine.measured import DEPTH, NOISY, interpolate

Case = TypeVar("Case", bound=Hashable)
Measured = TypeVar("Measured")

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Row counts that are timed; between them the cost is taken as linear."""

DEEP = 512
"""Context at which a few counts are timed again, to know what a longer context costs."""

DEEP_BUDGET_MS = 500.0
"""Time for decoding that context; what a slow target reaches in it must do."""

CONTEXT_ROWS = 32
"""Feature rows that are handed over at once to time one of them."""

THREADS_BUDGET_MS = 300.0
"""Time after which no number of threads is tried again."""

FEWER_THREADS_FROM = 0.97
"""Share of the time from which fewer threads are preferred: they leave cores to others."""

STILL_FEWER_FROM = 0.85
"""The same for the second look at a choice of fewer threads."""

REPEATS = 5
ROWS_BUDGET_MS = 1000.0
DRAFTS_BUDGET_MS = 500.0
"""Time after which nothing is timed again."""

FIRST_TURN = 4
"""Budgets after which what was not timed yet is taken from its neighbours."""

SETTLED = 1.03
"""Second best over best time of a case up to which it is not timed again."""

NO_BETTER = 0.98
"""Share of another setting's time under which a setting must be at some count to be of use."""

LONG_MS = 40.0
"""Time from which a decode counts though the one before had other rows: the library then builds
its graph anew, about a millisecond."""

STEADY = 1.15
"""As NOISY, but for the times that were repeated, where the budget allowed that for some only."""


@dataclass(frozen=True, slots=True)
class RowTiming:
    """Best milliseconds by attention setting and row count, and how far typical ones were above.

    `change_ms` is what a decode took longer where the one before had another number of rows.
    """

    ms: dict[bool, dict[int, float]]
    noise: float = 1.0
    change_ms: float = 0.0


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
    keep: bool = False,
) -> RowTiming:
    """Best time of decoding n rows after `depth` of `tokens`, arg-max of every row included.

    `targets` are contexts of one model by flash attention setting. Settings and counts (at least
    two) take turns, so that a disturbance does not fall on one of them. The memories are empty
    afterwards, or with `keep` hold `depth` tokens. `tokens` has at least depth + max(counts)
    entries.
    """
    for target in targets.values():
        target.clear()
        read_tokens(target, tokens, 0, depth)

    def finish(target: Target, count: int) -> None:
        for row in range(count):
            target.argmax(row)

    times = _time_after(targets, tokens, depth, counts, finish, repeats, budget_ms)
    if not keep:
        _clear(targets)
    return times


def time_deep(
    targets: Mapping[bool, Target],
    tokens: Sequence[int],
    counts: Sequence[int],
    *,
    held: int = 0,
    repeats: int = 3,
    budget_ms: float = DEEP_BUDGET_MS,
) -> tuple[int, RowTiming]:
    """(depth, times) of a few counts after all of `tokens` that fit the budget.

    The depth is the same for all settings. The last max(counts) tokens are the timed rows. The
    memories hold `held` of the tokens, and are empty afterwards.
    """
    depth, most = held, max(counts)
    started = perf_counter()
    while depth + most < len(tokens) and (perf_counter() - started) * 1000.0 < budget_ms:
        end = min(depth + DEPTH, len(tokens) - most)
        for target in targets.values():
            read_tokens(target, tokens, depth, end)
        depth = end
    times = _time_after(
        targets, tokens, depth, counts, lambda target, _: target.wait(), repeats, budget_ms
    )
    _clear(targets)
    return depth, times


def choose_threads(
    target: Target,
    set_threads: Callable[[int], None],
    candidates: Sequence[int],
    tokens: Sequence[int],
    *,
    repeats: int = 5,
    budget_ms: float = THREADS_BUDGET_MS,
    fewer_from: float = FEWER_THREADS_FROM,
) -> tuple[int, float]:
    """(threads, noise): the number with the shortest time of one row and four after `tokens`.

    All candidates take turns. Fewer threads win where they are about as fast (`fewer_from`); but
    where that is because other programs use the cores, the noise is NOISY, so that it is not kept.
    """
    if len(candidates) == 1:
        return candidates[0], 1.0
    target.clear()
    context, rows = tokens[:-4], tokens[-4:]
    read_tokens(target, context, 0, len(context))
    target.checkpoint()
    times: dict[tuple[int, int], list[float]] = {}
    began = perf_counter()
    for turn in range(repeats):
        if turn and (perf_counter() - began) * 1000.0 > budget_ms:
            break
        for threads in candidates:
            set_threads(threads)
            for count in (1, 4):
                _, spent = _decode_ms(target, rows[:count], len(context), target.wait)
                times.setdefault((threads, count), []).append(spent)
    target.clear()
    most = max(candidates)
    best, best_share = most, 1.0
    for threads in sorted(candidates, reverse=True):
        share = 0.5 * sum(min(times[threads, n]) / min(times[most, n]) for n in (1, 4))
        if share * fewer_from < best_share and share < 1.0 / fewer_from:
            best, best_share = threads, share
    set_threads(best)
    steady = all(
        len(values) > 1 and statistics.median_high(values) < STEADY * min(values)
        for (threads, _), values in times.items()
        if threads == most
    )
    return best, 1.0 if best == most or steady else NOISY


def with_threads(
    choose: Callable[[Sequence[int], float], tuple[int, float]],
    candidates: Sequence[int],
    measure: Callable[[], Measured],
) -> tuple[int, float, Measured]:
    """(threads, noise, what `measure` finds with them), where `choose(candidates, fewer_from)`
    sets the number of threads.

    Fewer threads than the most must stand a second look afterwards: a program that takes a core
    for a moment makes them seem as fast. Where they do not, nothing of it is kept.
    """
    threads, noise = choose(candidates, FEWER_THREADS_FROM)
    found = measure()
    most = max(candidates)
    if threads == most:
        return threads, noise, found
    again, doubt = choose((most, threads), STILL_FEWER_FROM)
    if again == threads:
        return threads, max(noise, doubt), found
    return again, NOISY, measure()


def time_drafter(
    drafter: Drafter,
    feature_size: int,
    widths: Sequence[int],
    *,
    depth: int = DEPTH,
    repeats: int = REPEATS,
    budget_ms: float = DRAFTS_BUDGET_MS,
    seq: int = 0,
    before: Callable[[], None] = lambda: None,
) -> DraftTiming:
    """Best time of a draft of each width after `depth` positions, plus the context of its rows.

    A step hands over as many feature rows as it confirmed; two are taken as typical. `before`
    is a decode of the target: in a step a draft follows one, which leaves the processor's caches
    without the drafter's weights.
    """
    rows = np.random.default_rng(0).standard_normal((depth, feature_size), np.float32)
    drafter.truncate(seq, 0)
    drafter.add_context(seq, 0, rows[: depth - 2])

    def once(width: int) -> float:
        before()
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


def of_use(rows_ms: Mapping[bool, Mapping[int, float]]) -> tuple[bool, ...]:
    """The settings that are the fastest one for some row count: one of them will be chosen.

    Where they differ by noise alone, it is the one that is faster on the whole.
    """
    useful = tuple(
        flash
        for flash, table in sorted(rows_ms.items())
        if all(
            any(ms < NO_BETTER * other[count] for count, ms in table.items())
            for setting, other in rows_ms.items()
            if setting is not flash
        )
    )
    return useful or (min(rows_ms, key=lambda flash: sum(rows_ms[flash].values())),)


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


def _time_after(
    targets: Mapping[bool, Target],
    tokens: Sequence[int],
    depth: int,
    counts: Sequence[int],
    finish: Callable[[Target, int], None],
    repeats: int,
    budget_ms: float,
) -> RowTiming:
    """Best time of decoding n rows in memories that hold `depth` of `tokens`, then as before.

    `finish` belongs to the time: it waits for the decode, or looks at its rows.
    """
    for target in targets.values():
        target.checkpoint()
    changes: list[float] = []

    def once(case: tuple[int, bool]) -> float:
        count, flash = case
        target = targets[flash]
        rows = tokens[depth : depth + count]
        first, spent = _decode_ms(target, rows, depth, lambda: finish(target, count))
        changes.append(first - spent)
        return spent

    cases = [(count, flash) for count in _in_turn(counts) for flash in sorted(targets)]
    times = _take_turns(once, cases, len(targets), repeats, budget_ms)
    best = {
        flash: _complete({n: min(times[n, on]) for n, on in times if on is flash}, counts)
        for flash in sorted(targets)
    }
    return RowTiming(best, spread(times, len(cases)), max(0.0, statistics.median(changes)))


def _decode_ms(
    target: Target, rows: Sequence[int], position: int, finish: Callable[[], None]
) -> tuple[float, float]:
    """Milliseconds of a decode that follows one of as many rows, as most do, after those of the
    one before it; both are taken back.
    """
    first = spent = 0.0
    for turn in range(2):
        started = perf_counter()
        target.decode(rows, position, "all")
        finish()
        spent = (perf_counter() - started) * 1000.0
        target.restore()
        first = spent if turn == 0 else first
        if spent > LONG_MS:
            break
    return first, spent


def _clear(targets: Mapping[bool, Target]) -> None:
    for target in targets.values():
        target.clear()


def _take_turns(
    once: Callable[[Case], float],
    cases: Sequence[Case],
    settings: int,
    repeats: int,
    budget_ms: float,
) -> dict[Case, list[float]]:
    """Times of the cases in turn until each is settled, at most `repeats` times over, or until
    the budget is spent.

    `cases` begin with the smallest and the largest count in each of `settings`. Those are always
    timed and the smallest twice; the first turn of the others ends at FIRST_TURN budgets.
    """
    times: dict[Case, list[float]] = {}
    began = perf_counter()

    def is_spent(budgets: float) -> bool:
        return (perf_counter() - began) * 1000.0 > budgets * budget_ms

    for case in (*cases[: 2 * settings], *cases[:settings]):
        times.setdefault(case, []).append(once(case))
    for case in cases[2 * settings :]:
        if is_spent(FIRST_TURN):
            return times
        times[case] = [once(case)]
    for _ in range(repeats - 1):
        for case in cases:
            if is_spent(1):
                return times
            if not _is_settled(times[case]):
                times[case].append(once(case))
    return times


def _is_settled(values: Sequence[float]) -> bool:
    """Whether the best time was confirmed by another one."""
    best = sorted(values)[:2]
    return len(best) == 2 and best[1] <= SETTLED * best[0]


def _in_turn(counts: Sequence[int]) -> list[int]:
    """The smallest, the largest, then those between which a line says least about the cost."""
    small, *middle, large = sorted({*counts})
    return [small, large, *sorted(middle, key=lambda n: (n & (n - 1) != 0, abs(n - 4)))]


def _complete(times: Mapping[int, float], counts: Sequence[int]) -> dict[int, float]:
    """Every count: what there was no time for lies on the line between its neighbours."""
    return never_cheaper({count: interpolate(times, count) for count in counts})
