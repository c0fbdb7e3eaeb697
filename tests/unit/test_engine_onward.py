"""Lookups that the drafter follows: who decides, what is learned, and that no text changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dspine.drafters.base import Draw
from dspine.engine.acceptance import BINS, Reliability, ScorePrior, score_bin
from dspine.engine.adaptive import AdaptiveWidth
from dspine.engine.asking import Prices
from dspine.engine.costs import CostTable, StepCosts
from dspine.engine.loop import Run, generate
from dspine.engine.ngram_table import build_table
from dspine.engine.offers import AGREE, ALONE, DIFFER, Offer, kinds_after
from dspine.engine.onward import OnwardProspects
from dspine.engine.proposal import NOTHING, Ask, Proposal
from dspine.engine.proposers import AutoProposer, DrafterProposer, NgramProposer
from dspine.engine.rollback import TrimRollback
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.width import Outcome
from tests.support.engine_runs import PIECES, collect, make_run, run_plain
from tests.support.fake_drafter import Chain, FakeDrafter
from tests.support.fake_target import FakeTarget, mixing, plain_answer
from tests.support.simulated_device import Device, simulate, speedup, worst_window

VOCAB = len(PIECES)
FLAT = Device({1: 10.0, 16: 11.0}, {2: 0.5, 8: 1.0})
MIDDLE = Device({1: 10.0, 2: 12.0, 4: 14.5, 8: 24.0, 16: 42.0}, {2: 2.5, 8: 6.5})
STEEP = Device({1: 10.0, 2: 14.0, 16: 112.0}, {2: 0.5, 8: 1.5})
SURE = score_bin(0.9)


def cheap() -> StepCosts:
    """A machine on which rows and drafts cost little."""
    return StepCosts(CostTable({1: 10.0, 16: 10.8}, {2: 0.3, 8: 0.5}), 16)


def policy(*, follows: bool = True) -> AdaptiveWidth:
    return AdaptiveWidth(cheap(), most_drafts=15, block_size=8, curve=(0.8,) * 7, follows=follows)


def table_of(*tokens: int) -> Proposal:
    return Proposal(tokens, (0.9,) * len(tokens), "table")


def test_what_a_block_gains_beyond_a_lookup() -> None:
    """By hand: after two drafts, right with 0.6, the next ones are right with p each."""
    prospects = OnwardProspects([SURE] * 5)
    p = prospects.reliability.chance(SURE)
    prices = Prices([1.0 + 0.1 * k for k in range(8)], [0.0, 0.0, *[0.3] * 7], [0.0] * 8)
    tokens = [0.6 * sum(p**k for k in range(1, n + 1)) - 0.1 * n for n in range(1, 6)]
    best = max(range(5), key=lambda n: tokens[n])
    found = prospects.judge(0.6, 2, 5, prices)
    assert found.width == best + 4 and found.gain == pytest.approx(tokens[best] - 0.3)
    dear = prices._replace(drafts=[5.0] * 9)
    assert prospects.judge(0.6, 2, 5, dear) == (0, 0.0)
    # Chains that were seen count instead of the typical one, each as far as it goes.
    prospects.add([score_bin(0.02)] * 2)
    assert prospects.judge(0.6, 2, 5, prices).gain == 0.0


def test_agreement_is_with_lookups_that_begin_alike() -> None:
    source = Reliability([ScorePrior()])
    others = [Offer(source, table_of(*tokens), []) for tokens in ((1, 2, 3, 9, 5), (1, 7, 8), (1,))]
    assert kinds_after((1, 2, 3, 4, 5), 2, others) == [AGREE, DIFFER, ALONE]


def test_a_lead_is_neither_learned_twice_nor_lost() -> None:
    source, lookup = Reliability([ScorePrior()] * 3), table_of(1, 2)
    led = lookup.continued((3, 4), (0.9, 0.9), "dspine")
    offer = Offer(source, led, [SURE, SURE], lead=(0.5, 0.25))
    p = source.chance(SURE)
    assert list(offer.reaches()) == pytest.approx([0.5, 0.125, 0.125 * p, 0.125 * p * p])
    assert offer.expected(2) == pytest.approx([1.0, 1.5, 1.625])
    assert offer.follow((1,)) and source.chance(SURE) == p, "the first drafts are the lookup's"
    rest = offer.rest(15)
    assert (rest.proposal.tokens, rest.lead, rest.slots) == ((2, 3, 4), (0.25,), [SURE, SURE])
    assert offer.follow((2, 3)) and source.chance(SURE) > p
    assert (offer.rest(15).proposal.tokens, offer.rest(15).lead) == ((4,), ())


def test_names_of_what_is_left() -> None:
    led = table_of(1, 2).continued((3, 4), (0.9, 0.9), "dspine")
    assert [led.first(n).proposer for n in (1, 2, 3)] == ["table", "table", "table+dspine"]
    three = Proposal((1, 2), (0.9,) * 2, "table+ngram").continued((3,), (0.9,), "dspine")
    assert [three.first(n).proposer for n in (2, 3)] == ["table+ngram", "table+ngram+dspine"]


def test_the_rest_of_one_that_nobody_continued_keeps_its_name() -> None:
    assert table_of(1, 2, 3).after(1).first(1).proposer == "table"


def asked(made: AdaptiveWidth, lookup: Proposal) -> tuple[int, Proposal]:
    return made.ask([lookup], Ask(0, 40, 15), 2), made.lead()


def test_a_sure_lookup_that_ends_is_followed_where_rows_are_cheap() -> None:
    width, lead = asked(policy(), table_of(1, 2))
    assert lead.tokens == (1, 2) and width > len(lead.tokens)
    assert asked(policy(follows=False), table_of(1, 2))[1] == NOTHING
    dear = AdaptiveWidth(
        StepCosts(CostTable({1: 10.0, 2: 18.0, 16: 150.0}, {2: 9.0, 8: 30.0}), 16),
        most_drafts=15, block_size=8, curve=(0.8,) * 7, follows=True,
    )  # fmt: skip
    assert asked(dear, table_of(1, 2))[0] == 0


def test_chances_of_what_follows_are_learned_apart() -> None:
    """The block's own chains and the lookups are right here, what follows the lookups never."""
    made = policy()
    before = made._onward.reliability.chance(SURE)
    for _ in range(40):
        width, lead = asked(made, table_of(1, 2))
        led, own = NOTHING, NOTHING
        if width:
            own = Proposal((1, 2, 3, 4, 5, 6, 7)[:width], (0.9,) * width, "dspine")
            led = lead.continued((70, 71), (0.9, 0.9), "dspine") if lead.tokens else NOTHING
        chosen = made.choose(own, led)
        made.observe(Outcome(len(chosen.tokens), (1, 2, 3, 4), 0.3, 10.0))
    after = made._onward.reliability
    assert after.chance(SURE) < 0.2 < 0.8 < before + 0.2
    assert after.chance(BINS * DIFFER + SURE) < 0.5
    assert made._network.chance(BINS * AGREE + SURE) > 0.9


def right_after_leads(answer: Sequence[int], prompt: int) -> Chain:
    """A drafter whose own chains begin wrong and which is right after a lead."""

    def chain(tokens: Sequence[int], count: int) -> list[int]:
        at = len(tokens) - prompt
        right = [*answer[at : at + count], *[1] * count][:count]
        return right if at % 3 else [0, *right[1:]]

    return chain


def speculative(run: Run, drafter: FakeDrafter, text: Sequence[int]) -> list[str]:
    """Who proposed, step by step; the table knows two tokens after every third one."""
    rows = [list(text[i : i + 3]) for i in range(0, len(text) - 3, 3)]
    table = build_table(rows * 3, min_count=1, min_probability=0.0)
    made = policy()
    network = DrafterProposer(made, drafter, run.target, max_positions=10_000)
    proposer = AutoProposer(made, NgramProposer(made, min_match=6, table=table), network)
    stepper = SpeculativeStepper(run, proposer, made, TrimRollback(run.target))
    answer = collect(list(generate(run, stepper)))
    assert answer.tokens == list(text[len(run.sequence.tokens) - len(answer.tokens) :])
    return [step.proposer for step in run.recorder.steps]


def test_followed_lookups_give_the_plain_answer() -> None:
    next_token, prompt = mixing(VOCAB, 5), [3, 4]
    answer = plain_answer(next_token, prompt, 60)
    target = FakeTarget(next_token, VOCAB)
    run = make_run(target, prompt, max_tokens=60, end=None)
    drafter = FakeDrafter(right_after_leads(answer, len(prompt)), block_size=8)
    names = speculative(run, drafter, [*prompt, *answer])
    assert drafter.leads and any(name.endswith("+dspine") for name in names)
    assert (
        run_plain(make_run(FakeTarget(next_token, VOCAB), prompt, max_tokens=60, end=None)).tokens
        == answer
    )


def test_what_is_drawn_for_rejection_follows_nothing() -> None:
    target = FakeTarget(mixing(VOCAB, 1), VOCAB)
    drafter = FakeDrafter(lambda _, count: [2] * count)
    network = DrafterProposer(policy(), drafter, target, max_positions=100)
    draw = Draw(1.0, 0.0, lambda ids: ids.astype(float), True)
    assert network._told(Ask(1, 5, 9, draw), 6, table_of(1, 2)) == ()
    assert network._told(Ask(1, 5, 9), 6, table_of(1, 2)) == (1, 2)
    assert network._told(Ask(1, 5, 9), 4, table_of(1, 2, 3)) == (), "no slot is left"
    drafter.follows = False
    assert network._told(Ask(1, 5, 9), 6, table_of(1, 2)) == ()


def test_no_draft_is_made_for_a_lead_that_rejection_forbids() -> None:
    lookup, hardly = table_of(1, 2), (0.01,) * 7
    for rejects in (False, True):
        made = AdaptiveWidth(cheap(), most_drafts=15, block_size=8, curve=hardly, follows=True)
        draw = Draw(1.0, 0.0, lambda ids: ids.astype(float), rejects)
        made._onward.add([SURE] * 5)
        width = made.ask([lookup], Ask(0, 40, 15, draw), 2)
        assert (width > 2, made.lead().tokens) == ((False, ()) if rejects else (True, (1, 2)))


def test_a_lead_that_was_not_verified_as_a_whole_goes_on() -> None:
    """Fewer drafts may be left to an answer than the lead still has."""
    made = policy()
    asked(made, table_of(1, 2, 3))
    led = made.lead().continued((4, 5), (0.9, 0.9), "dspine")
    assert made.choose(NOTHING, led).tokens == led.tokens
    made.observe(Outcome(1, (1, 2), 0.3, 10.0))
    made.ask([], Ask(0, 42, 1), 2)
    assert made.choose(NOTHING).tokens == (3,)


def test_what_follows_a_lookup_must_beat_the_rest_of_a_chain_too() -> None:
    costs = StepCosts(CostTable({1: 10.0, 16: 10.8}, {2: 7.5, 8: 7.9}), 16)
    for rest, drafts in (((3, 4, 5, 6, 7), 0), ((), 7)):
        made = AdaptiveWidth(costs, most_drafts=15, block_size=8, curve=(0.8,) * 7, follows=True)
        for confirmed in ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 5, 6, 7, 8), (1, 2)):
            made.ask([], Ask(0, 40, 15), 2)
            own = (1, 2, *rest) if len(confirmed) == 2 else (1, 2, 3, 4, 5, 6, 7)
            chosen = made.choose(Proposal(own, (0.9,) * len(own), "dspine"))
            made.observe(Outcome(len(chosen.tokens), confirmed, 7.9, 10.3))
        assert asked(made, table_of(3))[0] == drafts


def short_lookups(device: Device, led: float, *, follows: bool) -> tuple[float, float]:
    """(speed, share of steps that were a lookup's and its follower's): lookups of two drafts are
    right, the network alone hardly ever, after them as often as `led` says.
    """
    speed = share = 0.0
    for seed in range(3):
        steps = simulate(
            device,
            device.policy(follows=follows),
            lambda _: 0.3,
            lookup=lambda _: 0.9,
            lookup_drafts=2,
            led=lambda _: led,
            tokens=1500,
            seed=seed,
        )
        speed += speedup(device, steps) / 3
        share += sum(step.proposer == "ngram+dspine" for step in steps) / (3 * len(steps))
    return speed, share


def test_a_network_that_is_right_after_lookups_alone_is_found_out() -> None:
    followed, share = short_lookups(FLAT, 0.9, follows=True)
    apart, none = short_lookups(FLAT, 0.9, follows=False)
    assert followed > 1.3 * apart
    assert share > 0.8 and none == 0.0


@pytest.mark.parametrize("device", [FLAT, MIDDLE, STEEP])
def test_a_network_that_is_never_right_after_lookups_costs_next_to_nothing(device: Device) -> None:
    followed, share = short_lookups(device, 0.0, follows=True)
    apart, _ = short_lookups(device, 0.0, follows=False)
    assert followed > 0.985 * apart
    assert share < 0.05


@pytest.mark.parametrize("device", [FLAT, MIDDLE, STEEP])
def test_followed_lookups_that_turn_wrong_cost_at_most_three_per_cent(device: Device) -> None:
    def rate(position: int) -> float:
        return 0.9 if position < 400 else 0.0

    for seed in range(4):
        for still in (rate, lambda _: 0.9):  # all become wrong, or only what follows
            steps = simulate(
                device,
                device.policy(follows=True),
                rate,
                lookup=still,
                lookup_drafts=2,
                led=rate,
                tokens=1000,
                seed=seed,
            )
            assert worst_window(device, steps) <= 1.03
            after = [step for step in steps if step.position >= 400]
            assert worst_window(device, after) <= 1.03
