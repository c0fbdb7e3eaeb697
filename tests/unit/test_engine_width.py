"""The choice of width: hand-computed cases and simulated devices."""

from __future__ import annotations

import pytest

from dspine.engine.width import (
    FixedWidth,
    MeasuredWidth,
    best_width,
    expected_tokens,
    interpolate,
    plan_widths,
)


def test_expected_tokens_of_a_conditional_curve() -> None:
    # 1 + 0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 0.8 (the last value holds)
    assert expected_tokens([0.5, 0.8], 4) == pytest.approx(1 + 0.5 + 0.4 + 0.32)
    assert expected_tokens([], 8) == 1.0
    assert expected_tokens([0.9], 1) == 1.0


def test_costs_between_and_beyond_measured_counts_are_linear() -> None:
    table = {2: 10.0, 4: 14.0, 8: 30.0}
    assert interpolate(table, 3) == pytest.approx(12.0)
    assert interpolate(table, 8) == 30.0
    assert interpolate(table, 10) == pytest.approx(38.0)
    assert interpolate(table, 1) == 10.0
    assert interpolate({}, 5) == 0.0


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


def test_a_scored_proposal_is_cut_where_its_scores_stop_paying() -> None:
    costs = {1: 10.0, 2: 13.0, 3: 16.0, 4: 19.0}
    policy = MeasuredWidth({"ngram": 3, "dspine": 2}, costs, frozenset({"ngram"}), {"dspine": 0.2})
    # Rates: 1/10, 1.9/13, 2.71/16, 2.755/19 -> two drafts.
    assert policy.keep("ngram", (0.9, 0.9, 0.05)) == 2
    assert policy.worth("ngram", (0.9, 0.9, 0.05)) == pytest.approx(2.71 / 16)
    # A weak draft is carried by a strong one after it only if together they pay.
    assert policy.keep("ngram", (0.1, 0.9)) == 0
    assert policy.keep("dspine", (0.01, 0.01, 0.01)) == 2
    assert policy.prospect("dspine") == 0.2
    assert policy.prospect("unknown") == pytest.approx(0.1)


def test_fixed_width_keeps_what_it_was_told() -> None:
    policy = FixedWidth({"dspine": 3})
    assert (policy.keep("dspine", (0.1,) * 7), policy.keep("ngram", (1.0,))) == (3, 0)
    assert policy.drafts("ngram") == 0
