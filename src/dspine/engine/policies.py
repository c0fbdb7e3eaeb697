"""Which width policy an engine gets, and what to say where a drafter does not pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from dspine.engine.adaptive import AdaptiveWidth
from dspine.engine.costs import CostTable, StepCosts
from dspine.engine.proposal import DRAFTER, NGRAM
from dspine.engine.waiting import Copies
from dspine.engine.width import FixedWidth, WidthChoice, WidthPolicy, nearest_width

UNKNOWN_CURVE = (0.4,)
"""Acceptance taken for a drafter whose file does not say."""


def policy_maker(
    costs: CostTable | None,
    n_max: int | None,
    *,
    block_size: int,
    most: int,
    curve: Sequence[float],
    snapshots: int,
    replay: int,
    parallel: int,
    follows: bool = False,
) -> Callable[[], WidthPolicy]:
    """Makes one policy for each of `parallel` sequences, as `make_policy` describes. What all of
    them learn of the costs of several sequences is common to them.
    """

    @cache
    def shared(sequences: int) -> StepCosts:
        assert costs is not None
        return StepCosts(costs, most + replay, sequences=sequences)

    def make() -> WidthPolicy:
        return make_policy(
            costs,
            n_max,
            block_size=block_size,
            most=most,
            curve=curve,
            snapshots=snapshots,
            replay=replay,
            shared=shared if costs is not None and parallel > 1 else None,
            follows=follows,
        )

    return make


def make_policy(
    costs: CostTable | None,
    n_max: int | None,
    *,
    block_size: int,
    most: int,
    curve: Sequence[float] = (),
    snapshots: int = 0,
    replay: int = 0,
    shared: Callable[[int], StepCosts] | None = None,
    follows: bool = False,
) -> WidthPolicy:
    """How far each proposer goes: as pays at each step, or as `--spec-draft-n-max` says.

    `block_size` is the drafter's (1 without one), `curve` its stored acceptance, `most` the rows
    of a verify, in front of which up to `replay` confirmed ones may be decoded again; where states
    are kept for rows, there are `snapshots` of them. `shared(n)` are the costs of n sequences.
    `follows`: the drafter can follow a lookup's drafts.
    """
    steps = StepCosts(costs, most + replay) if costs is not None else None
    if n_max is None and steps is not None:
        return AdaptiveWidth(
            steps,
            most_drafts=most - 1,
            block_size=block_size,
            curve=curve,
            shared=shared,
            follows=follows,
        )
    limits = {DRAFTER: block_size - 1, NGRAM: most - 1}
    if snapshots:
        limits = {name: min(limit, snapshots) for name, limit in limits.items()}
    widths = limits
    if n_max is not None:
        widths = {name: min(n_max, limit) for name, limit in limits.items()}
    return FixedWidth(widths, steps, limits)


def assumes_acceptance(drafter: Path) -> str:
    """What stands in for an acceptance that nobody measured, and how to measure it."""
    return (
        f"{drafter.name} does not say how many of its drafts are accepted, so the width is chosen "
        f"as if it were {UNKNOWN_CURVE[0]:.0%} at every slot: `dspine train eval` measures it, "
        f"`dspine train fit --held-out` and a new `dspine convert` write it into the file"
    )


def does_not_pay(
    cost_ms: Mapping[int, float],
    draft_ms: Mapping[int, float],
    curve: Sequence[float],
    block_size: int,
    copies: Copies | None = None,
) -> str:
    """The verdict with its numbers: what the least bad width gives and what it costs.

    `copies`: what taking drafts back costs, if it does.
    """
    nearest = nearest_width(cost_ms, draft_ms, curve, block_size, copies)
    assert nearest is not None  # a block has at least one draft
    return (
        f"this drafter does not pay here: on text that suits it, its best width of "
        f"{nearest.width} would {promise(nearest)}"
    )


def promise(choice: WidthChoice) -> str:
    """What a width gives and costs, as the end of a sentence after `would`."""
    cost = choice.expected_tokens / choice.speedup
    return f"give {choice.expected_tokens:.2f} tokens a step at the cost of {cost:.2f} plain ones"
