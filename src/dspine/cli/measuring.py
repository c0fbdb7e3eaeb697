"""What `dspine bench` and `dspine eval` share: from options to a plan, its run, and its output."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dspine.cli import INTERRUPTED
from dspine.cli.models import named_pair
from dspine.cli.options import Options
from dspine.cli.output import print_json, warn
from dspine.cli.session import FLASH_ATTENTION
from dspine.default_pair import choose_pair
from dspine.errors import UsageError
from dspine.machine import state_folder

if TYPE_CHECKING:
    from dspine.bench.configuration import Configuration
    from dspine.bench.measurement import BenchPlan, Measurement
    from dspine.bench.prompts import BenchPrompt
    from dspine.bench.result import BenchResult
    from dspine.bench.tables import Table


@dataclass(frozen=True, slots=True)
class Pair:
    """The files that configurations use unless they name others."""

    model: Path
    drafter: Path | None

    @property
    def files(self) -> list[Path]:
        return [self.model, *([] if self.drafter is None else [self.drafter])]


def pair_of(options: Options) -> Pair:
    """Target and drafter of the options, the default pair where none is named."""
    return Pair(*choose_pair(*named_pair(options)))


def common_options(options: Options, pair: Pair) -> dict[str, Any]:
    """Options of `dspine.load` that hold for every configuration, as JSON values."""
    library, cache = options.path("library"), options.path("cache_dir")
    chosen = {
        "model": str(pair.model),
        "drafter": None if pair.drafter is None else str(pair.drafter),
        "n_ctx": options.positive("ctx_size"),
        "n_threads": options.positive("threads"),
        "n_batch": options.number("batch_size"),
        "n_gpu_layers": options.number("n_gpu_layers"),
        "flash_attention": FLASH_ATTENTION[options.choice("flash_attn")],
        "cache_type_k": options.choice("cache_type_k"),
        "cache_type_v": options.choice("cache_type_v"),
        "library": None if library is None else str(library),
        "cache_dir": None if cache is None else str(cache),
    }
    return {name: value for name, value in chosen.items() if value is not None}


def chosen_prompts(options: Options, default: Sequence[str]) -> list[BenchPrompt]:
    """Prompts of the named tasks and files; those of `default` when nothing is named."""
    from dspine.bench.prompts import named_tasks, read_prompts

    limit = options.positive("limit")
    files, tasks = options.paths("prompts"), options.text("tasks")
    names = [] if files and tasks is None else list(default)
    if tasks is not None:
        names = [name.strip() for name in tasks.split(",") if name.strip()]
    prompts = named_tasks(names, limit)
    for path in files:
        prompts += read_prompts(path, limit)
    if not prompts:
        raise UsageError("there is nothing to ask: name tasks with --tasks or files with --prompts")
    seen: dict[tuple[str, str], int] = {}
    unique = []
    for prompt in prompts:  # two files may use the same ids
        number = seen[prompt.task, prompt.id] = seen.get((prompt.task, prompt.id), 0) + 1
        unique.append(prompt if number == 1 else replace(prompt, id=f"{prompt.id}#{number}"))
    return unique


def number_list(
    options: Options, name: str, kind: type[int | float], least: int = 0
) -> tuple[Any, ...]:
    """Numbers of at least `least` from a text such as 0,4096; doubles are dropped."""
    text = options.text(name) or ""
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = [kind(-1)]
    if not all(number >= least for number in numbers):  # nan as well
        raise UsageError(
            f"--{name} is {text!r}: give numbers of at least {least}, as in {least},{least + 1}"
        )
    return tuple(dict.fromkeys(numbers))


def make_plan(
    options: Options, kind: str, pair: Pair, texts: Sequence[str], tasks: Sequence[str]
) -> BenchPlan:
    """What to measure: the configurations of `texts`, on `tasks` where the options name none."""
    from dspine.bench.configuration import parse_configurations
    from dspine.bench.measurement import BenchPlan

    has_drafter = pair.drafter is not None
    configurations = parse_configurations(
        texts, common_options(options, pair), has_drafter=has_drafter
    )
    concurrencies = number_list(options, "concurrency", int, 1) if kind == "bench" else (1,)
    most = max(concurrencies)
    if most > 1:
        configurations = [_parallel(one, most) for one in configurations]
    return BenchPlan(
        kind=kind,
        configurations=tuple(configurations),
        prompts=tuple(chosen_prompts(options, tasks)),
        repeats=options.number("repeats"),
        temperatures=number_list(options, "temps", float),
        depths=number_list(options, "depth", int),
        max_tokens=options.number("predict"),
        seed=0,
        raw=options.switch("raw"),
        concurrencies=concurrencies,
    )


def _parallel(configuration: Configuration, count: int) -> Configuration:
    """With so many slots, each with the context that one alone would have."""
    chosen = {**configuration.options, "parallel": count}
    if "n_ctx" in chosen:
        chosen["n_ctx"] *= count
    return replace(configuration, options=chosen)


def run_plan(options: Options, plan: BenchPlan, pair: Pair) -> int:
    """Measure, write and print; the exit code. Broken off, it prints and keeps what there is."""
    check_output(options)
    from dspine.bench.journal import Journal
    from dspine.bench.processes import WorkerProcess
    from dspine.bench.result import collect, provenance
    from dspine.bench.run import measure
    from dspine.llama.library import find_library

    library = find_library(options.path("library"))
    about = {"llama.cpp": library.llama_version, "kernels": library.kernels.text}
    target = options.path("output")
    path = journal_path(target, plan)
    if options.switch("anew"):
        path.unlink(missing_ok=True)
    interrupted = False
    facts: Mapping[str, Mapping[str, Any]] = {}
    with Journal(path, plan, provenance(pair.files, about)) as journal:
        if journal.measurements:
            warn(f"continuing a run that was broken off after {len(journal.measurements)} answers")
        try:
            facts = measure(
                plan,
                journal,
                WorkerProcess,
                Listener(),
                one_at_a_time=options.switch("one_at_a_time"),
            )
        except KeyboardInterrupt:
            interrupted = True
        finally:
            result = collect(plan, facts, journal.provenance, journal.measurements)
            if target is not None and journal.measurements:
                result.write(target)
        if interrupted:
            warn(f"broken off; the same command goes on from {path}")
        else:
            journal.finish()
    if result.measurements:
        print_result(options, result)
    return INTERRUPTED if interrupted else 0


def journal_path(target: Path | None, plan: BenchPlan) -> Path:
    """Where measurements are kept until the run is complete."""
    if target is not None:
        return target.with_name(target.name + ".part")
    return state_folder() / "bench" / f"{plan.key}.part"


def check_output(options: Options) -> None:
    """UsageError for what could not be written, before anything is measured."""
    chosen = [name for name in ("json", "csv", "md") if options.switch(name)]
    if len(chosen) > 1:
        flags = " and ".join(f"--{name}" for name in chosen)
        raise UsageError(f"{flags} exclude each other: choose one of them")
    plot, report, output = (options.path(name) for name in ("plot", "report", "output"))
    if plot is not None:
        from dspine.bench.plots import check_plot

        check_plot(plot)
    if report is not None:
        from dspine.bench.plots import require_matplotlib

        require_matplotlib()
    for name, path in (("plot", plot), ("output", output)):
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"the folder of --{name} {path} does not exist: create it first")


def print_result(options: Options, result: BenchResult) -> None:
    """In the form that the options ask for, and the files beside it."""
    from dspine.bench.tables import csv_text, tables

    if options.switch("json"):
        print_json(result.to_json())
    elif options.switch("csv"):
        click.echo(csv_text(result), nl=False)
    elif options.switch("md"):
        click.echo("\n\n".join(table.markdown() for table in tables(result)))
    else:
        for table in tables(result):
            print_table(table)
    plot, report = options.path("plot"), options.path("report")
    if plot is not None:
        from dspine.bench.plots import write_plot

        write_plot(result, plot)
        click.echo(f"picture: {plot}", err=True)
    if report is not None:
        from dspine.bench.page import write_report

        click.echo(f"report: {write_report(result, report)}", err=True)


def print_table(table: Table) -> None:
    """Title, header and rows, those that want attention in red."""
    click.echo()
    click.secho(table.title, bold=True)
    header, *rows = table.lines()
    click.echo(header)
    for number, line in enumerate(rows):
        click.secho(line.rstrip(), fg="red" if number in table.marked else None)


class Listener:
    """Tells on stderr how far a run is: a line that rewrites itself on a terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()

    def loaded(self, name: str, facts: Mapping[str, Any]) -> None:
        off = facts["drafting_off"]
        click.echo(f"loaded {name}" + (f", drafting off: {off}" if off else ""), err=True)
        for notice in facts["notices"]:
            warn(notice)

    def measured(self, measurement: Measurement, done: int, total: int) -> None:
        cell = measurement.cell
        if self._is_terminal:
            text = f"{done} of {total}: {cell.configuration}, {cell.prompt}"
            click.echo(f"\r{text[:98]:<98}", nl=done == total, err=True)
        elif done % 20 == 0 or done == total:
            click.echo(f"{done} of {total} answers", err=True)
