"""`dspine eval`: acceptance length of a drafter on task sets, by real decoding."""

from __future__ import annotations

from dspine.bench.prompts import TASK_SETS
from dspine.cli.measuring import Pair, make_plan, pair_of, run_plan
from dspine.cli.options import Options, settings_command
from dspine.errors import UsageError


@settings_command("eval")
def command(options: Options) -> int:
    """Measure how many tokens a verify gives, with intervals, on public or own tasks."""
    pair = pair_of(options)
    texts = options.texts("config") or (f"drafter,draft={all_slots(pair)}",)
    return run_plan(options, make_plan(options, "eval", pair, texts, TASK_SETS), pair)


def all_slots(pair: Pair) -> int:
    """Drafts of a whole block of the pair's drafter."""
    from dspine.files.drafter_file import read_drafter

    if pair.drafter is None:
        raise UsageError("there is no drafter to measure: give one with -md, or use --config ngram")
    return read_drafter(pair.drafter).config.block_size - 1
