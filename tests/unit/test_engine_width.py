"""The choice of width: hand-computed cases and simulated devices."""

from __future__ import annotations

import pytest

from dspine.engine.proposal import NOTHING, Ask, Proposal
from dspine.engine.waiting import Copies
from dspine.engine.width import (
    FixedWidth,
    best_width,
    copying_ms,
    expected_tokens,
    plan_widths,
)


def test_expected_tokens_of_a_conditional_curve() -> None:
    # 1 + 0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 0.8 (the last value holds)
    assert expected_tokens([0.5, 0.8], 4) == pytest.approx(1 + 0.5 + 0.4 + 0.32)
    assert expected_tokens([], 8) == 1.0
    assert expected_tokens([0.9], 1) == 1.0


def test_a_flat_cost_gives_the_full_width() -> None:
    costs = dict.fromkeys(range(1, 17), 10.0)
    choice = best_width(costs, {}, [0.8], 16)
    assert choice.width == 16
    assert choice.speedup == pytest.approx((1 - 0.8**16) / 0.2)


def test_a_steep_cost_gives_a_small_width() -> None:
    costs = {n: 10.0 * (0.4 + 0.6 * n) for n in range(1, 17)}
    # Width 2: 1.8 tokens in 16 ms; width 3: 2.44 in 22 ms; width 4: 2.952 in 28 ms.
    assert best_width(costs, {}, [0.8], 16).width == 2


def test_high_acceptance_at_three_times_the_cost_is_switched_off() -> None:
    costs = {1: 10.0, **{n: 10.0 * n for n in range(2, 9)}}
    choice = best_width(costs, dict.fromkeys(range(2, 9), 10.0), [0.95], 8)
    assert (choice.width, choice.speedup) == (1, 1.0)


def test_the_drafter_costs_time_too() -> None:
    costs = dict.fromkeys(range(1, 9), 10.0)
    assert best_width(costs, {}, [0.3], 8).width > 1
    assert best_width(costs, dict.fromkeys(range(2, 9), 5.0), [0.3], 8).width == 1


def test_a_gain_within_the_noise_is_none() -> None:
    assert best_width({1: 10.0, 2: 14.9}, {}, [0.5], 2).width == 1


def test_attention_and_widths_are_chosen_together() -> None:
    # Off is cheaper for one row, on for many: the drafter's acceptance decides.
    rows = {False: {1: 8.0, 8: 40.0}, True: {1: 10.0, 8: 12.0}}
    good = plan_widths(rows, {2: 1.0, 8: 1.0}, [0.9], [0.5], 16, 8)
    assert good.flash_attention is True
    assert good.drafter is not None and good.drafter.width == 8
    bad = plan_widths(rows, {2: 1.0, 8: 1.0}, [0.01], [0.01], 16, 8)
    assert bad.flash_attention is False
    assert bad.drafter is not None and bad.drafter.width == 1
    none = plan_widths(rows, {}, [], [0.9], 16, 8)
    assert none.drafter is None and none.ngram.width > 8


def test_fixed_width_keeps_what_it_was_told() -> None:
    policy = FixedWidth({"dspine": 3})
    request = Ask(1, 10, 20)
    assert policy.ask([], request, 0) == 3
    assert len(policy.choose(proposal("dspine", [0.1] * 7)).tokens) == 3
    found = proposal("ngram", [0.9])
    assert policy.ask([found], request, 0) == 0
    assert policy.choose(NOTHING) == NOTHING, "no drafts of this proposer were asked for"
    both = FixedWidth({"dspine": 3, "ngram": 1})
    assert both.ask([found], request, 0) == 0
    assert both.choose(NOTHING) == found
    weak = proposal("ngram", [0.3, 0.9])
    assert both.ask([weak], request, 0) == 3, "a weak repeat is left to the drafter"
    assert both.ask([weak], request, None) == 0, "which may not be able to draft"
    assert both.choose(NOTHING) == weak.first(1)


def proposal(name: str, scores: list[float]) -> Proposal:
    return Proposal(tuple(range(len(scores))), tuple(scores), name)


def test_taking_drafts_back_counts_where_it_copies_a_state() -> None:
    rows = {count: 10.0 + 2.0 * (count - 1) for count in range(1, 9)}
    none, some = Copies(0.0, 0.0), Copies(1.0, 0.5)
    # Drafts that are always right cost the copy before the block alone.
    assert copying_ms(rows, [1.0], 4, some, 2.0) == pytest.approx(1.0)
    # The first draft is always wrong: one row of 2 ms is decoded again, and then carried or
    # stored, whichever is less: a step that is plain loses (2 - 1) * 10 ms.
    assert copying_ms(rows, [0.0], 2, some, 2.0) == pytest.approx(1.0 + 0.5 + 2.0 + 2.0)
    assert copying_ms(rows, [0.0], 2, some, 1.1) == pytest.approx(1.0 + 0.5 + 2.0 + 1.0)
    free = best_width(rows, {}, [0.5], 8)
    assert best_width(rows, {}, [0.5], 8, none).speedup < free.speedup
    dear = best_width(rows, {}, [0.5], 8, Copies(8.0, 8.0))
    assert free.width > 1 and dear.width == 1


def test_a_request_may_want_another_fixed_width_up_to_the_block() -> None:
    policy = FixedWidth({"dspine": 3, "ngram": 3}, limits={"dspine": 7, "ngram": 15})
    seen = []
    for wanted in (None, 5, 30, 0, None):
        policy.begin(wanted)
        seen.append((policy.most("dspine"), policy.most("ngram"), policy.most("grammar")))
    assert seen == [(3, 3, 3), (5, 5, 5), (7, 15, 15), (0, 0, 0), (3, 3, 3)]
    narrow = FixedWidth({"dspine": 3})
    narrow.begin(5)
    assert narrow.most("dspine") == 3
