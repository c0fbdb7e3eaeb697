"""Pictures of a result: speed by task, acceptance by slot, speed against depth and against answers
at once (matplotlib).
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspine.bench.result import BenchResult
from dspine.bench.summary import ALL, Row
from dspine.errors import UsageError
from dspine.files.atomic import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")


def write_plot(result: BenchResult, path: Path) -> None:
    """All pictures of a result in one file, PNG or SVG by its ending."""
    kind = check_plot(path)
    content = picture(result, kind)
    with atomic_write(path, overwrite=True) as stream:
        stream.write(content)


def check_plot(path: Path) -> str:
    """The format that a path asks for; UsageError, also when matplotlib is missing."""
    kind = path.suffix.lower().lstrip(".")
    if kind not in FORMATS:
        raise UsageError(f"{path} ends in neither .png nor .svg: choose one of the two")
    require_matplotlib()
    return kind


def require_matplotlib() -> None:
    """UsageError that says how to install it."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError(
            "pictures need matplotlib, which is not installed: run `pip install 'dspine[bench]'`"
        ) from None


def picture(result: BenchResult, kind: str) -> bytes:
    """The content of a PNG or SVG file."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = result.rows
    groups = list(dict.fromkeys((row.temperature, row.depth) for row in rows))
    deep = len({depth for _, depth in groups}) > 1
    least = min((row.concurrency for row in rows), default=1)
    busy = any(row.concurrency > 1 for row in rows)
    at_first = [row for row in rows if (row.temperature, row.depth) == groups[0]]
    first = [row for row in at_first if row.concurrency == least]
    with matplotlib.rc_context({"svg.hashsalt": "dspine", "svg.fonttype": "none", "font.size": 9}):
        count = 2 + deep + busy
        figure = Figure(figsize=(9, 3.4 * count), layout="constrained")
        axes = figure.subplots(count, 1)
        _by_task(axes[0], first, result)
        _by_slot(axes[1], first)
        if deep:
            chosen = [r for r in rows if r.temperature == groups[0][0] and r.concurrency == least]
            _by_depth(axes[2], chosen)
        if busy:
            _by_concurrency(axes[-1], at_first)
        return _saved(figure, kind)


def _saved(figure: Figure, kind: str) -> bytes:
    stream = BytesIO()
    # Without a date the same result gives the same file.
    details: dict[str, Any] = {"Date": None} if kind == "svg" else {}
    figure.savefig(stream, format=kind, dpi=120, metadata=details)
    return stream.getvalue()


def _by_task(axes: Axes, rows: Sequence[Row], result: BenchResult) -> None:
    tasks = list(dict.fromkeys(row.task for row in rows))
    names = list(dict.fromkeys(row.configuration for row in rows))
    width = 0.8 / max(1, len(names))
    is_bench = result.kind == "bench"
    for number, name in enumerate(names):
        own = {row.task: row for row in rows if row.configuration == name}
        heights = [_height(own[task], is_bench) if task in own else 0.0 for task in tasks]
        at = [i + (number - (len(names) - 1) / 2) * width for i in range(len(tasks))]
        axes.bar(at, heights, width, label=name)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("tokens/s" if is_bench else "acceptance length")
    where = f"temperature {rows[0].temperature:g}" if rows else ""
    axes.set_title(f"{'Speed' if is_bench else 'Acceptance'} by task, {where}")
    axes.legend(fontsize=8)


def _height(row: Row, is_bench: bool) -> float:
    return row.tokens_per_second if is_bench else row.acceptance_length


def _by_slot(axes: Axes, rows: Sequence[Row]) -> None:
    for row in _whole(rows):
        if row.slot_acceptance:
            slots = range(1, len(row.slot_acceptance) + 1)
            axes.plot(slots, row.slot_acceptance, marker="o", label=row.configuration)
    axes.set_ylim(0, 1)
    axes.set_xlabel("slot")
    axes.set_ylabel("accepted")
    axes.set_title("Acceptance by slot, given that all before it were accepted")
    if axes.lines:
        axes.legend(fontsize=8)


def _by_depth(axes: Axes, rows: Sequence[Row]) -> None:
    whole = _whole(rows)
    for name in dict.fromkeys(row.configuration for row in whole):
        own = sorted((r.depth, r.tokens_per_second) for r in whole if r.configuration == name)
        axes.plot([d for d, _ in own], [speed for _, speed in own], marker="o", label=name)
    axes.set_xlabel("depth of the context (tokens)")
    axes.set_ylabel("tokens/s")
    axes.set_title("Speed against depth")
    axes.legend(fontsize=8)


def _by_concurrency(axes: Axes, rows: Sequence[Row]) -> None:
    whole = _whole(rows)
    for name in dict.fromkeys(row.configuration for row in whole):
        own = sorted(
            (r.concurrency, r.together_per_second)
            for r in whole
            if r.configuration == name and r.together_per_second is not None
        )
        axes.plot([n for n, _ in own], [speed for _, speed in own], marker="o", label=name)
    axes.set_xticks(sorted({row.concurrency for row in whole}))
    axes.set_xlabel("answers at once")
    axes.set_ylabel("tokens/s of all")
    axes.set_title("Speed of all answers against their number")
    axes.legend(fontsize=8)


def _whole(rows: Sequence[Row]) -> list[Row]:
    """The rows over all tasks; with a single task, its own."""
    several = {row.configuration for row in rows if row.task == ALL}
    return [row for row in rows if row.task == ALL or row.configuration not in several]
