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
    """Measure the acceptance length of CHECKPOINT (or the best of a run) on feature shards."""
    import torch

    from dspine.train.evaluate_checkpoint import evaluate_checkpoint

    torch.set_num_threads(options.positive("threads") or physical_cores())
    evaluation = evaluate_checkpoint(
        checkpoint,
        options.path("model") or default_target(),
        options.paths("shards"),
        max_tokens=options.positive("max_eval_tokens"),
    )
    if options.switch("json"):
        print_json(evaluation.as_dict())
    else:
        for line in lines(evaluation):
            click.echo(line)


def lines(evaluation: Evaluation) -> Iterator[str]:
    """A row for each source and one for all, with the chance of each slot."""
    yield f"{'source':<24}{'tokens':>8}{'length':>8}  accepted, by slot"
    for name, report in sorted(evaluation.by_source.items()):
        yield row(name, report)
    yield row("all", evaluation.overall)


def row(name: str, report: AcceptanceReport) -> str:
    curve = " ".join(f"{chance:.2f}" for chance in report.acceptance_curve)
    return f"{name:<24}{report.tokens:>8}{report.acceptance_length:>8.3f}  {curve}"
