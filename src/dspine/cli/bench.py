"""`dspine bench`: speed and acceptance of several configurations in one interleaved run."""

from __future__ import annotations

from dspine.cli.measuring import make_plan, pair_of, run_plan
from dspine.cli.options import Options, settings_command


@settings_command("bench")
def command(options: Options) -> int:
    """Measure configurations side by side: every prompt is answered by each in turn."""
    pair = pair_of(options)
    plan = make_plan(options, "bench", pair, options.texts("config"), ["mix"])
    return run_plan(options, plan, pair)
