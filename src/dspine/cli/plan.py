"""`dspine plan`: memory, context and speed of a pair before anything is loaded."""

from __future__ import annotations

from dspine.cli.options import Options, settings_command


@settings_command("plan")
def command(options: Options) -> None:
    """Tell what fits into memory, and how fast it will be, without loading anything."""
    from dspine.cli.planning import run_plan

    run_plan(options)
