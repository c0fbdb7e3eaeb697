"""`dspine eval`: acceptance length of a drafter on task sets, by real decoding."""

from __future__ import annotations

from dspine.bench.prompts import TASK_SETS
from dspine.cli.measuring import (
    Pair,
    chosen_prompts,
    common_options,
    number_list,
    pair_of,
    run_plan,
)
from dspine.cli.options import Options, settings_command
from dspine.errors import UsageError


@settings_command("eval")
def command(options: Options) -> int:
    """Measure how many tokens a verify gives, with intervals, on public or own tasks."""
    from dspine.bench.configuration import parse_configurations
    from dspine.bench.measurement import BenchPlan

    pair = pair_of(options)
    texts = options.texts("config") or (f"drafter,draft={all_slots(pair)}",)
    plan = BenchPlan(
        kind="eval",
        configurations=tuple(
            parse_configurations(texts, common_options(options, pair), has_drafter=True)
        ),
        prompts=tuple(chosen_prompts(options, TASK_SETS)),
        repeats=options.number("repeats"),
        temperatures=number_list(options, "temps", float),
        depths=number_list(options, "depth", int),
        max_tokens=options.number("predict"),
        seed=0,
        raw=options.switch("raw"),
    )
    return run_plan(options, plan, pair)


def all_slots(pair: Pair) -> int:
    """Drafts of a whole block of the pair's drafter."""
    from dspine.files.drafter_file import read_drafter

    if pair.drafter is None:
        raise UsageError("there is no drafter to measure: give one with -md, or use --config ngram")
    return read_drafter(pair.drafter).config.block_size - 1
