"""What the policy is told of steps that could have no drafts, or in which something failed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dspine.drafters.base import Features
from dspine.engine.adaptive import AdaptiveWidth
from dspine.engine.costs import CostTable, StepCosts
from dspine.engine.loop import generate
from dspine.engine.proposal import NOTHING, Ask, Proposal
from dspine.engine.proposers import AutoProposer, DrafterProposer
from dspine.engine.rollback import MAX_REPLAY, CheckpointRollback, TrimRollback
from dspine.engine.scheduler import Scheduler
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.width import FixedWidth, Outcome, WidthPolicy
from dspine.errors import LibraryError
from tests.support.engine_runs import PIECES, collect, make_run
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_engine import make_parallel
from tests.support.fake_target import FakeTarget, mixing, plain_answer
from tests.support.scheduling import NEXT, Listener, drafter, start, targets, targets_of, together

VOCAB = len(PIECES)


def policy() -> AdaptiveWidth:
    """Two rows cost little more than one, more of them a lot."""
    table = CostTable({1: 10.0, 2: 10.5, 3: 30.0, 8: 90.0}, {2: 0.3, 8: 0.5})
    return AdaptiveWidth(StepCosts(table, 8), most_drafts=7, block_size=8, curve=(0.8,) * 7)


def test_a_chain_that_goes_on_is_not_a_step_behind_after_a_step_without_an_ask() -> None:
    made = policy()
    assert made.ask([], Ask(0, 40, 7), 2)
    chosen = made.choose(Proposal((1, 2, 3, 4, 5), (0.9,) * 5, "dspine"))
    assert len(chosen.tokens) == 1
    made.observe(Outcome(1, (1, 2)))
    made.passed((3,))
    made.ask([], Ask(3, 43, 7), None)
    assert made.choose(NOTHING).tokens[:1] == (4,)
    made.passed((9,))
    made.ask([], Ask(9, 44, 7), None)
    assert made.choose(NOTHING) == NOTHING, "the text went another way"


def test_the_policy_hears_of_every_token_of_an_answer() -> None:
    """Where more confirmed tokens wait than a block may repeat, a step has no drafts and no ask."""

    class Listening(FixedWidth):
        def __init__(self) -> None:
            super().__init__({"dspine": 3})
            self.heard: list[int] = []
            self.unasked = 0

        def observe(self, outcome: Outcome) -> None:
            self.heard += outcome.confirmed

        def passed(self, confirmed: Sequence[int]) -> None:
            self.heard += confirmed
            self.unasked += 1

    target = FakeTarget(mixing(VOCAB, 1), VOCAB, n_ctx=99, n_batch=24, recurrent=True)
    listening = Listening()
    # One right draft in each block: two tokens a step wait for the next one.
    network = DrafterProposer(
        listening,
        FakeDrafter(
            lambda tokens, count: [*plain_answer(target.next_token, tokens, 1), *[0] * (count - 1)]
        ),
        target,
        max_positions=99,
    )
    run = make_run(target, [1, 2, 3], max_tokens=40, end=None)
    stepper = SpeculativeStepper(run, network, listening, CheckpointRollback(target))
    outcome = collect(list(generate(run, stepper)))
    assert max(len(rows) for _, rows in target.decoded) > MAX_REPLAY + 1
    assert listening.heard == outcome.tokens
    # The steps that store what waits, and the last token, after which no draft can be emitted.
    assert listening.unasked >= 2


class Broken(FakeDrafter):
    """Takes no features."""

    def add_context(self, seq: int, position: int, features: Features) -> None:
        raise LibraryError(f"no room for {len(features)} rows at {position} of sequence {seq}")


def test_a_draft_that_failed_says_nothing_of_what_drafts_cost() -> None:
    made = policy()
    before = made._costs.draft(4, 2, warm=True), made._costs.draft(4, 2, warm=False)
    target = FakeTarget(mixing(VOCAB, 5), VOCAB)
    run = make_run(target, [3, 4, 5], max_tokens=12, end=None)
    network = DrafterProposer(made, Broken(lambda _, n: [1] * n), target, max_positions=99)
    proposer = AutoProposer(made, None, network)
    stepper = SpeculativeStepper(run, proposer, made, TrimRollback(target))
    outcome = collect(list(generate(run, stepper)))
    assert outcome.tokens == plain_answer(target.next_token, [3, 4, 5], 12)
    assert network.disabled_reason is not None, "it was asked three times"
    after = made._costs.draft(4, 2, warm=True), made._costs.draft(4, 2, warm=False)
    assert after == before


def test_what_a_failed_draft_took_counts_as_lost_and_no_draft_came_before_the_next_one() -> None:
    made = policy()
    credit = made._credit
    assert made.ask([], Ask(0, 40, 7), 2)
    price = made._draft_ms
    made.choose(NOTHING)
    made.observe(Outcome(0, (1,), draft_ms=price, verify_ms=10.0))
    assert made._credit == pytest.approx(credit - price / 10.0 + 0.005)
    assert not made._warm


def test_a_step_alone_after_a_failed_decode_of_several_is_one_of_one_answer() -> None:
    """Its whole time must not be taken for the share of one among three."""

    class Noting(FixedWidth):
        def __init__(self) -> None:
            super().__init__({"ngram": 3})
            self.sharing = 1
            self.heard: list[int] = []
            """How many shared each step, as the policy knew."""

        def share(self, sequences: int) -> None:
            self.sharing = sequences

        def observe(self, outcome: Outcome) -> None:
            self.heard.append(self.sharing)

    policies: list[Noting] = []

    def noting() -> WidthPolicy:
        policies.append(Noting())
        return policies[-1]

    parts = make_parallel(targets(3), proposer="ngram", make_policy=noting)
    listener = start(parts, ([1, 2, 3], [4, 5], [6]), max_tokens=16)
    for _ in range(4):
        listener.step()
    for noted in policies:
        noted.heard.clear()
    together(parts).failures = [LibraryError("no room")]
    for _ in range(2):
        listener.step()
    assert [noted.heard for noted in policies] == [[1, 3]] * 3


def test_a_prompt_whose_memory_had_to_be_emptied_is_read_again() -> None:
    """Rows without meaning stood in its sequence, and the library refused to cut them off."""
    parts = make_parallel(targets(3, n_ctx=128), drafter(), proposer="auto")
    scheduler = Scheduler(parts, 3, chunk=4)
    listener = Listener(scheduler)
    prompts = ([1, 2, 3], [5, 6] * 11, [4, 5])
    first = scheduler.start(list(prompts[0]), max_tokens=30)
    listener.step()
    # The reader's slot lies between two that answer; a third prompt takes turns with it.
    reader = scheduler.start(list(prompts[1]), max_tokens=5)
    last = scheduler.start(list(prompts[2]), max_tokens=30)
    target = targets_of(parts)[1]
    trim, refused = target.trim, list[int]()

    def refusing(length: int) -> bool:
        if not refused and 0 < length < target.length():
            refused.append(length)
            return False
        return trim(length)

    target.trim = refusing  # type: ignore[method-assign]
    together(parts).mixes = False
    heard = listener.finish()
    assert refused, "no row without meaning was in the reader's sequence"
    for number, prompt, count in zip((first, reader, last), prompts, (30, 5, 30), strict=True):
        assert heard[number].error is None
        assert heard[number].tokens == plain_answer(NEXT, prompt, count)
