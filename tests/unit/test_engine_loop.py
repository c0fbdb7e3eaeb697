"""Ends and interruptions: limits, Ctrl-C at any point, a drafter that fails."""

from __future__ import annotations

import time
from collections.abc import Iterator
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.drafters.base import Draft, Draw
from dspine.engine.adaptive import AdaptiveWidth
from dspine.engine.costs import CostTable, StepCosts
from dspine.engine.events import Event, Finish, Step
from dspine.engine.loop import generate
from dspine.engine.ngram_table import build_table
from dspine.engine.plain import PlainStepper
from dspine.engine.proposers import AutoProposer, DrafterProposer, NgramProposer, NoProposer
from dspine.engine.rollback import TrimRollback
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.width import FixedWidth
from dspine.errors import CapacityError, UsageError
from tests.support.engine_runs import PIECES, collect, make_run, run_plain, run_speculative
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_target import FakeTarget, InterruptedTarget, mixing, plain_answer

VOCAB = len(PIECES)


@pytest.mark.parametrize("width", [1, 4])
def test_the_context_is_filled_to_its_last_position_and_not_beyond(width: int) -> None:
    next_token = mixing(VOCAB, 1)
    target = FakeTarget(next_token, VOCAB, n_ctx=10)
    policy = FixedWidth({"dspine": width - 1})
    drafter = FakeDrafter(lambda tokens, count: plain_answer(next_token, tokens, count))
    fast = run_speculative(
        make_run(target, [1] * 7, end=None),
        policy,
        lambda t: DrafterProposer(policy, drafter, t, max_positions=99),
    )
    # Positions 7, 8, 9 take tokens; the one after the last position cannot be decoded.
    assert fast.tokens == plain_answer(next_token, [1] * 7, 4)
    assert fast.finish.reason == "context"
    assert len(target.memory) == 10


def test_a_prompt_as_long_as_the_context_gives_one_token() -> None:
    target = FakeTarget(mixing(VOCAB, 1), VOCAB, n_ctx=10)
    plain = run_plain(make_run(target, [1] * 10, end=None))
    assert len(plain.tokens) == 1 and plain.finish.reason == "context"


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    target = FakeTarget(mixing(VOCAB, 1), VOCAB, n_ctx=10)
    run = make_run(target, [1] * 11)
    with pytest.raises(CapacityError, match=r"11 tokens.*10"):
        list(generate(run, PlainStepper(run)))


def test_an_empty_prompt_and_a_limit_of_zero_are_refused() -> None:
    target = FakeTarget(mixing(VOCAB, 1), VOCAB)
    with pytest.raises(UsageError, match="empty"):
        make_run(target, [])
    with pytest.raises(UsageError, match="at least 1"):
        make_run(target, [1], max_tokens=0)


def test_held_back_text_is_not_lost_at_the_limit() -> None:
    answer = [1, 6]  # "a", half a euro sign
    target = FakeTarget(lambda tokens: answer[len(tokens) - 1], VOCAB)
    plain = run_plain(make_run(target, [4], max_tokens=2, stop=["ab"]))
    assert plain.text == "a\N{REPLACEMENT CHARACTER}"
    assert plain.finish.reason == "length"


def test_cancelling_between_steps_keeps_the_text_so_far() -> None:
    target = FakeTarget(mixing(VOCAB, 4), VOCAB)
    run = make_run(target, [1, 2], end=None, stop=["zzz"])
    events: list[Event] = []
    for event in generate(run, PlainStepper(run)):
        events.append(event)
        if len(events) == 4:
            run.cancel.set()
    outcome = collect(events)
    assert outcome.finish.reason == "cancelled"
    assert outcome.tokens == plain_answer(target.next_token, [1, 2], 3)


def test_cancelling_during_the_prompt() -> None:
    target = FakeTarget(mixing(VOCAB, 4), VOCAB, n_batch=2)
    run = make_run(target, [1] * 9)
    run.cancel.set()
    events = list(generate(run, PlainStepper(run)))
    assert len(events) == 1
    assert isinstance(events[0], Finish) and events[0].reason == "cancelled"
    assert target.decoded == []


def test_text_held_back_for_a_stop_string_comes_with_the_cancellation() -> None:
    answer = [5, 1]  # "x", then "a", which could begin "ab"
    target = FakeTarget(lambda tokens: answer[min(len(tokens) - 1, 1)], VOCAB)
    run = make_run(target, [4], stop=["ab"])
    events: list[Event] = []
    for event in generate(run, PlainStepper(run)):
        events.append(event)
        if len(events) == 3:
            run.cancel.set()
    outcome = collect(events)
    assert [(step.tokens, step.text) for step in outcome.steps] == [
        ((5,), "x"),
        ((1,), ""),
        ((), "a"),
    ]
    assert outcome.finish.stats.steps == 2


@settings(max_examples=60, deadline=None)
@given(at=st.integers(1, 60), salt=st.integers(0, 50))
def test_ctrl_c_anywhere_leaves_matching_text_tokens_and_memory(at: int, salt: int) -> None:
    """The interrupt comes before or after any call into the target."""
    next_token = mixing(VOCAB, salt)
    target = InterruptedTarget(next_token, VOCAB)
    target.at = at
    run = make_run(target, [1, 2, 3], max_tokens=30, end=None, stop=["ab", "aba"])
    chain = FakeDrafter(lambda tokens, count: [*plain_answer(next_token, tokens, count)[:2], 1])
    policy = FixedWidth({"dspine": 3})
    network = DrafterProposer(policy, chain, target, max_positions=99)
    stepper = SpeculativeStepper(run, network, policy, TrimRollback(target))
    events = list(generate(run, stepper))
    finish = events[-1]
    assert isinstance(finish, Finish)
    if target.moments < at:
        return  # it was over before
    assert finish.reason == "cancelled"
    steps = [event for event in events if isinstance(event, Step)]
    tokens = [token for step in steps for token in step.tokens]
    assert tokens == plain_answer(next_token, [1, 2, 3], len(tokens))
    shown = "".join(step.text for step in steps)
    whole = b"".join(PIECES[token] for token in tokens).decode("utf-8", "replace")
    assert shown == whole
    if len(events) > 1:  # the prompt was complete
        assert target.memory == [1, 2, 3, *tokens][:-1]
        assert all(place < len(target.memory) for place in chain.context)
    assert network.disabled_reason is None


def test_ctrl_c_in_the_caller_closes_the_generation() -> None:
    target = FakeTarget(mixing(VOCAB, 4), VOCAB)
    run = make_run(target, [1, 2], end=None)
    events: Iterator[Event] = generate(run, PlainStepper(run))
    for _ in range(3):
        next(events)
    events.close()  # type: ignore[attr-defined]
    assert len(target.memory) == len(run.sequence.tokens) - 1


class Failing(FakeDrafter):
    """Fails in the steps named."""

    def __init__(self, fails: set[int]) -> None:
        super().__init__(lambda tokens, count: [1] * count)
        self.fails, self.asked = fails, 0

    def draft(
        self,
        seq: int,
        anchor: int,
        width: int,
        draw: Draw | None = None,
        lead: tuple[int, ...] = (),
    ) -> Draft:
        self.asked += 1
        if self.asked in self.fails:
            raise RuntimeError("the graph broke")
        return super().draft(seq, anchor, width)


def test_three_failures_in_a_row_switch_the_drafter_off_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    next_token = mixing(VOCAB, 6)
    policy = FixedWidth({"dspine": 2})
    drafter = Failing({1, 2, 4, 5, 6})
    target = FakeTarget(next_token, VOCAB)
    run = make_run(target, [1, 2], max_tokens=20, end=None)
    fast = run_speculative(
        run, policy, lambda t: DrafterProposer(policy, drafter, t, max_positions=99)
    )
    assert fast.tokens == plain_answer(next_token, [1, 2], 20)
    assert drafter.asked == 6
    reason = fast.finish.stats.disabled_reason
    assert reason is not None and "3 times in a row" in reason and "the graph broke" in reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_drafter_that_loses_its_context_is_switched_off_too() -> None:
    next_token = mixing(VOCAB, 6)
    policy = FixedWidth({"dspine": 2})

    class Forgetful(FakeDrafter):
        def add_context(self, seq: int, position: int, features: object) -> None:
            raise UsageError("a gap")

    target = FakeTarget(next_token, VOCAB)
    run = make_run(target, [1, 2], max_tokens=20, end=None)
    drafter = Forgetful(lambda tokens, count: [1] * count)
    fast = run_speculative(
        run, policy, lambda t: DrafterProposer(policy, drafter, t, max_positions=99)
    )
    assert fast.tokens == plain_answer(next_token, [1, 2], 20)
    assert "a gap" in (fast.finish.stats.disabled_reason or "")


@pytest.mark.parametrize(("n_ctx", "told"), [(30, False), (200, True)])
def test_beyond_the_drafters_positions_decoding_goes_on_without_it(n_ctx: int, told: bool) -> None:
    next_token = mixing(VOCAB, 6)
    policy = FixedWidth({"dspine": 2})
    drafter = FakeDrafter(lambda tokens, count: plain_answer(next_token, tokens, count))
    target = FakeTarget(next_token, VOCAB, n_ctx=n_ctx)
    run = make_run(target, [1, 2], max_tokens=60, end=None)
    fast = run_speculative(
        run,
        policy,
        lambda t: AutoProposer(policy, None, DrafterProposer(policy, drafter, t, max_positions=30)),
    )
    assert fast.tokens == plain_answer(next_token, [1, 2], min(60, n_ctx - 1))
    position, drafts = 1, {True: 0, False: 0}
    for step in fast.steps:
        drafts[position < 29] += step.drafted
        position += len(step.tokens)
    assert drafts[True] > 0 and drafts[False] == 0
    reason = fast.finish.stats.disabled_reason
    assert (reason is not None and "made for 30 positions" in reason) if told else reason is None


def test_auto_asks_the_drafter_only_where_repeats_promise_less() -> None:
    target = FakeTarget(lambda tokens: 1, VOCAB)

    def first_proposer(prompt: list[int], draft_ms: float) -> str:
        costs = CostTable({1: 10.0, 2: 12.0, 8: 24.0}, {2: draft_ms, 8: draft_ms})
        policy = AdaptiveWidth(StepCosts(costs, 16), most_drafts=3, block_size=8, curve=(0.75,) * 7)
        drafter = FakeDrafter(lambda tokens, count: [1] * count)
        run = make_run(target, prompt, max_tokens=4, end=None)
        fast = run_speculative(
            run,
            policy,
            lambda t: AutoProposer(
                policy,
                NgramProposer(policy, min_match=2),
                DrafterProposer(policy, drafter, t, max_positions=99),
            ),
        )
        return fast.steps[0].proposer

    # Two tokens repeat: 0.58 for the first draft.
    weak = [3, 4, 5, 6, 3, 4]
    assert first_proposer(weak, draft_ms=9.0) == "ngram"
    # Twelve tokens repeat: 0.87 and more.
    strong = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 3, 4]
    assert first_proposer(strong, draft_ms=1.5) == "ngram"
    assert first_proposer([3, 4, 5], draft_ms=1.5) == "dspine"
    # Not even four tokens would be worth 56 ms, where four plain steps take 40.
    assert first_proposer([3, 4, 5], draft_ms=40.0) == "none"


def test_the_table_speaks_where_nothing_repeats() -> None:
    table = build_table([[1, 2, 3, 4, 5]] * 20, min_probability=0.0)
    policy = FixedWidth({"ngram": 4})
    target = FakeTarget(lambda tokens: (tokens[-1] + 1) % VOCAB, VOCAB)
    run = make_run(target, [1, 2], max_tokens=4, end=None)
    fast = run_speculative(run, policy, lambda t: NgramProposer(policy, min_match=2, table=table))
    assert [(s.tokens, s.drafted, s.accepted) for s in fast.steps] == [((3, 4, 5, 6), 3, 3)]


def test_no_proposer_is_plain_decoding() -> None:
    next_token = mixing(VOCAB, 3)
    target = FakeTarget(next_token, VOCAB)
    run = make_run(target, [1, 2], max_tokens=5, end=None)
    fast = run_speculative(run, FixedWidth({}), lambda t: NoProposer())
    assert fast.tokens == plain_answer(next_token, [1, 2], 5)
    assert {step.proposer for step in fast.steps} == {"none"}


def test_times_add_up_and_leave_out_the_caller() -> None:
    target = FakeTarget(mixing(VOCAB, 3), VOCAB)
    run = make_run(target, [1, 2], max_tokens=20, end=None)
    events: list[Event] = []
    began, waited = perf_counter(), 0.0
    for event in generate(run, PlainStepper(run)):
        since = perf_counter()
        events.append(event)
        time.sleep(0.005)
        waited += perf_counter() - since
    own_ms = (perf_counter() - began - waited) * 1000.0
    stats = collect(events).finish.stats
    parts = stats.draft_ms + stats.verify_ms + stats.host_ms
    assert parts == pytest.approx(stats.wall_ms)
    assert 0 < stats.wall_ms + stats.prefill_ms < own_ms
