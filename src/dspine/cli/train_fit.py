"""`dspine train fit`: train a drafter on captured features, or continue a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dspine.cli import INTERRUPTED
from dspine.cli.options import Options, required_path, settings_command, whole_numbers
from dspine.cli.output import warn
from dspine.default_pair import default_target

if TYPE_CHECKING:
    from dspine.train.options import FitOptions


@settings_command("train fit")
def command(options: Options) -> int:
    """Train a drafter for the target on feature shards; the same command continues it."""
    from dspine.train.trainer import fit

    result = fit(fit_options(options), on_log=show)
    best = f"; best {result.best} at {result.acceptance_length:.3f}" if result.best else ""
    click.echo(f"{result.checkpoint} after {result.steps} steps{best}")
    if result.finished and result.best is None:
        warn(
            "how many drafts are accepted was not measured, so `dspine run` has to assume it: run "
            "the same command again with --held-out FOLDER, which measures it and trains no more"
        )
    if not result.finished:
        click.echo("dspine: stopped; run the same command again to go on", err=True)
    return 0 if result.finished else INTERRUPTED


def fit_options(options: Options) -> FitOptions:
    from dspine.train.options import FitOptions, Geometry
    from dspine.train.schedules import LossSchedule

    kind = options.choice("kind")
    schedule = replace(LossSchedule.of(kind), alignment_weight=options.real("alignment_weight"))
    if options.values["ce_share"] is not None:
        schedule = replace(schedule, ce_weight=options.real("ce_share"))
    return FitOptions(
        output=required_path(options, "output", "-o FOLDER"),
        target=options.path("model") or default_target(),
        shards=options.paths("shards"),
        steps=options.positive("steps"),
        minutes=options.real("minutes") or None,
        held_out=options.paths("held_out"),
        geometry=Geometry(
            kind=kind,
            num_layers=options.number("num_layers"),
            block_size=options.number("block_size"),
            transfer_rank=options.number("transfer_rank"),
            message_size=options.number("message_size"),
            top_k=options.number("top_k"),
            conv_kernel_size=options.number("conv_kernel_size"),
            conv_group_size=options.number("conv_group_size"),
            selector_rank=options.number("selector_rank"),
            causal=options.switch("causal"),
            window=options.positive("window"),
            intermediate_size=options.positive("intermediate_size"),
            mask_token_id=options.number("mask_token_id"),
        ),
        draft_vocab_size=options.positive("draft_vocab_size"),
        vocabulary_answers=options.paths("vocabulary_answers"),
        init_from=options.path("init_from"),
        copy_layers=not options.switch("no_copy_layers"),
        learning_rate=options.real("learning_rate"),
        warmup=options.real("warmup_share"),
        weight_decay=options.real("weight_decay"),
        clip=options.real("clip"),
        anchors_per_step=options.number("anchors_per_step"),
        anchors_per_sequence=options.number("anchors_per_sequence"),
        block_widths=whole_numbers(options, "block_widths") or (),
        gamma=options.real("gamma"),
        schedule=None if schedule == LossSchedule.of(kind) else schedule,
        refinement_weight=options.real("refinement_weight"),
        injection=not options.switch("no_injection"),
        seed=options.number("seed"),
        precision=options.choice("precision"),
        threads=options.positive("threads"),
        checkpoint_minutes=options.real("checkpoint_minutes"),
        evaluate_minutes=options.real("evaluate_minutes"),
        evaluate_tokens=options.number("evaluate_tokens"),
    )


def show(entry: Mapping[str, object]) -> None:
    """One line for each log entry: losses while training, acceptance when it was measured."""
    evaluation = entry.get("evaluation")
    if isinstance(evaluation, Mapping):
        shown = [f"acceptance length {evaluation['acceptance_length']}"]
        sources = evaluation.get("by_source", {})
        if isinstance(sources, Mapping):
            shown += [f"{name} {part['acceptance_length']}" for name, part in sources.items()]
    else:
        names = ("loss", "ce", "accuracy", "chain_accuracy", "lr", "anchors_per_second", "tokens")
        shown = [f"{name} {rounded(entry[name])}" for name in names if name in entry]
    step, elapsed = entry.get("step"), entry.get("elapsed")
    click.echo(f"step {step} · {elapsed} s · " + " · ".join(shown))


def rounded(value: object) -> str:
    """Three digits for small numbers such as learning rates; others are rounded already."""
    return f"{value:.3g}" if isinstance(value, float) and 0 < abs(value) < 0.1 else str(value)
