"""Whether the drafter is asked: hand-computed gains of chains in known texts."""

from __future__ import annotations

import pytest

from dspine.engine.acceptance import BINS, SHIFTS, Reliability, ScorePrior, score_bin
from dspine.engine.asking import FORESIGHT, HOLDS, Prices, Prospects

EVEN = score_bin(0.5)
"""Slot of a score of one half, whose odds are 1 before anything was seen."""

FREE = [0.0] * 9


def prospects(network: Reliability, chains: list[list[int]] | None = None) -> Prospects:
    made = Prospects(network, [[EVEN] * 3], situations=2, most_drafts=3)
    for chain in chains or []:
        made.add(0, chain)
    return made


class Certain(Reliability):
    """A text that is known: every slot is right with one chance."""

    def __init__(self, chance: float) -> None:
        super().__init__([ScorePrior()])
        self.chance_of_all = chance

    def by_text(self, slot: int) -> list[float]:
        return [self.chance_of_all for _ in super().by_text(slot)]


def test_a_chain_is_worth_what_its_reached_drafts_are() -> None:
    prices = Prices([1.0, 1.1, 1.2, 1.3], [0.0, 0.0, 0.2, 0.3, 0.4], FREE)
    found = prospects(Certain(0.5)).judge(0, 0.0, 3, lambda: prices)
    # 1 + 1/2 - 1.1 - 0.2, 1 + 1/2 + 1/4 - 1.2 - 0.3, 1 + 1/2 + 1/4 + 1/8 - 1.3 - 0.4
    assert (found.width, found.hope, found.usually) == (3, 0.0, 0.0)
    assert found.now == pytest.approx(0.25)


def test_drafts_that_do_not_pay_are_not_counted_as_verified() -> None:
    prices = Prices([1.0, 1.2, 9.0, 9.0], [0.0, 0.0, 0.1, 0.1, 0.1], FREE)
    found = prospects(Certain(0.5)).judge(0, 0.0, 3, lambda: prices)
    assert found.width == 2 and found.now == pytest.approx(0.2)


def test_a_rejection_that_costs_later_is_taken_off() -> None:
    owed = [0.0, 0.4, 0.4, 0.4]
    prices = Prices([1.0] * 4, [0.0] * 5, owed)
    found = prospects(Certain(0.5)).judge(0, 0.0, 1, lambda: prices)
    assert found.now == pytest.approx(1.5 - 1.0 - 0.5 * 0.4)


def test_slots_beyond_a_short_chain_are_usual_ones() -> None:
    prices = Prices([1.0] * 4, [0.0] * 5, FREE)
    found = prospects(Certain(0.5), [[EVEN]]).judge(0, 0.0, 3, lambda: prices)
    assert found.width == 4 and found.now == pytest.approx(0.5 + 0.25 + 0.125)


def test_an_unknown_text_gives_hope_where_the_mean_does_not() -> None:
    network = Reliability([ScorePrior()])
    prices = Prices([1.0, 1.6, 2.2, 2.8], [0.0, 0.0, 0.1, 0.1, 0.1], FREE)
    found = prospects(network).judge(0, 0.0, 3, lambda: prices)
    assert found.now < 0.0 < found.hope
    assert found.value == pytest.approx(found.now + FORESIGHT * found.hope)
    for _ in range(20):
        network.learn(EVEN, False)
    later = prospects(network).judge(0, 0.0, 3, lambda: prices)
    assert later.hope < 0.1 * found.hope and later.value < 0.0 < later.usually


def test_no_text_makes_a_draft_pay_that_costs_more_than_it_can_give() -> None:
    prices = Prices([1.0, 1.6, 2.2, 2.8], [0.0, 0.0, 3.0, 3.0, 3.0], FREE)
    found = prospects(Reliability([ScorePrior()])).judge(0, 0.0, 3, lambda: prices)
    assert found.hope == found.usually == 0.0 and found.now < 0.0


def test_a_refusal_holds_for_a_while_unless_the_alternative_gets_worse() -> None:
    asked = []

    def prices() -> Prices:
        asked.append(1)
        return Prices([1.0, 1.6, 2.2, 2.8], [0.0, 0.0, 3.0, 3.0, 3.0], FREE)

    made = prospects(Reliability([ScorePrior()]))
    for _ in range(HOLDS):
        made.judge(0, 0.0, 3, prices)
    made.judge(0, 0.5, 3, prices)
    assert len(asked) == 2
    made.judge(0, -0.5, 3, prices)
    assert len(asked) == 2, "it was far from paying"
    made.judge(0, -3.0, 3, prices)
    assert len(asked) == 3
    made.judge(1, -3.0, 3, prices)
    assert len(asked) == 4, "each situation for itself"
    made.forget()
    made.judge(0, -3.0, 3, prices)
    assert len(asked) == 5


def test_what_is_usual_is_learned_text_by_text() -> None:
    source = Reliability([ScorePrior()])
    start = source.chance(EVEN)
    for _ in range(60):
        source.learn(EVEN, True)
    source.begin()
    once = source.chance(BINS - 1)
    assert source.chance(EVEN) > start
    source.begin()
    assert source.chance(BINS - 1) == once, "a text without drafts says nothing"
    assert len(source.texts(0.0)[0]) == len(SHIFTS)
