"""`dspine export`: the folder that another engine loads, and the command to start it."""

from __future__ import annotations

from pathlib import Path

import click

from dspine.cli.options import Options, settings_command
from dspine.cli.output import Progress, warn


@settings_command(
    "export",
    click.Argument(["source"], type=click.Path(path_type=Path), metavar="IN"),
    click.Argument(["output"], type=click.Path(path_type=Path), metavar="OUT"),
)
def command(options: Options, source: Path, output: Path) -> None:
    """Write the drafter IN as the folder OUT that SGLang or vLLM loads, and say how.

    IN is a drafter GGUF, a checkpoint folder or the output of `train fit`. The folder is in
    SpecForge's layout; the target itself must be there in Hugging Face's.
    """
    from dspine.files.export import export_drafter
    from dspine.files.hub import local_file

    target = options.path("model")
    source = local_file(source, drafter=True)
    with Progress(f"writing {output}") as progress:
        exported = export_drafter(
            source,
            output,
            options.choice("to"),
            dtype=None if options.choice("dtype") == "auto" else options.choice("dtype"),
            target=None if target is None else local_file(target),
            overwrite=options.switch("force"),
            progress=progress.update,
        )
    for warning in exported.warnings:
        warn(warning)
    click.echo(exported.command)
    for note in exported.notes:
        click.echo(f"  {note}", err=True)
