"""`dspine quantize`: a drafter GGUF with smaller matrices."""

from __future__ import annotations

from pathlib import Path

import click

from dspine.cli.options import Options, settings_command
from dspine.cli.output import Progress, size, warn


@settings_command(
    "quantize",
    click.Argument(["source"], type=click.Path(path_type=Path), metavar="IN"),
    click.Argument(["output"], type=click.Path(path_type=Path), metavar="OUT"),
)
def command(options: Options, source: Path, output: Path) -> None:
    """Write the drafter GGUF IN with smaller matrices as OUT, which `-md` takes.

    Norms stay f32, and in the K types injection and transfer codes q8_0. IN holds f32, f16 or bf16.
    """
    from dspine.files.hub import local_file
    from dspine.files.quantise import quantise_drafter
    from dspine.llama.library import find_library
    from dspine.machine import physical_cores

    find_library(options.path("library"))
    source = local_file(source, drafter=True)
    with Progress(f"writing {output}") as progress:
        warnings = quantise_drafter(
            source,
            output,
            options.choice("type"),
            allow_requantize=options.switch("allow_requantize"),
            overwrite=options.switch("force"),
            threads=options.positive("threads") or physical_cores(),
            progress=progress.update,
        )
    for warning in warnings:
        warn(warning)
    click.echo(
        f"{output}: {size(output.stat().st_size)}, {source.name}: {size(source.stat().st_size)}"
    )
