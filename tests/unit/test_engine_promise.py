"""What a drafter's file promises against what its drafts are."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from dspine.drafters.base import Draft, Draw
from dspine.engine.choose import GreedyChooser
from dspine.engine.loop import generate
from dspine.engine.promise import TRIES, Promise
from dspine.engine.proposal import Confirmed
from dspine.engine.proposers import DrafterProposer
from dspine.engine.rollback import TrimRollback
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.width import FixedWidth
from tests.support.engine_runs import collect, make_run
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_engine import BOS, VOCAB, make_engine
from tests.support.fake_target import FakeTarget, mixing, plain_answer

NEXT = mixing(VOCAB, 5)


def right_once_in(every: int) -> FakeDrafter:
    """Every n-th first draft is right, by the length of the text."""

    def drafts(tokens: Sequence[int], count: int) -> list[int]:
        true = plain_answer(NEXT, tokens, count)
        return true if len(tokens) % every == 0 else [(true[0] + 1) % 250, *true[1:]]

    return FakeDrafter(drafts)


@pytest.mark.parametrize(
    ("every", "promised", "told"),
    [
        (1000, 0.6, True),
        (10, 0.6, True),
        (4, 0.6, False),
        (1000, None, False),
        (10, 0.3, False),
    ],
)
@pytest.mark.parametrize("proposer", ["dspine", "auto"])
def test_a_promise_that_is_broken_is_told_once(
    every: int,
    promised: float | None,
    told: bool,
    proposer: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = FakeTarget(NEXT, VOCAB, n_ctx=1000)
    engine = make_engine(target, right_once_in(every), proposer=proposer, promise=Promise(promised))
    engine.complete([BOS], max_tokens=5 * TRIES)
    assert len(caplog.records) == told
    if told:
        message = caplog.records[0].getMessage()
        found = re.search(r"only (\d+)% of the drafter's first drafts", message)
        assert found is not None and abs(int(found[1]) - 100 / every) < 3
        assert f"its file says {promised:.0%}" in message


class Drawing(GreedyChooser):
    """Wants drafts that are drawn."""

    def draw(self) -> Draw:
        return Draw(1.0, 0.0, lambda ids: np.zeros(ids.shape), with_distributions=False)


@pytest.mark.parametrize(("kind", "told"), [(Drawing, False), (GreedyChooser, True)])
def test_drafts_that_are_drawn_say_nothing(
    kind: type[GreedyChooser], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    target = FakeTarget(NEXT, VOCAB, n_ctx=5 * TRIES)
    run = make_run(target, [BOS], max_tokens=2 * TRIES, pieces=[b"x"] * VOCAB, end=None)
    run.chooser = kind(target)
    policy = FixedWidth({"dspine": 2})
    wrong = FakeDrafter(lambda tokens, count: [(target.next_token(tokens) + 1) % VOCAB] * count)
    network = DrafterProposer(
        policy, wrong, target, max_positions=target.n_ctx, promise=Promise(0.6)
    )
    collect(list(generate(run, SpeculativeStepper(run, network, policy, TrimRollback(target)))))
    assert len(wrong.drafts) > TRIES
    assert len(caplog.records) == told


def test_a_step_that_was_taken_back_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    target = FakeTarget(NEXT, VOCAB, n_ctx=5 * TRIES)
    wrong = FakeDrafter(lambda _, count: [1] * count)
    network = DrafterProposer(
        FixedWidth({"dspine": 2}), wrong, target, max_positions=target.n_ctx, promise=Promise(0.6)
    )
    network.begin([BOS])
    for taken_back in (True, False):
        for _ in range(TRIES):
            network.proposal(Draft((1,)))
            if taken_back:
                network.truncate(1)
            network.confirm(Confirmed(0, 0, (2,)))
        assert len(caplog.records) == (not taken_back)


def test_it_is_told_once_for_all_sequences(caplog: pytest.LogCaptureFixture) -> None:
    promise = Promise(0.6)
    for _ in range(5 * TRIES):
        promise.compare(1, 2)
    assert len(caplog.records) == 1
