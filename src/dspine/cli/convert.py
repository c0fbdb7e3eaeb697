"""`dspine convert`: a checkpoint folder (SpecForge's layout) becomes a drafter GGUF, or back."""

from __future__ import annotations

from pathlib import Path

import click

from dspine.cli.options import Options, settings_command
from dspine.cli.output import Progress, size, warn

THINKING = {"keep": None, "on": True, "off": False}


@settings_command(
    "convert",
    click.Argument(["source"], type=click.Path(path_type=Path), metavar="IN"),
    click.Argument(["output"], type=click.Path(path_type=Path), metavar="OUT"),
)
def command(options: Options, source: Path, output: Path) -> None:
    """Write the drafter IN as OUT: a GGUF if OUT ends in .gguf, else a checkpoint folder.

    IN is a checkpoint folder, the output of `train fit`, whose best checkpoint is taken, or a
    drafter GGUF.
    """
    from dspine.files.convert import convert_checkpoint
    from dspine.files.hub import local_file

    target = options.path("model")
    source = local_file(source, drafter=True)
    with Progress(f"writing {output}") as progress:
        warnings = convert_checkpoint(
            source,
            output,
            dtype=None if options.choice("dtype") == "auto" else options.choice("dtype"),
            target=None if target is None else local_file(target),
            thinking=THINKING[options.choice("thinking")],
            overwrite=options.switch("force"),
            progress=progress.update,
        )
    for warning in warnings:
        warn(warning)
    click.echo(f"{output}: {size(bytes_of(output))}")


def bytes_of(path: Path) -> int:
    """Size of a file, or of the files in a folder."""
    files = path.iterdir() if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files)
