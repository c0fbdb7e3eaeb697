"""`dspine bench`: speed and acceptance of several configurations in one interleaved run."""

from __future__ import annotations

from dspine.cli.measuring import (
    chosen_prompts,
    common_options,
    number_list,
    pair_of,
    run_plan,
)
from dspine.cli.options import Options, settings_command


@settings_command("bench")
def command(options: Options) -> int:
    """Measure configurations side by side: every prompt is answered by each in turn."""
    from dspine.bench.configuration import parse_configurations
    from dspine.bench.measurement import BenchPlan

    pair = pair_of(options)
    plan = BenchPlan(
        kind="bench",
        configurations=tuple(
            parse_configurations(
                options.texts("config"),
                common_options(options, pair),
                has_drafter=pair.drafter is not None,
            )
        ),
        prompts=tuple(chosen_prompts(options, ["mix"])),
        repeats=options.number("repeats"),
        temperatures=number_list(options, "temps", float),
        depths=number_list(options, "depth", int),
        max_tokens=options.number("predict"),
        seed=0,
        raw=options.switch("raw"),
    )
    return run_plan(options, plan, pair)
