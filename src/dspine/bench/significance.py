"""What differs between two results, and whether it is more than chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspine.bench.measurement import Measurement
from dspine.bench.result import BenchResult
from dspine.bench.summary import (
    ALL,
    Group,
    Interval,
    Parts,
    acceptance_parts,
    quotient,
    ratio,
    ratio_interval,
    speed_parts,
)
from dspine.errors import UsageError


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of B over that of A, on the prompts that both measured."""

    first: str
    """Configuration in A."""
    second: str
    task: str
    temperature: float
    depth: int
    concurrency: int
    figure: str
    """acceptance length or tokens/s."""
    before: float
    after: float
    ratio: float
    interval: Interval | None
    """95 % bootstrap interval of the ratio over prompts and repeats."""

    @property
    def is_significant(self) -> bool:
        """Whether 1 lies outside the interval."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]


_FIGURES: dict[str, Callable[[Sequence[Measurement]], Parts]] = {
    "acceptance length": acceptance_parts,
    "tokens/s": speed_parts,
}


def compare_results(first: BenchResult, second: BenchResult) -> list[Change]:
    """Changes from `first` to `second` for every configuration, task, temperature, depth and
    concurrency.

    Configurations are matched by name; where each result has only one, these two are. Speeds are
    compared in results of `bench` alone. Raises UsageError when nothing was measured in both.
    """
    figures = [
        name
        for name in _FIGURES
        if name == "acceptance length" or first.kind == second.kind == "bench"
    ]
    changes = []
    for old, new in _matched(first, second):
        pairs = _pairs(first, old, second, new)
        for where in dict.fromkeys(_where(a) for a, _ in pairs):
            group = [(a, b) for a, b in pairs if _where(a) == where]
            tasks = tuple(dict.fromkeys(a.cell.task for a, _ in group))
            for task in (*tasks, ALL) if len(tasks) > 1 else tasks:
                chosen = [(a, b) for a, b in group if task in (ALL, a.cell.task)]
                changes += [_change(name, old, new, task, where, chosen) for name in figures]
    if not changes:
        raise UsageError(
            "the two results have no configuration and prompt in common: compare results of the "
            "same tasks"
        )
    return changes


def _where(one: Measurement) -> Group:
    return one.cell.temperature, one.cell.depth, one.cell.concurrency


def _change(
    name: str,
    old: str,
    new: str,
    task: str,
    where: Group,
    pairs: Sequence[tuple[Measurement, Measurement]],
) -> Change:
    before = _FIGURES[name]([a for a, _ in pairs])
    after = _FIGURES[name]([b for _, b in pairs])
    return Change(
        first=old,
        second=new,
        task=task,
        temperature=where[0],
        depth=where[1],
        concurrency=where[2],
        figure=name,
        before=quotient(before),
        after=quotient(after),
        ratio=ratio(after, before),
        interval=ratio_interval(after, before),
    )


def _matched(first: BenchResult, second: BenchResult) -> list[tuple[str, str]]:
    old = tuple(dict.fromkeys(one.cell.configuration for one in first.measurements))
    new = tuple(dict.fromkeys(one.cell.configuration for one in second.measurements))
    common = [(name, name) for name in old if name in new]
    return common or (list(zip(old, new, strict=True)) if len(old) == len(new) == 1 else [])


def _pairs(
    first: BenchResult, old: str, second: BenchResult, new: str
) -> list[tuple[Measurement, Measurement]]:
    def keyed(result: BenchResult, name: str) -> dict[tuple[object, ...], Measurement]:
        return {
            (one.cell.task, one.cell.prompt, one.cell.repeat, *_where(one)): one
            for one in result.measurements
            if one.cell.configuration == name
        }

    after = keyed(second, new)
    return [(one, after[key]) for key, one in keyed(first, old).items() if key in after]
