"""`dspine train answers`: let the target answer prompts, as material for a drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dspine.cli.options import Options, own_weights, required_path, settings_command
from dspine.default_pair import default_target

if TYPE_CHECKING:
    from dspine.train.answers import AnswerOptions


@settings_command("train answers")
def command(options: Options) -> None:
    """Let the target answer the prompts; the same command continues a run."""
    from dspine.llama.library import find_library
    from dspine.train.answers import generate_answers

    wanted = answer_options(options)
    find_library(options.path("library"))
    report = generate_answers(wanted)
    rate = report.tokens / max(report.seconds, 1e-9)
    click.echo(
        f"{wanted.output}: {report.answers} more answers, {report.tokens} tokens "
        f"at {rate:.0f} tokens/s; "
        f"{report.ended} ended by themselves, {report.too_long} prompts were too long"
    )


def answer_options(options: Options) -> AnswerOptions:
    output = required_path(options, "output", "-o FILE")
    from dspine.train.answers import AnswerOptions

    usual = AnswerOptions(target=output, prompts=(), output=output)
    return AnswerOptions(
        target=options.path("model") or default_target(),
        prompts=options.paths("prompts"),
        output=output,
        skip=options.paths("skip"),
        sources=options.texts("source"),
        answers_per_prompt=options.number("answers_per_prompt"),
        limit=options.positive("limit"),
        greedy_share=options.real("greedy_share"),
        temperature=options.real("temperature"),
        top_p=options.real("top_p"),
        max_tokens=options.positive("max_tokens") or usual.max_tokens,
        max_prompt_tokens=options.positive("max_prompt_tokens") or usual.max_prompt_tokens,
        system=options.text("system"),
        slots=options.number("slots"),
        seed=options.number("seed"),
        threads=options.positive("threads"),
        weights=own_weights(options),
    )
