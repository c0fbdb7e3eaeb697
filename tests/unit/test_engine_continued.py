"""Chains that another proposer continues: what is proposed, under which name, and where it ends."""

from __future__ import annotations

import numpy as np
import pytest

from dspine.drafters.base import Drawn
from dspine.engine.acceptance import BINS, Reliability, ScorePrior, score_bin
from dspine.engine.adaptive import AdaptiveWidth
from dspine.engine.costs import CostTable, StepCosts
from dspine.engine.lookups import lookup_scores
from dspine.engine.ngram_table import build_table
from dspine.engine.offers import LOOKED_UP
from dspine.engine.proposal import NOTHING, Ask, Proposal
from dspine.engine.proposers import AutoProposer, DrafterProposer, NgramProposer
from dspine.engine.trial import FORGIVEN, LOSS, TRUST, Trial, would_have
from dspine.engine.width import FixedWidth, Outcome
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_target import FakeTarget, mixing

TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 20, 21]


def lookup(*, table: list[list[int]] | None = None, most: int = 15) -> NgramProposer:
    known = build_table(table, min_count=1, min_probability=0.0) if table else None
    made = NgramProposer(FixedWidth({"ngram": most}), table=known, min_probability=0.0)
    made.begin(TEXT)
    return made


def chain(*tokens: int, name: str = "dspine") -> Proposal:
    return Proposal(tokens, (0.9,) * len(tokens), name)


def test_a_chain_of_the_network_goes_on_with_what_repeats_after_its_end() -> None:
    # "2 3" stands in the text, and nothing does that the text ends with.
    longer = lookup().continued(chain(2, 3), 6)
    assert longer.tokens == (2, 3, 4, 5, 6, 7)
    assert longer.scores == (0.9, 0.9, *lookup_scores(2, 4))
    assert (longer.proposer, longer.own) == ("dspine+ngram", 2)
    assert lookup().continued(chain(9, 3), 6) == chain(9, 3), "one token is no match"
    assert lookup().continued(chain(2, 3), 2) == chain(2, 3), "there is no room"


def test_where_nothing_repeats_the_table_continues_it() -> None:
    known = lookup(table=[[3, 50, 51], [3, 50, 51]])
    longer = known.continued(chain(9, 3), 6)
    assert longer.tokens[:4] == (9, 3, 50, 51) and longer.proposer == "dspine+table"


def test_a_chain_of_the_table_goes_on_with_a_repeat() -> None:
    found = lookup(table=[[21, 2, 3]] * 3).look_up(Ask(21, 9, 6))
    assert [(one.proposer, one.tokens, one.own) for one in found] == [
        ("table+ngram", (2, 3, 4, 5, 6, 7), 2)
    ]


def test_a_cut_names_those_whose_drafts_are_left() -> None:
    whole = chain(2, 3).continued([4, 5], (0.5, 0.5), "ngram")
    names = [whole.first(count).proposer for count in range(5)]
    assert names == ["none", "dspine", "dspine", "dspine+ngram", "dspine+ngram"]
    assert whole.first(2) == chain(2, 3), "nothing tells it from one that was not continued"
    assert whole.after(1).own == 1 and whole.after(1).first(1).proposer == "dspine"
    rest = whole.after(3)
    assert (rest.tokens, rest.own, rest.first(1).proposer) == ((5,), 0, "dspine+ngram")


def auto(policy: AdaptiveWidth) -> AutoProposer:
    target = FakeTarget(mixing(60, 1), 60, n_batch=16)
    target.decode(TEXT[:-1], 0, "none")
    drafter = FakeDrafter(lambda _, count: [2, 3, 9, 9, 9, 9, 9][:count], block_size=8)
    network = DrafterProposer(policy, drafter, target, max_positions=60)
    made = AutoProposer(policy, NgramProposer(policy), network)
    made.begin(TEXT)
    made.saw_prompt(0, len(TEXT) - 1)
    return made


def test_the_policy_verifies_into_the_continuation() -> None:
    costs = StepCosts(CostTable({1: 10.0, 16: 10.5}, {2: 0.2, 3: 0.2, 4: 8.0, 8: 90.0}), 16)
    policy = AdaptiveWidth(costs, most_drafts=15, block_size=8, curve=(0.9,) * 7)
    proposal = auto(policy).propose(Ask(21, 9, 15))
    assert proposal.proposer == "dspine+ngram"
    assert proposal.tokens[:4] == (2, 3, 4, 5)
    # As the text goes on with it, the rest of the chain is worth a step of its own.
    policy.observe(Outcome(2, (2, 3, 4), 0.2, 10.0))
    assert policy.ask([], Ask(4, 12, 15), None) == 0
    rest = policy.choose(NOTHING)
    assert rest.tokens[:2] == (5, 6) and rest.proposer == "dspine+ngram"


def test_what_was_drawn_is_not_continued() -> None:
    costs = StepCosts(CostTable({1: 10.0, 16: 10.5}, {2: 0.2, 8: 0.2}), 16)
    proposer = auto(AdaptiveWidth(costs, most_drafts=15, block_size=8, curve=(0.9,) * 7))
    drawn = Proposal((2, 3), (0.9, 0.9), "dspine", (drawn_from(2), drawn_from(3)))
    assert proposer._continued(drawn, 15) is drawn
    assert len(proposer._continued(chain(2, 3), 15).tokens) > 2


def drawn_from(token: int) -> Drawn:
    return Drawn(token, np.array([token], np.int32), np.array([1.0]))


def test_a_continuation_has_chances_of_its_own() -> None:
    """The network's drafts are always right here, what continues them never."""
    costs = StepCosts(CostTable({1: 10.0, 16: 11.0}, {2: 0.2, 8: 0.4}), 16)
    policy = AdaptiveWidth(costs, most_drafts=15, block_size=8, curve=(0.9,) * 7)
    for step in range(60):
        asked = policy.ask([], Ask(0, 3 * step, 15), 2)
        if not asked:
            policy.choose(NOTHING)
            policy.observe(Outcome(0, (0,)))
            continue
        own = Proposal(tuple(range(1, asked + 1)), (0.7,) * asked, "dspine")
        chosen = policy.choose(own.continued((70, 71, 72), (0.7,) * 3, "ngram"))
        policy.observe(Outcome(len(chosen.tokens), (*chosen.tokens[:asked], 99)))
    own_chance = policy._network.chance(score_bin(0.7))
    assert own_chance > 0.9 > 4 * policy._network.chance(BINS * LOOKED_UP + score_bin(0.7))


def test_what_a_step_would_have_given_without_the_drafter() -> None:
    source = Reliability([ScorePrior()])
    even = score_bin(0.5)
    assert would_have([], [], (7,), source) == (1.0, True)
    assert would_have([7, 8], [even] * 2, (7, 9, 9), source) == (2.0, False)
    assert would_have([7, 8], [even] * 2, (7, 8, 9), source) == (3.0, True)
    # One was confirmed; of the two beyond it nobody knows.
    p = source.chance(even)
    tokens, right = would_have([7, 8, 9], [even] * 3, (7,), source)
    assert right and tokens == pytest.approx(2.0 + p + p * p)


def test_what_was_lost_comes_back_slowly_and_what_was_gained_is_not_kept_for_ever() -> None:
    trial = Trial()
    trial.gained(-2.0)
    assert trial.left == LOSS - 2.0
    trial.emitted(100)
    assert trial.left == pytest.approx(LOSS - 2.0 + 100 * FORGIVEN)
    trial.emitted(10_000)
    assert trial.left == LOSS
    trial.gained(1000.0)
    assert trial.left == TRUST
    trial.emitted(1000)
    assert trial.left == TRUST
