"""How a plan looks: tables of at most 100 columns, and the same as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TypeAlias

from dspine.plan.devices import DeviceModel
from dspine.plan.geometry import Geometry
from dspine.plan.memory import Setup
from dspine.plan.presets import DRAFTERS, TARGETS
from dspine.plan.report import GROUPS, Question, Row, grouped, parameters
from dspine.plan.sizes import MIB, UNITS_SENTENCE, shown
from dspine.plan.speed import Prediction, TaskSpeeds

SpeedParts: TypeAlias = tuple[DeviceModel, Sequence[TaskSpeeds], int, int]
"""Device, predictions by task, the fixed width to show, and the context."""

_LABEL, _CELL, _LAST = 29, 8, 10


def memory_lines(question: Question, rows: Sequence[Row]) -> Iterator[str]:
    """What is planned, a row for each way to run it, and what would help."""
    target, setup, budget = question.target, question.setup, question.budget
    yield from target_lines(target, setup)
    for drafter in question.drafters:
        count = parameters(drafter) / 1e9
        yield f"drafter   {drafter.name}: {count:.2f} B parameters, {shown(drafter.weight_bytes)}"
    yield f"budget    {budget_text(question)}"
    device = "gpu" if budget.gpu is not None else "cpu"
    yield ""
    place = "on the graphics card" if device == "gpu" else "in main memory"
    when = f"at {question.n_ctx:,} tokens" if question.n_ctx else "at the largest context"
    yield f"MiB {place} {when}"
    names = [*list(GROUPS)[:-1], "reserve" if device == "gpu" else "program"]
    last = ("main mem" if device == "gpu" else "peak", "context")
    yield table_row("", names, last)
    for row in rows:
        cells = [f"{size / MIB:,.0f}" for size in grouped(row.plan, device).values()]
        context = f"{row.context:,}" if row.context else "none"
        yield table_row(row.label, cells, (f"{row.plan.peak_host / MIB:,.0f}", context))
    yield ""
    yield from notes(question, rows)


def table_row(label: str, cells: Sequence[str], last: Sequence[str]) -> str:
    """A line of the memory table, 97 columns wide."""
    parts = [f"{cell:>{_CELL}}" for cell in cells] + [f"{cell:>{_LAST}}" for cell in last]
    return f"{label:<{_LABEL}}" + "".join(parts)


def target_lines(target: Geometry, setup: Setup) -> Iterator[str]:
    recurrent = sum(1 for layer in target.layers if layer.state)
    windowed = sum(1 for layer in target.layers if layer.window)
    whole = sum(1 for layer in target.layers if layer.keys and not layer.window)
    kinds = [f"{whole} with full attention"]
    kinds += [f"{windowed} with a sliding window"] if windowed else []
    kinds += [f"{recurrent} recurrent"] if recurrent else []
    count = parameters(target) / 1e9
    yield f"target    {target.name}: {count:.2f} B parameters, {shown(target.weight_bytes)}"
    yield f"layers    {', '.join(kinds)}"
    kept = f"cache {setup.cache_type_k} and {setup.cache_type_v}"
    slots = f"{setup.slots} slots" if setup.slots > 1 else "1 slot"
    state = f", one copy of the state {shown(target.state_bytes)}" if recurrent else ""
    yield f"setup     {kept}, {slots}, prompt batches of {setup.n_batch}{state}"


def budget_text(question: Question) -> str:
    budget, setup = question.budget, question.setup
    parts = []
    if budget.gpu is not None:
        kept = f", {shown(setup.reserve_bytes)} of it kept free" if setup.reserve_bytes else ""
        parts.append(f"graphics card {shown(budget.gpu)}{kept}")
    if budget.cpu is not None:
        parts.append(f"main memory {shown(budget.cpu)}")
    return "; ".join(parts) + " (1 GiB is 1024 MiB)" if parts else "none known"


def notes(question: Question, rows: Sequence[Row]) -> Iterator[str]:
    """What a reader should know of the table, and what gives a larger context."""
    limit = question.target.context_train
    if limit and any(row.context >= limit // 256 * 256 for row in rows):
        yield f"{limit:,} tokens are what the target was trained for: more is not planned."
    if question.n_ctx is not None:
        for row in rows:
            if not row.fits:
                yield f"{row.label}: {question.n_ctx:,} tokens do not fit."
    for row in rows:
        if row.context == 0:
            yield f"{row.label}: does not fit the budget with any context."
    if question.setup.drafter_on_gpu and question.drafters:
        yield "Drafters are counted on the card; dspine computes them on the CPU (--draft-device)."
    for row in rows:
        if not row.advice or (row.setup.mode == "plain" and len(rows) > 1):
            continue
        yield f"More context than {row.context:,} for {row.label}:"
        for advice in row.advice:
            yield f"  {advice.context:>9,}  {advice.change} ({advice.flags})"


def memory_json(question: Question, rows: Sequence[Row]) -> dict[str, object]:
    """Everything of the table, in bytes."""
    target = question.target
    return {
        "units": UNITS_SENTENCE,
        "target": {
            "name": target.name,
            "architecture": target.architecture,
            "parameters": parameters(target),
            "weight_bytes": target.weight_bytes,
            "state_bytes": target.state_bytes,
            "context_train": target.context_train,
            "layers": len(target.layers),
        },
        "drafters": [
            {
                "name": drafter.name,
                "kind": drafter.config.kind,
                "parameters": parameters(drafter),
                "weight_bytes": drafter.weight_bytes,
            }
            for drafter in question.drafters
        ],
        "budget": asdict(question.budget),
        "rows": [
            {
                "label": row.label,
                "setup": asdict(row.setup),
                "largest_context": row.context,
                "planned_context": row.plan.n_ctx,
                "fits": row.fits,
                "gpu_bytes": row.plan.total("gpu"),
                "cpu_bytes": row.plan.total("cpu"),
                "cpu_peak_bytes": row.plan.peak_host,
                "items": [asdict(item) for item in row.plan.items],
                "advice": [asdict(advice) for advice in row.advice],
            }
            for row in rows
        ],
    }


def speed_lines(
    device: DeviceModel, tasks: Sequence[TaskSpeeds], width: int, depth: int
) -> Iterator[str]:
    """The table by task, and what cannot be told."""
    yield f"device    {device.name}"
    yield from wrapped("source    ", device.source)
    plain = device.plain_ms(depth)
    where = f" after {depth:,} tokens of context" if depth else ""
    yield f"plain     {1000.0 / plain:.1f} tokens/s ({plain:.1f} ms a token{where})"
    widest = min(width, device.widest)
    if widest > 1:
        step = device.step(widest, depth)
        yield (
            f"a step    of {widest - 1} drafts takes {ranged((step.least, step.most))} ms: it pays "
            f"from {ranged((step.least / plain, step.most / plain), 2)} tokens a step"
        )
    if not tasks:
        return
    yield ""
    yield (
        f"{'':<20}{'best width':>11}{'tokens/step':>13}{'ms/step':>10}{'tokens/s':>11}"
        f"{'x plain':>10}{f'at width {widest}':>16}"
    )
    for task in tasks:
        best, fixed = task.best, task.at(widest)
        other = ranged(fixed.speed) if fixed is not None else "unknown"
        yield (
            f"{task.task[:20]:<20}{best.width:>11}{best.tokens[0]:>13.2f}{best.step_ms[0]:>10.1f}"
            f"{best.speed[0]:>11.1f}{best.gain[0]:>10.2f}{other:>16}"
        )
    unknown = sorted({w for task in tasks for w in task.undecided})
    if unknown:
        yield ""
        yield from wrapped(
            "",
            f"Widths {listed(unknown)} may be faster for some tasks: costs or acceptance are not "
            f"known there, only bounds (--json has them). Chances by slot give the tokens of every "
            f"narrower width, and a measured device (--device here) its cost.",
        )
    if any(len(task.widths) < device.widest for task in tasks):
        yield "Nothing can be told of wider blocks than the acceptance was measured with."


def speed_json(
    device: DeviceModel, tasks: Sequence[TaskSpeeds], width: int, depth: int
) -> dict[str, object]:
    return {
        "device": {"name": device.name, "source": device.source, "widest": device.widest},
        "plain_ms": device.plain_ms(depth),
        "depth": depth,
        "width": width,
        "tasks": [
            {
                "task": task.task,
                "best_width": task.best.width,
                "best_tokens_per_second": task.best.speed[0],
                "undecided_widths": list(task.undecided),
                "widths": [prediction_json(one) for one in task.widths],
            }
            for task in tasks
        ],
    }


def prediction_json(one: Prediction) -> dict[str, object]:
    """Known numbers as such, bounds as pairs."""
    return {
        "width": one.width,
        "known": one.is_known,
        **{
            name: list(pair) if pair[0] != pair[1] else pair[0]
            for name, pair in (
                ("tokens_per_step", one.tokens),
                ("step_ms", one.step_ms),
                ("tokens_per_second", one.speed),
                ("gain", one.gain),
            )
        },
    }


def preset_lines() -> Iterator[str]:
    """Every preset with its source."""
    yield "targets (--preset)"
    for sizes in TARGETS.values():
        yield from wrapped(f"  {sizes.name:<22}", sizes.source)
    yield "drafters (--preset-draft)"
    for name, (_, _, source) in DRAFTERS.items():
        yield from wrapped(f"  {name:<22}", source)


def ranged(pair: tuple[float, float], digits: int = 1) -> str:
    least, most = (f"{value:.{digits}f}" for value in pair)
    return least if least == most else f"{least} to {most}"


def listed(numbers: Sequence[int]) -> str:
    """Whole numbers with runs as a-b."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]} to {r[-1]}" for r in runs)


def wrapped(first: str, text: str, width: int = 100) -> Iterator[str]:
    """Text in lines of at most `width`, the later ones indented like the first."""
    line = first
    for word in text.split():
        if len(line) + 1 + len(word) > width and line.strip():
            yield line.rstrip()
            line = " " * len(first)
        line += ("" if line.endswith(" ") or not line else " ") + word
    yield line.rstrip()
