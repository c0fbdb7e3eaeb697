"""When waiting rows are stored: on simulated costs, against one who knows what comes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.engine.adaptive import AdaptiveWidth
from dspine.engine.costs import CostTable, StepCosts
from dspine.engine.events import Step
from dspine.engine.loop import generate
from dspine.engine.plain import PlainStepper
from dspine.engine.proposal import NOTHING, Ask, Confirmed, Proposal
from dspine.engine.proposers import NoProposer
from dspine.engine.rollback import MAX_REPLAY, CheckpointRollback
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.waiting import Copies, StoringRule, owed_ms
from dspine.engine.width import FixedWidth, WidthPolicy
from tests.support.engine_runs import PIECES, make_run
from tests.support.fake_target import FakeTarget, mixing, plain_answer

VOCAB = len(PIECES)
ROWS = 40
Block = tuple[int, bool]
"""What a verify confirms, and whether all of its drafts were right."""


def line(fixed: float, row: float) -> list[float]:
    return [fixed + row * n for n in range(1, ROWS + 1)]


def ruled(rows: Sequence[float], blocks: Sequence[Block], width: int) -> tuple[float, list[int]]:
    """(milliseconds, blocks before which waiting rows were stored) with the rule."""
    rule, waiting, spent, stored = StoringRule(), 0, 0.0, []
    for index, (confirmed, whole) in enumerate(blocks):
        if rule.due(rows, waiting, width, 0.0) or waiting > MAX_REPLAY:
            spent += rows[waiting]
            waiting = 0
            stored.append(index)
        spent += rows[waiting + width - 1]
        waiting = 0 if whole else waiting + confirmed
    return spent, stored


def clairvoyant(rows: Sequence[float], blocks: Sequence[Block], width: int) -> float:
    """The least that these blocks can cost, trying every choice."""

    @cache
    def rest(index: int, waiting: int) -> float:
        if index == len(blocks):
            return 0.0
        confirmed, whole = blocks[index]

        def verify(front: int) -> float:
            after = 0 if whole else front + confirmed
            return rows[front + width - 1] + rest(index + 1, after)

        choices = [rows[waiting] + verify(0)] if waiting else []
        if waiting <= MAX_REPLAY:
            choices.append(verify(waiting))
        return min(choices)

    return rest(0, 0)


def test_where_rows_are_free_nothing_is_stored_before_the_limit() -> None:
    _, stored = ruled(line(50.0, 0.0), [(2, False)] * 30, 4)
    assert stored == [9, 18, 27]  # 18 tokens wait there


def test_where_rows_cost_they_are_stored_when_that_is_paid() -> None:
    # A row costs 19, a pass 45: with 2 and 4 rows waiting 38 + 76 exceed the price, 64.
    _, stored = ruled(line(45.0, 19.0), [(2, False)] * 9, 4)
    assert stored == [2, 4, 6, 8]
    # At 60 a row two waiting ones exceed it at once.
    assert ruled(line(45.0, 60.0), [(2, False)] * 4, 4)[1] == [1, 2, 3]


def test_what_the_token_of_a_storing_step_is_worth_lowers_its_price() -> None:
    rows = line(45.0, 19.0)
    assert StoringRule().due(rows, 2, 4, 64.0)
    assert StoringRule().due(rows, 2, 4, 30.0)
    assert not StoringRule().due(rows, 2, 4, 20.0)
    assert not StoringRule().due(line(64.0, 0.0), 2, 4, 64.0), "free rows may wait"


def test_a_block_that_is_right_to_its_end_clears_the_bill() -> None:
    _, stored = ruled(line(45.0, 19.0), [(2, False), (4, True)] * 10, 4)
    assert stored == []


@settings(max_examples=200, deadline=None)
@given(
    fixed=st.floats(1.0, 100.0),
    row=st.floats(0.0, 50.0),
    width=st.integers(2, 8),
    seed=st.lists(st.tuples(st.integers(1, 8), st.booleans()), min_size=1, max_size=24),
)
def test_at_most_twice_what_one_who_knows_the_text_would_pay(
    fixed: float, row: float, width: int, seed: list[Block]
) -> None:
    rows = line(fixed, row)
    blocks = [(width, True) if whole else (min(n, width - 1), False) for n, whole in seed]
    spent, _ = ruled(rows, blocks, width)
    least = clairvoyant(rows, blocks, width)
    # The blocks themselves cost both the same; the bound holds for what comes on top of them.
    base = rows[width - 1] * len(blocks)
    assert spent - base <= 2.0 * (least - base) + 1e-6


def test_what_a_rejection_costs_later() -> None:
    # Rows of 10, 12, 14, ...: with one waiting, two more are carried for 6 ms once more, or
    # stored by a plain step that gives 1 token in a time worth 1.2: the lesser is 2.
    rows = line(8.0, 2.0)
    assert owed_ms(rows, 1, 2, 1.2, Copies(3.0, 0.5)) == pytest.approx(
        [0, 0.5 + 4 + 2, 0.5 + 6 + 2]
    )
    assert owed_ms(line(10.0, 0.0), 4, 3, 2.0, Copies(3.0, 0.0)) == [0.0] * 4
    assert owed_ms(rows, 0, 1, 9.0, Copies(0.0, 0.0))[1] == pytest.approx(2 + 2)


class Hopeful(NoProposer):
    """Offers 7 drafts of which every second one, or none, is right; the policy cuts them."""

    def __init__(self, target: FakeTarget, policy: WidthPolicy, right: bool) -> None:
        self._target, self._policy, self._right = target, policy, right
        self._tokens: list[int] = []

    def begin(self, prompt: Sequence[int], kept: int = 0) -> None:
        self._tokens = list(prompt)

    def confirm(self, confirmed: Confirmed) -> None:
        self._tokens += confirmed.tokens

    def propose(self, ask: Ask) -> Proposal:
        drafts = plain_answer(self._target.next_token, self._tokens, min(7, ask.limit))
        for slot in range(1 if self._right else 0, len(drafts), 2):
            drafts[slot] = (drafts[slot] + 1) % VOCAB
        offer = Proposal(tuple(drafts), (0.6,) * len(drafts), "ngram")
        self._policy.ask([offer], ask, None)
        return self._policy.choose(NOTHING)


class Timed(FakeTarget):
    """Counts what its decodes and copies would cost."""

    rows: Sequence[float] = ()
    spent = 0.0

    def decode(self, tokens: Sequence[int], position: int, logits: object) -> None:
        super().decode(tokens, position, "none" if logits == "none" else "all")
        if logits != "none":
            self.spent += self.rows[len(tokens) - 1]


def decode_costs(rows: Sequence[float], policy: WidthPolicy | None, right: bool) -> float:
    """Milliseconds of 400 tokens, None: plain; copies cost nothing measurable here."""
    target = Timed(mixing(VOCAB, 3, memory=6), VOCAB, n_ctx=600, n_batch=40, recurrent=True)
    target.rows = rows
    run = make_run(target, [1, 2, 3], max_tokens=400, end=None)
    if policy is None:
        events = list(generate(run, PlainStepper(run)))
    else:
        hopeful = Hopeful(target, policy, right)
        stepper = SpeculativeStepper(run, hopeful, policy, CheckpointRollback(target))
        events = list(generate(run, stepper))
    tokens = [t for event in events if isinstance(event, Step) for t in event.tokens]
    assert tokens == plain_answer(target.next_token, [1, 2, 3], 400)
    return target.spent


def costs_of(rows: Sequence[float]) -> StepCosts:
    table = CostTable({n: rows[n - 1] for n in (1, 2, 3, 4, 6, 8, 12, 16)}, {})
    steps = StepCosts(table, 16 + MAX_REPLAY)
    # Decodes of a fake take microseconds, whatever they would cost.
    steps.observe_rows = lambda expected, count, ms: None  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("row", [0.2, 5.0, 19.0, 45.0])
def test_the_adaptive_width_never_falls_behind_plain_decoding(row: float, right: bool) -> None:
    rows = line(45.0, row)
    plain = decode_costs(rows, None, right)
    spent = decode_costs(rows, AdaptiveWidth(costs_of(rows), most_drafts=7), right)
    assert plain / spent > 0.98
    if right and row < 10.0:
        assert plain / spent > 1.3


@pytest.mark.parametrize("row", [5.0, 19.0, 45.0])
def test_a_fixed_width_that_knows_costs_stores_sooner_and_is_faster(row: float) -> None:
    rows = line(45.0, row)
    known = decode_costs(rows, FixedWidth({"ngram": 3}, costs_of(rows)), True)
    unknown = decode_costs(rows, FixedWidth({"ngram": 3}), True)
    assert known < 0.9 * unknown
