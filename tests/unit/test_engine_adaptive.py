"""The adaptive policy on simulated devices, whose acceptance it has to find out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from dspine.drafters.base import Drawn
from dspine.engine.acceptance import BINS, Reliability, ScorePrior, score_bin
from dspine.engine.adaptive import PROBE_FIRST, AdaptiveWidth
from dspine.engine.costs import EVERY, CostTable, StepCosts, interpolate
from dspine.engine.proposal import NOTHING, Ask, Proposal
from dspine.engine.width import Outcome
from tests.support.simulated_device import (
    MOST,
    Device,
    SimulatedStep,
    best_fixed,
    expected_speedup,
    simulate,
    speedup,
    worst_window,
)

FLAT = Device({1: 10.0, 16: 11.0}, {2: 0.5, 8: 1.0})
MIDDLE = Device({1: 10.0, 2: 12.0, 4: 14.5, 8: 24.0, 16: 42.0}, {2: 2.5, 8: 6.5})
STEEP = Device({1: 10.0, 2: 14.0, 16: 112.0}, {2: 0.5, 8: 1.5})
TRIPLE = Device({1: 10.0, 2: 20.0, 16: 160.0}, {2: 10.0, 8: 10.0})
DEVICES = (FLAT, MIDDLE, STEEP, TRIPLE)


def second_half(steps: list[SimulatedStep]) -> list[int]:
    return [step.drafts for step in steps[len(steps) // 2 :]]


def constant(rate: float) -> Callable[[int], float]:
    return lambda position: rate


@pytest.mark.parametrize("seed", range(3))
def test_a_flat_cost_gives_the_full_width(seed: int) -> None:
    steps = simulate(FLAT, FLAT.policy(), constant(0.9), tokens=1000, seed=seed)
    drafts = second_half(steps)
    assert drafts.count(7) > 0.9 * len(drafts)
    assert speedup(FLAT, steps) > 0.95 * best_fixed(FLAT, 0.9)[1]


@pytest.mark.parametrize("seed", range(3))
def test_a_steep_cost_gives_one_small_width(seed: int) -> None:
    assert best_fixed(STEEP, 0.8)[0] == 1
    steps = simulate(STEEP, STEEP.policy(), constant(0.8), tokens=1000, seed=seed)
    drafts = second_half(steps)
    assert drafts.count(1) > 0.6 * len(drafts)
    assert max(drafts) <= 4
    assert speedup(STEEP, steps) > 0.95 * best_fixed(STEEP, 0.8)[1]


def test_high_acceptance_at_three_times_the_cost_is_switched_off() -> None:
    steps = simulate(TRIPLE, TRIPLE.policy(), constant(0.95), tokens=600)
    assert sum(step.drafts > 0 for step in steps) < 0.01 * len(steps)
    assert speedup(TRIPLE, steps) > 0.98


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.4, 0.6])
@pytest.mark.parametrize("device", DEVICES)
def test_no_200_tokens_cost_three_per_cent_more_than_plain_ones(
    device: Device, rate: float
) -> None:
    for seed in range(3):
        steps = simulate(device, device.policy(), constant(rate), tokens=800, seed=seed)
        assert worst_window(device, steps) <= 1.03


@pytest.mark.parametrize("device", DEVICES)
def test_acceptance_that_drops_to_zero_costs_at_most_three_per_cent(device: Device) -> None:
    def rate(position: int) -> float:
        return 0.9 if position < 400 else 0.0

    for seed in range(6):
        for lookup in (None, rate):
            steps = simulate(device, device.policy(), rate, lookup=lookup, tokens=1000, seed=seed)
            assert worst_window(device, steps) <= 1.03
            after = [step for step in steps if step.position >= 400]
            assert worst_window(device, after) <= 1.03


def test_even_drafts_that_are_right_until_they_are_trusted_cost_little() -> None:
    """The worst text there is: chains are right while few are verified, wrong while many are."""
    policy = MIDDLE.policy()
    trusted = [0]

    def spiteful(_position: int) -> float:
        trusted[0] += 1
        return 0.95 if trusted[0] % 6 < 3 else 0.0

    steps = simulate(MIDDLE, policy, spiteful, tokens=2000)
    assert worst_window(MIDDLE, steps) <= 1.03


@pytest.mark.parametrize("seed", range(4))
def test_a_rise_is_followed_within_eight_steps(seed: int) -> None:
    rise = simulate(FLAT, FLAT.policy(), lambda p: 0.2 if p < 300 else 0.95, tokens=600, seed=seed)
    after = [step for step in rise if step.position >= 300]
    assert {step.drafts for step in after[8:28]} == {7}


@pytest.mark.parametrize("device", [FLAT, MIDDLE, STEEP])
@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_a_fall_is_followed_within_eight_steps(device: Device, rate: float) -> None:
    for seed in range(6):
        fall = simulate(
            device, device.policy(), lambda p: 0.95 if p < 300 else rate, tokens=600, seed=seed
        )
        after = [step for step in fall if step.position >= 300][8:28]
        # Where rows are nearly free, a draft more or less is a matter of one per cent.
        assert max(step.drafts for step in after) <= (3 if device is FLAT else 0)
        gained = np.mean([expected_speedup(device, step, rate) for step in after])
        assert gained >= 0.965 * best_fixed(device, rate)[1]


def test_a_network_that_was_off_is_back_within_eight_steps_of_a_good_probe() -> None:
    waits = []
    for seed in range(6):
        steps = simulate(
            MIDDLE,
            MIDDLE.policy(),
            lambda p: 0.0 if 200 <= p < 500 else 0.95,
            tokens=1000,
            seed=seed,
        )
        after = [step for step in steps if step.position >= 500]
        probe = next(i for i, step in enumerate(after) if step.asked and step.confirmed > 1)
        assert max(step.drafts for step in after[probe : probe + 8]) >= 3
        waits.append(probe)
    assert max(waits) <= 150, "in plain steps; the interval between probes is bounded"


def test_lookups_are_watched_while_they_are_not_used() -> None:
    """They cost nothing, so that their return is seen without a probe."""
    costs = StepCosts(STEEP.table(), MOST)
    policy = AdaptiveWidth(costs, most_drafts=MOST - 1)
    steps = simulate(
        STEEP,
        policy,
        constant(0.0),
        lookup=lambda p: 0.0 if 200 <= p < 500 else 0.9,
        tokens=800,
    )
    off = [step.drafts for step in steps if 210 <= step.position < 500]
    assert sum(off) <= 2
    back = [step.drafts for step in steps if step.position >= 500]
    assert min(back[8:20]) >= 1
    assert not any(step.asked for step in steps)


def test_the_better_of_two_proposers_is_found() -> None:
    for lookup, network in ((0.9, 0.3), (0.2, 0.95)):
        steps = simulate(
            FLAT, FLAT.policy(), constant(network), lookup=constant(lookup), tokens=800
        )
        names = [step.proposer for step in steps[len(steps) // 2 :]]
        wanted = "ngram" if lookup > network else "dspine"
        assert names.count(wanted) > 0.8 * len(names)


@pytest.mark.parametrize("device", DEVICES)
def test_a_network_that_adds_nothing_to_the_lookups_costs_next_to_nothing(device: Device) -> None:
    def rate(position: int) -> float:
        return 0.8 if position // 50 % 2 else 0.3

    alone = times = 0.0
    for seed in range(4):
        lookups = AdaptiveWidth(StepCosts(device.table(), MOST), most_drafts=MOST - 1)
        steps = simulate(device, lookups, constant(0.0), lookup=rate, tokens=2000, seed=seed)
        alone += sum(step.ms for step in steps)
        steps = simulate(
            device, device.policy(), constant(0.15), lookup=rate, tokens=2000, seed=seed
        )
        times += sum(step.ms for step in steps)
    assert times <= 1.01 * alone


def test_informed_scores_decide_chain_by_chain() -> None:
    """Good and bad blocks in turn: only the good ones are verified far."""
    steps = simulate(
        MIDDLE,
        MIDDLE.policy(),
        lambda p: 0.97 if p // 40 % 2 else 0.5,
        tokens=2000,
        informed=True,
    )
    late = steps[len(steps) // 2 :]
    good = [step.drafts for step in late if step.position // 40 % 2 and step.asked]
    bad = [step.drafts for step in late if step.position // 40 % 2 == 0 and step.asked]
    assert np.mean(good) > 1.5 * np.mean(bad)


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_not_changed_for_less_than_the_change_costs(seed: int) -> None:
    rebuilding = Device({1: 10.0, 8: 16.0, 16: 26.0}, {2: 0.3, 8: 0.6}, change_ms=2.5)
    unaware = Device(rebuilding.rows_ms, rebuilding.draft_ms)
    chances = np.random.default_rng(9).choice([0.8, 0.6], 3000)

    def lookup(position: int) -> float:
        return float(chances[position])

    def run(policy: AdaptiveWidth) -> tuple[int, float]:
        steps = simulate(
            rebuilding, policy, constant(0.0), lookup=lookup, tokens=1500, seed=seed, informed=True
        )
        changes = sum(a.drafts != b.drafts for a, b in pairwise(steps))
        return changes, speedup(rebuilding, steps)

    changes, speed = run(rebuilding.policy())
    changes_unaware, speed_unaware = run(unaware.policy())
    assert changes < 0.5 * changes_unaware
    assert speed > 1.03 * speed_unaware


def test_a_change_of_rows_is_no_error_of_the_costs() -> None:
    rebuilding = Device({1: 10.0, 16: 12.0}, {2: 0.3, 8: 0.6}, change_ms=5.0)
    costs = StepCosts(rebuilding.table(), MOST)
    policy = AdaptiveWidth(costs, most_drafts=MOST - 1)
    for step in range(4 * EVERY):
        policy.ask([], Ask(0, step, MOST - 1), None)
        drafts = step % 2
        ms = interpolate(rebuilding.rows_ms, drafts + 1) + rebuilding.change_ms
        policy.observe(Outcome(drafts, (step,), draft_ms=0.0, verify_ms=ms))
    assert costs.rows(0)[:2] == pytest.approx([10.0, interpolate(rebuilding.rows_ms, 2)])


def test_more_sequences_make_blocks_narrower() -> None:
    device = Device({1: 30.0, 8: 34.0, 16: 40.0, 64: 130.0, 128: 250.0}, {2: 1.0, 8: 2.0})
    widths = []
    for sequences in (1, 8):
        costs = StepCosts(device.table(), MOST, sequences=sequences)
        policy = AdaptiveWidth(costs, most_drafts=MOST - 1, block_size=8, curve=(0.8,) * 7)
        steps = simulate(device, policy, constant(0.8), tokens=400)
        widths.append(np.mean(second_half(steps)))
    assert widths[1] <= 0.6 * widths[0]


def test_drafts_that_are_made_together_cost_each_sequence_less() -> None:
    table = CostTable({1: 10.0, 8: 12.0}, {2: 1.0, 8: 2.0})
    shares = [StepCosts(table, 8, sequences=count).drafts()[8] for count in (1, 2, 4)]
    assert shares[0] == 2.0 and shares == sorted(shares, reverse=True)
    assert all(count * ms > 2.0 for count, ms in zip((2, 4), shares[1:], strict=True))


def shared_policy(rows: dict[int, float]) -> AdaptiveWidth:
    table = CostTable(rows, {2: 0.01, 8: 0.02}, depth=1)
    policy = AdaptiveWidth(
        StepCosts(table, 16),
        most_drafts=15,
        block_size=8,
        curve=(0.8,),
        shared=lambda count: StepCosts(table, 16, sequences=count),
    )
    policy.share(2)
    return policy


def test_the_outlook_says_what_more_rows_would_give_and_cost() -> None:
    policy = shared_policy({1: 10.0, 2: 12.0, 32: 42.0})
    policy.ask([offer("ngram", [1, 2, 3], [0.9, 0.9, 0.9])], Ask(0, 0, 15), None)
    chosen = policy.choose(NOTHING)
    tokens, prices = policy.outlook()
    assert len(tokens) == len(prices) == 16 and tokens[0] == 1.0
    # Each draft adds its chance to be reached and right; beyond the chain nothing is added.
    gains = [after - before for before, after in pairwise(tokens)]
    assert gains[0] > gains[1] > gains[2] > 0.0 and not any(gains[3:])
    assert prices == sorted(prices)
    assert prices[7] / prices[0] == pytest.approx((12.0 + 14.0) / 12.0)  # 16 rows against 2
    assert policy.widened(2).tokens == (1, 2) and policy.widened(15).tokens == (1, 2, 3)
    assert policy.widened(0) == NOTHING
    assert policy.widened(len(chosen.tokens)).tokens == chosen.tokens


def test_what_was_drawn_is_not_forgotten_when_others_leave_no_row_for_it() -> None:
    policy = shared_policy({1: 10.0, 32: 20.0})
    ask_until(policy, [])
    drawn = tuple(Drawn(token, np.array([token]), np.array([1.0])) for token in (1, 2, 3))
    policy.choose(Proposal((1, 2, 3), (0.9, 0.9, 0.9), "dspine", drawn))
    assert policy.widened(0).drawn == drawn[:1]
    assert policy.widened(2).drawn == drawn


def test_a_decode_that_became_dear_is_noticed() -> None:
    wide = simulate(FLAT, FLAT.policy(), constant(0.8), tokens=400)
    slow = FLAT.policy()
    # Measured flat; in truth every row of a wide decode costs like a plain token.
    for _ in range(200):
        slow.ask([], Ask(0, 0, 15), 0)
        slow.observe(Outcome(7, (1,), verify_ms=60.0))
        slow.observe(Outcome(0, (1,), verify_ms=10.0))
    after = simulate(FLAT, slow, constant(0.8), tokens=400, slow=lambda p: 1.0)
    assert np.mean(second_half(wide)) > 5
    assert after[0].drafts < 5


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("device", [FLAT, MIDDLE])
def test_drafts_that_are_cheaper_after_plain_steps_are_tried_again(
    device: Device, rate: float
) -> None:
    """As where a clock ran faster meanwhile: the expected loss of asking is below nothing."""
    for seed in range(3):
        policy, chance = device.policy(), np.random.default_rng(seed)
        asked, was_warm = [0], False
        for step in range(600):
            asked.append(policy.ask([], Ask(0, step, 15), 0))
            wanted = asked[-1]
            chosen = policy.choose(offer("dspine", [1] * wanted, [0.5] * wanted))
            wrong = np.flatnonzero(chance.random(len(chosen.tokens)) >= rate)
            right = int(wrong[0]) if len(wrong) else len(chosen.tokens)
            expected = interpolate(device.draft_ms, wanted + 1) if wanted else 0.0
            spent = expected * (1.0 if was_warm else 0.3)
            policy.observe(Outcome(len(chosen.tokens), (*[1] * right, 9), spent))
            was_warm = wanted > 0
        assert any(asked[300:]), "it never asks again"


# -- parts ----------------------------------------------------------------------------------------


def offer(name: str, tokens: list[int], scores: list[float]) -> Proposal:
    return Proposal(tuple(tokens), tuple(scores), name)


def ask_until(policy: AdaptiveWidth, free: list[Proposal]) -> int:
    """Plain steps until the policy asks the drafter."""
    for _ in range(40):
        if asked := policy.ask(free, Ask(0, 0, 15), 0):
            return asked
        policy.choose(NOTHING)
        policy.observe(Outcome(0, (9,)))
    raise AssertionError("it never asked")


def test_a_chain_that_was_right_so_far_is_used_to_its_end() -> None:
    policy = MIDDLE.policy()
    ask_until(policy, [])
    chosen = policy.choose(offer("dspine", [1, 2, 3, 4, 5, 6, 7], [0.8] * 7))
    verified = len(chosen.tokens)
    assert 0 < verified < 6
    policy.observe(Outcome(verified, tuple(range(1, verified + 2))))
    asked = policy.ask([], Ask(0, 5, 15), 0)
    unlikely = offer("dspine", [8] * asked, [0.05] * asked) if asked else NOTHING
    rest = policy.choose(unlikely)
    assert rest.proposer == "dspine" and rest.tokens[0] == verified + 2


def test_a_question_that_costs_less_than_nothing_is_asked_at_once() -> None:
    """Drafts right after plain steps may have turned out the cheaper ones."""
    policy = MIDDLE.policy()
    asked = [policy._probe(-0.5, 0.1) for _ in range(PROBE_FIRST)]
    assert asked == [False] * (PROBE_FIRST - 1) + [True]


def test_what_was_drawn_decides_nothing() -> None:
    """Choosing by the drawn tokens would change the distribution of the text."""
    candidates = np.array([1, 2, 3], np.int32)
    chances = np.array([0.5, 0.3, 0.2])
    kept = []
    for token in (1, 2, 3):
        policy = FLAT.policy()
        asked = ask_until(policy, [offer("ngram", [1, 1], [0.3, 0.3])])
        drawn = tuple(Drawn(token, candidates, chances) for _ in range(asked))
        chain = offer("dspine", [token] * asked, [0.5] * asked)._replace(drawn=drawn)
        chosen = policy.choose(chain)
        kept.append((chosen.proposer, len(chosen.tokens), len(chosen.drawn)))
    assert len(set(kept)) == 1


def test_agreement_of_two_proposers_is_believed_more() -> None:
    kept = []
    for token in (1, 2):
        policy = MIDDLE.policy()
        asked = ask_until(policy, [offer("ngram", [1, 1, 1, 1], [0.4] * 4)])
        kept.append(len(policy.choose(offer("dspine", [token] * asked, [0.4] * asked)).tokens))
    assert kept[0] > kept[1]


def test_a_map_of_scores_is_learned() -> None:
    chance = np.random.default_rng(0)
    source = Reliability([ScorePrior()])
    for _ in range(3):
        source.begin()
        for _ in range(600):
            score = float(chance.choice([0.3, 0.6, 0.9]))
            source.learn(score_bin(score), bool(chance.random() < score**2))
    found = [source.chance(score_bin(score)) for score in (0.3, 0.6, 0.9)]
    assert found == pytest.approx([0.09, 0.36, 0.81], abs=0.09)


def test_kinds_share_the_shift_but_not_the_map() -> None:
    source = Reliability([ScorePrior(), ScorePrior(0.8)])
    slot = score_bin(0.5)
    other = slot + BINS
    assert source.chance(other) > source.chance(slot)
    before = source.chance(other)
    for _ in range(10):
        source.learn(slot, False)
    assert source.chance(other) < before
    assert all(0.0 < source.chance(index) < 1.0 for index in range(2 * BINS))
    source.begin()
    assert source.chance(other) > 0.5 * before, "another text starts with what is usual"


def test_bins_of_scores_cover_the_ends() -> None:
    assert score_bin(0.0) == 0 < score_bin(0.5) < score_bin(1.0)
    assert score_bin(1e-30) == score_bin(0.0)


def test_costs_between_and_beyond_measured_counts_are_linear() -> None:
    table = {2: 10.0, 4: 14.0, 8: 30.0}
    assert interpolate(table, 3) == pytest.approx(12.0)
    assert interpolate(table, 8) == 30.0
    assert interpolate(table, 10) == pytest.approx(38.0)
    assert interpolate(table, 1) == 10.0
    assert interpolate({}, 5) == 0.0


def test_costs_grow_with_the_context() -> None:
    table = CostTable({1: 10.0, 4: 16.0}, {2: 2.0, 4: 4.0}, 96, {1: 0.01, 4: 0.02}, 0.1)
    costs = StepCosts(table, 4)
    assert costs.rows(96) == costs.rows(100) == pytest.approx([10.0, 12.0, 14.0, 16.0])
    deep = [15.0, 12.0 + 500 * 0.04 / 3, 14.0 + 25 / 3, 26.0]
    assert costs.rows(600) == pytest.approx(deep, rel=0.01)
    assert costs.rows(0)[0] == pytest.approx(9.04)
    assert costs.drafts() == pytest.approx([0.0, 0.0, 2.0, 3.0, 4.0])
    assert costs.draft(3, 12, warm=True) == costs.draft(3, 12, warm=False) == pytest.approx(4.0)


def test_costs_of_several_sequences_are_shares_of_one_decode() -> None:
    costs = StepCosts(CostTable({1: 10.0, 8: 24.0, 32: 72.0}, {}), 4, sequences=8)
    assert costs.rows(0) == pytest.approx([3.0, 5.0, 7.0, 9.0])
    assert costs.drafts() == [0.0] * 5


def test_times_correct_the_costs_slowly_and_within_limits() -> None:
    costs = StepCosts(CostTable({1: 10.0, 8: 20.0}, {2: 2.0, 8: 4.0}), 8)
    costs.observe_rows(10.0, 1, 1000.0)
    assert costs.rows(0)[0] < 10.6, "one stall is no news"
    for _ in range(300):
        costs.observe_rows(costs.rows(0)[7], 8, 40.0)
        costs.observe_rows(costs.rows(0)[0], 1, 10.0)
        costs.observe_draft(costs.drafts()[8], 2.0, warm=True)
    assert costs.rows(0)[7] == pytest.approx(40.0, rel=0.1)
    assert costs.rows(0)[0] == pytest.approx(10.0, rel=0.1)
    assert costs.drafts()[2] == pytest.approx(1.0, rel=0.1)
    for _ in range(1000):
        costs.observe_draft(costs.drafts()[8], 1e9, warm=True)
    assert costs.drafts()[8] == pytest.approx(16.0), "at most four times what was measured"
    costs.observe_rows(0.0, 1, 0.0)


@pytest.mark.parametrize("sequences", [1, 3, 7, EVERY])
def test_a_lasting_change_is_learned_without_going_beyond_it(sequences: int) -> None:
    """Of several sequences each asks before any of them observes."""
    costs = StepCosts(CostTable({1: 10.0}, {}), 4)
    found, seen = [10.0], 0
    while seen < 5 * EVERY:
        expected = costs.rows(0)[0]
        for _ in range(sequences):
            costs.observe_rows(expected, 1, 13.0)
            seen += 1
            if seen % EVERY == 0:
                found.append(10.0 * costs._factors[0])
    assert found == sorted(found)
    assert 12.0 < found[1] < found[-1] <= 13.0
    assert found[-1] == pytest.approx(13.0, rel=0.01)


def test_a_draft_after_plain_steps_has_a_price_of_its_own_and_both_are_learned_soon() -> None:
    costs = StepCosts(CostTable({1: 10.0, 8: 20.0}, {2: 2.0, 8: 4.0}), 8)
    for _ in range(6):
        costs.observe_draft(costs.draft(8, 2, warm=True), 6.0, warm=True)
        costs.observe_draft(costs.draft(8, 2, warm=False), 8.0, warm=False)
    assert costs.draft(8, 2, warm=True) == pytest.approx(6.0, rel=0.1)
    assert costs.draft(8, 2, warm=False) == pytest.approx(8.0, rel=0.1)
    assert costs.drafts()[8] == costs.draft(8, 2, warm=True)


def test_only_drafts_that_follow_a_draft_correct_the_price_of_drafting() -> None:
    costs = StepCosts(CostTable({1: 10.0, 16: 11.0}, {2: 1.0, 8: 1.0}), 16)
    policy = AdaptiveWidth(costs, most_drafts=15, block_size=8, curve=(0.9,) * 7)
    before = costs.drafts()[8]
    prices = []
    for _ in range(3):
        count = policy.ask((), Ask(5, 100, 15), 2)
        assert count > 0
        tokens = tuple(range(20, 20 + count))
        policy.choose(Proposal(tokens, (0.9,) * count, "dspine"))
        policy.observe(Outcome(0, (99,), draft_ms=4.0, verify_ms=10.0))
        prices.append(costs.drafts()[8])
    assert prices[0] == before
    assert before < prices[1] < prices[2]


def test_what_a_grammar_forces_is_verified_and_learned_like_any_free_draft() -> None:
    policy = AdaptiveWidth(StepCosts(CostTable({1: 10.0, 16: 12.0}, {}), 32), most_drafts=15)
    forced = Proposal((7, 8), (0.8, 0.7), "grammar")
    for _ in range(5):
        policy.ask([forced], Ask(1, 10, 15), None)
        chosen = policy.choose(NOTHING)
        assert (chosen.tokens, chosen.proposer) == ((7, 8), "grammar")
        policy.observe(Outcome(2, (7, 8, 9), 0.0, 10.0))
    sure = policy._lookups["grammar"].chance(score_bin(0.7))
    for _ in range(30):
        policy.ask([forced], Ask(1, 10, 15), None)
        policy.observe(Outcome(len(policy.choose(NOTHING).tokens), (7, 3), 0.0, 10.0))
    assert policy._lookups["grammar"].chance(score_bin(0.7)) < sure
