"""`dspine train features`: capture what the target's layers and head say about known text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dspine.cli.options import Options, own_weights, required_path, settings_command, whole_numbers
from dspine.default_pair import default_target
from dspine.errors import UsageError

if TYPE_CHECKING:
    from dspine.train.features import FeatureOptions


@settings_command("train features")
def command(options: Options) -> None:
    """Capture the target's features of answers and texts; the same command continues a run."""
    from dspine.llama.library import find_library
    from dspine.train.features import capture

    wanted = feature_options(options)
    find_library(options.path("library"))
    report = capture(wanted)
    click.echo(
        f"{wanted.output}: {report.sequences} sequences ({report.held_out_sequences} held out), "
        f"{report.tokens} tokens, {report.labels} labels in {report.seconds:.0f} s"
    )
    if report.agreement is not None:
        click.echo(f"the target confirms {100 * report.agreement:.2f} % of the greedy answers")


def feature_options(options: Options) -> FeatureOptions:
    prompts = options.paths("prompts")
    if len(prompts) > 1:
        raise UsageError(f"{len(prompts)} prompt files: features take one --prompts file")
    output = required_path(options, "output", "-o FOLDER")
    from dspine.train.features import FeatureOptions

    usual = FeatureOptions(target=output, answers=(), output=output)
    return FeatureOptions(
        target=options.path("model") or default_target(),
        answers=options.paths("answers"),
        output=output,
        texts=options.paths("texts"),
        held_out=options.path("held_out_output"),
        held_out_one_in=options.number("held_out_one_in"),
        taps=whole_numbers(options, "taps"),
        num_taps=options.number("num_taps"),
        prompts=prompts[0] if prompts else None,
        sources=options.texts("source"),
        max_tokens=options.positive("max_tokens") or usual.max_tokens,
        max_prompt_tokens=options.positive("max_prompt_tokens"),
        token_limit=options.positive("token_limit"),
        seed=options.number("seed"),
        shard_tokens=options.number("shard_tokens"),
        threads=options.positive("threads"),
        weights=own_weights(options),
    )
