"""`dspine train prompts`: let the target write the prompts that it is to answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dspine.cli.options import Options, own_weights, required_path, settings_command
from dspine.default_pair import default_target

if TYPE_CHECKING:
    from dspine.train.own_prompts import OwnPromptOptions


@settings_command("train prompts")
def command(options: Options) -> None:
    """Let the target write prompts itself; the same command continues a run."""
    from dspine.llama.library import find_library
    from dspine.train.own_prompts import write_prompts

    wanted = prompt_options(options)
    find_library(options.path("library"))
    report = write_prompts(wanted)
    click.echo(
        f"{wanted.output}: {report.prompts} more prompts; left out: {report.unended} that did not "
        f"end, {report.repeated} that were short, known or in a task set"
    )


def prompt_options(options: Options) -> OwnPromptOptions:
    output = required_path(options, "output", "-o FILE")
    from dspine.bench.prompts import TASK_SETS, named_tasks
    from dspine.train.own_prompts import OwnPromptOptions

    usual = OwnPromptOptions(target=output, output=output)
    # What `dspine eval` measures on stays unseen.
    tasks = named_tasks(TASK_SETS)
    return OwnPromptOptions(
        target=options.path("model") or default_target(),
        output=output,
        count=options.positive("limit") or usual.count,
        openings=options.path("openings"),
        unlike=tuple(task.prompt for task in tasks if isinstance(task.prompt, str)),
        temperature=options.real("temperature"),
        top_p=options.real("top_p"),
        max_tokens=options.positive("max_tokens") or usual.max_tokens,
        system=options.text("system"),
        slots=options.number("slots"),
        seed=options.number("seed"),
        threads=options.positive("threads"),
        weights=own_weights(options),
    )
