"""`dspine convert`: a checkpoint folder (SpecForge's layout) becomes a drafter GGUF."""

from __future__ import annotations

from pathlib import Path

import click

from dspine.cli.options import Options, settings_command
from dspine.cli.output import Progress, size, warn

THINKING = {"keep": None, "on": True, "off": False}


@settings_command(
    "convert",
    click.Argument(["folder"], type=click.Path(path_type=Path)),
    click.Argument(["output"], type=click.Path(path_type=Path)),
)
def command(options: Options, folder: Path, output: Path) -> None:
    """Write the drafter in FOLDER as the GGUF file OUTPUT, which `-md` takes.

    FOLDER is a checkpoint, or the output of `train fit`, whose best checkpoint is taken.
    """
    from dspine.files.convert import convert_checkpoint

    with Progress(f"writing {output}") as progress:
        warnings = convert_checkpoint(
            folder,
            output,
            dtype=options.choice("dtype"),
            target=options.path("model"),
            thinking=THINKING[options.choice("thinking")],
            overwrite=options.switch("force"),
            progress=progress.update,
        )
    for warning in warnings:
        warn(warning)
    click.echo(f"{output}: {size(output.stat().st_size)}")
