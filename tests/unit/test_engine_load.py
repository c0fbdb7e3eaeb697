"""What loading decides before and beside the library: options, policies, the verdict."""

from __future__ import annotations

import os

import pytest

from dspine.engine.adaptive import AdaptiveWidth
from dspine.engine.costs import CostTable
from dspine.engine.load import load
from dspine.engine.measure import Conditions, needs_flash
from dspine.engine.policies import does_not_pay, make_policy
from dspine.engine.width import FixedWidth
from dspine.errors import UsageError
from dspine.machine import physical_cores

COSTS = CostTable({1: 13.0, 16: 60.0}, {2: 1.0, 8: 4.0})


def test_measured_costs_make_the_policy_adaptive() -> None:
    policy = make_policy(COSTS, None, block_size=8, most=16, curve=(0.5,) * 7)
    assert isinstance(policy, AdaptiveWidth)
    assert (policy.most("dspine"), policy.most("ngram")) == (7, 15)


def test_a_given_number_is_kept_up_to_the_block() -> None:
    policy = make_policy(COSTS, 30, block_size=8, most=16)
    assert isinstance(policy, FixedWidth)
    assert (policy.most("dspine"), policy.most("ngram")) == (7, 15)
    policy = make_policy(COSTS, 2, block_size=8, most=16)
    assert (policy.most("dspine"), policy.most("ngram")) == (2, 2)


def test_without_measurements_the_block_is_used_whole() -> None:
    policy = make_policy(None, None, block_size=8, most=16)
    assert isinstance(policy, FixedWidth)
    assert (policy.most("dspine"), policy.most("ngram")) == (7, 15)


def test_the_verdict_names_its_numbers() -> None:
    costs, drafts = {1: 10.0, 2: 19.0, 3: 28.0}, {2: 1.0, 3: 1.5}
    # Width 2: 1.5 tokens for 20 ms; width 3: 1.75 tokens for 29.5 ms.
    text = does_not_pay(costs, drafts, [0.5], 3)
    assert "width of 2" in text and "1.50 tokens" in text and "2.00 plain" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"proposer": "fast"}, "auto, drafter, ngram, none"),
        ({"n_ctx": 0}, "n_ctx is 0"),
        ({"n_batch": 2, "parallel": 3}, "n_batch is 2 for 3 sequences"),
        ({"n_threads": -1}, "n_threads is -1"),
        ({"spec_draft_n_max": 0}, "spec_draft_n_max is 0"),
        ({"cache_type_v": "q8_0", "flash_attention": False}, "value cache is q8_0 .* -fa auto"),
    ],
)
def test_options_are_checked_before_anything_is_loaded(
    options: dict[str, object], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        load("nowhere.gguf", **options)  # type: ignore[arg-type]


def test_quantised_value_caches_need_flash_attention() -> None:
    assert [needs_flash(name) for name in ("f16", "bf16", "f32", "q8_0")] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("flash", "cache", "settings"),
    [
        (None, "f16", (False, True)),
        (None, "q8_0", (True,)),
        (True, "f16", (True,)),
        (False, "f16", (False,)),
    ],
)
def test_both_attention_settings_are_measured_where_there_is_a_choice(
    flash: bool | None, cache: str, settings: tuple[bool, ...]
) -> None:
    assert Conditions(64, 1, flash, "f16", cache, 16).settings == settings
    settled = Conditions(64, 1, flash, "f16", cache, 16, is_settled=True)
    assert settled.settings == settings[-1:]


def test_physical_cores_are_at_most_what_may_be_used() -> None:
    assert 1 <= physical_cores() <= len(os.sched_getaffinity(0))
