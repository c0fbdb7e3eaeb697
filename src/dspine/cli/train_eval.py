"""`dspine train eval`: how many tokens a verify a checkpoint would give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dspine.cli.options import Options, settings_command
from dspine.cli.output import print_json
from dspine.default_pair import default_target
from dspine.machine import physical_cores

if TYPE_CHECKING:
    from dspine.train.evaluate import AcceptanceReport, Evaluation


@settings_command("train eval", click.Argument(["checkpoint"], type=click.Path(path_type=Path)))
def command(options: Options, checkpoint: Path) -> None:
    """Measure the acceptance length of CHECKPOINT (a GGUF or a run, too) on feature shards."""
    from dspine.train.evaluate_checkpoint import evaluate_checkpoint

    evaluation = evaluate_checkpoint(
        checkpoint,
        options.path("model") or default_target(),
        options.paths("shards"),
        max_tokens=options.positive("max_eval_tokens"),
        threads=options.positive("threads") or physical_cores(),
    )
    if options.switch("json"):
        print_json(evaluation.as_dict())
    else:
        for line in lines(evaluation):
            click.echo(line)


def lines(evaluation: Evaluation) -> Iterator[str]:
    """A row for each source and one for all: the acceptance length of the drafter, that of single
    candidates and that of expected chains, and the chance of each slot."""
    names = "".join(f"{name:>9}" for name in ("tokens", "length", "single", "expected"))
    yield f"{'source':<24}{names}  accepted, by slot"
    for name, report in sorted(evaluation.by_source.items()):
        yield row(name, report)
    yield row("all", evaluation.overall)


def row(name: str, report: AcceptanceReport) -> str:
    curve = " ".join(f"{chance:.2f}" for chance in report.acceptance_curve)
    lengths = (
        report.acceptance_length,
        report.unary_acceptance_length,
        report.expected_acceptance_length,
    )
    numbers = "".join(f"{length:>9.3f}" for length in lengths)
    return f"{name:<24}{report.tokens:>9}{numbers}  {curve}"
