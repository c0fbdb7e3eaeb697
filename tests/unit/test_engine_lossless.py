"""Speculation never changes the answer, whatever is proposed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.engine.adaptive import AdaptiveWidth
from dspine.engine.costs import CostTable, StepCosts
from dspine.engine.loop import Run, generate
from dspine.engine.ngram_table import build_table
from dspine.engine.proposal import Proposer
from dspine.engine.proposers import AutoProposer, DrafterProposer, NgramProposer
from dspine.engine.rollback import MAX_REPLAY, CheckpointRollback
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.width import FixedWidth, WidthPolicy
from tests.support.engine_runs import (
    PIECES,
    collect,
    make_run,
    run_plain,
    run_speculative,
)
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_target import FakeTarget, mixing, plain_answer

VOCAB = len(PIECES)
BOTH = ("dspine", "auto")


@settings(max_examples=300, deadline=None)
@given(
    salt=st.integers(0, 10_000),
    prompt=st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=30),
    width=st.integers(1, 8),
    hit_rate=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
    max_tokens=st.one_of(st.none(), st.integers(1, 40)),
    stop=st.lists(st.sampled_from(["ab", "aba", "b ", "€", "x", "yzc", "a\n"]), max_size=2),
    kind=st.sampled_from(["dspine", "ngram", "auto", "table"]),
    window=st.one_of(st.none(), st.integers(2, 12)),
    with_end=st.booleans(),
    adaptive=st.booleans(),
)
def test_any_proposal_gives_the_plain_answer(
    salt: int,
    prompt: list[int],
    width: int,
    hit_rate: float,
    seed: int,
    max_tokens: int | None,
    stop: list[str],
    kind: str,
    window: int | None,
    with_end: bool,
    adaptive: bool,
) -> None:
    next_token = mixing(VOCAB, salt)
    chance = random.Random(seed)

    def chain(tokens: Sequence[int], count: int) -> list[int]:
        right = plain_answer(next_token, tokens, count)
        return [t if chance.random() < hit_rate else chance.randrange(VOCAB) for t in right]

    policy: WidthPolicy = FixedWidth({"dspine": width - 1, "ngram": width - 1})
    if adaptive:
        flat = StepCosts(CostTable({1: 9.0, 9: 10.0}, {2: 1.0, 8: 2.0}), 9)
        policy = AdaptiveWidth(
            flat, most_drafts=width - 1, block_size=width, curve=(0.6,) * 7, follows=True
        )

    def make(target: FakeTarget) -> Proposer:
        drafter = FakeDrafter(chain, block_size=8, window=window)
        network = DrafterProposer(policy, drafter, target, max_positions=50)
        table = build_table([[1, 2, 3, 1, 2, 3, 1, 2]], min_count=1, min_probability=0.0)
        lookup = NgramProposer(policy, min_match=1, table=table if kind == "table" else None)
        return AutoProposer(
            policy, lookup if kind != "dspine" else None, network if kind in BOTH else None
        )

    def start(on: FakeTarget) -> Run:
        end = 0 if with_end else None
        return make_run(on, prompt, max_tokens=max_tokens, stop=stop, end=end)

    plain_target, target = FakeTarget(next_token, VOCAB), FakeTarget(next_token, VOCAB)
    plain = run_plain(start(plain_target))
    fast = run_speculative(start(target), policy, make)

    assert plain.tokens == plain_answer(next_token, prompt, len(plain.tokens))
    assert (fast.tokens, fast.text) == (plain.tokens, plain.text)
    assert fast.finish.reason == plain.finish.reason
    reason = fast.finish.stats.disabled_reason
    assert reason is None or "made for 50 positions" in reason
    for memory in (plain_target.memory, target.memory):
        assert memory == [*prompt, *plain.tokens][:-1]
    for step in fast.steps:
        assert 0 <= step.accepted <= step.drafted <= max(0, width - 1)
        assert step.accepted <= len(step.tokens) <= step.accepted + 1
    assert fast.finish.stats.tokens == len(plain.tokens)
    assert sum(s.drafted for s in fast.steps) == fast.finish.stats.drafted


def test_a_perfect_drafter_fills_every_block() -> None:
    next_token = mixing(VOCAB, salt=5)
    policy = FixedWidth({"dspine": 4})
    target = FakeTarget(next_token, VOCAB, n_batch=16)
    run = make_run(target, [1, 2, 3], max_tokens=12, end=None)
    drafter = FakeDrafter(lambda tokens, count: plain_answer(next_token, tokens, count))
    fast = run_speculative(
        run, policy, lambda t: DrafterProposer(policy, drafter, t, max_positions=100)
    )
    # Width 5 gives 5 tokens a step; the last block is cut to the two tokens that are left.
    assert [(len(s.tokens), s.drafted, s.accepted) for s in fast.steps] == [
        (5, 4, 4),
        (5, 4, 4),
        (2, 1, 1),
    ]
    assert target.decoded[0] == (0, (1, 2))
    assert [position for position, _ in target.decoded[1:]] == [2, 7, 12]
    assert fast.finish.stats.acceptance_length == 4.0
    assert fast.finish.stats.acceptance_rate == 1.0
    assert fast.finish.stats.drafted_at_slot == (3, 2, 2, 2)
    assert fast.finish.stats.accepted_at_slot == (3, 2, 2, 2)
    assert fast.finish.reason == "length"


def test_a_wrong_first_draft_costs_one_row_read_and_gives_one_token() -> None:
    next_token = mixing(VOCAB, salt=5)
    policy = FixedWidth({"dspine": 3})
    target = FakeTarget(next_token, VOCAB)
    run = make_run(target, [1, 2, 3], max_tokens=1 + 3, end=None)
    drafter = FakeDrafter(
        lambda tokens, count: [(plain_answer(next_token, tokens, 1)[0] + 1) % VOCAB] * count
    )
    fast = run_speculative(
        run, policy, lambda t: DrafterProposer(policy, drafter, t, max_positions=100)
    )
    assert [(len(s.tokens), s.drafted, s.accepted) for s in fast.steps] == [
        (1, 3, 0),
        (1, 2, 0),
        (1, 1, 0),
        (1, 0, 0),
    ]
    assert target.rows_asked == [0, 0, 0, 0]
    assert [s.proposer for s in fast.steps] == ["dspine", "dspine", "dspine", "none"]


def test_drafts_after_an_end_token_leave_no_trace() -> None:
    answer = [5, 9, 0, 7, 7, 7, 7]

    def next_token(tokens: Sequence[int]) -> int:
        return answer[min(len(tokens) - 2, len(answer) - 1)]

    policy = FixedWidth({"dspine": 5})
    target = FakeTarget(next_token, VOCAB)
    run = make_run(target, [1, 2])
    drafter = FakeDrafter(lambda tokens, count: answer[:count])
    fast = run_speculative(
        run, policy, lambda t: DrafterProposer(policy, drafter, t, max_positions=100)
    )
    assert fast.tokens == [5, 9, 0]
    assert fast.text == "xc"
    assert fast.finish.reason == "stop"
    assert target.memory == [1, 2, 5, 9]
    assert (fast.steps[0].drafted, fast.steps[0].accepted) == (5, 3)


def test_a_stop_string_inside_a_block_cuts_text_and_memory() -> None:
    answer = [5, 1, 2, 9, 5, 5]  # "x" "a" "b" "c" ...

    def next_token(tokens: Sequence[int]) -> int:
        return answer[min(len(tokens) - 1, len(answer) - 1)]

    policy = FixedWidth({"dspine": 5})
    target = FakeTarget(next_token, VOCAB)
    run = make_run(target, [4], stop=["ab"])
    drafter = FakeDrafter(lambda tokens, count: answer[:count])
    fast = run_speculative(
        run, policy, lambda t: DrafterProposer(policy, drafter, t, max_positions=100)
    )
    assert fast.tokens == [5, 1, 2]
    assert fast.text == "x"
    assert target.memory == [4, 5, 1]
    assert fast.finish.reason == "stop"


def test_only_features_that_the_window_can_see_are_read() -> None:
    next_token = mixing(VOCAB, salt=1)
    policy = FixedWidth({"dspine": 3})
    target = FakeTarget(next_token, VOCAB, n_ctx=64)
    run = make_run(target, [1] * 30, max_tokens=1, end=None)
    drafter = FakeDrafter(lambda tokens, count: [1] * count, window=6)
    fast = run_speculative(
        run, policy, lambda t: DrafterProposer(policy, drafter, t, max_positions=100)
    )
    assert len(fast.tokens) == 1
    assert drafter.additions == []  # one token is left, so nothing is drafted or handed over
    run = make_run(target, [1] * 30, max_tokens=2, end=None)
    run_speculative(run, policy, lambda t: DrafterProposer(policy, drafter, t, max_positions=100))
    # The anchor sits at 29 and sees the 5 positions before it (the window counts itself).
    assert drafter.additions == [(24, 5)]


def test_beyond_its_positions_the_drafter_is_not_asked() -> None:
    next_token = mixing(VOCAB, salt=2)
    policy = FixedWidth({"dspine": 3})
    target = FakeTarget(next_token, VOCAB)
    run = make_run(target, [1, 2, 3], max_tokens=30, end=None)
    drafter = FakeDrafter(lambda tokens, count: plain_answer(next_token, tokens, count))
    fast = run_speculative(
        run, policy, lambda t: DrafterProposer(policy, drafter, t, max_positions=12)
    )
    assert fast.tokens == plain_answer(next_token, [1, 2, 3], 30)
    assert max(position + width for position, _, width in drafter.drafts) <= 12
    assert max(drafter.context) <= 12
    assert fast.finish.stats.proposers["none"].steps > 10


def test_waiting_features_reach_the_drafter_in_one_piece_and_only_when_asked() -> None:
    next_token = mixing(VOCAB, salt=3)
    policy = FixedWidth({"dspine": 2, "ngram": 2})
    target = FakeTarget(next_token, VOCAB)
    drafter = FakeDrafter(lambda tokens, count: [1] * count)
    network = DrafterProposer(policy, drafter, target, max_positions=100)
    lookup = NgramProposer(policy, min_match=1)
    run = make_run(target, [1, 1, 1, 1], max_tokens=20, end=None)
    fast = run_speculative(run, policy, lambda t: AutoProposer(policy, lookup, network))
    assert fast.tokens == plain_answer(next_token, [1, 1, 1, 1], 20)
    names = [step.proposer for step in fast.steps]
    assert "ngram" in names and "dspine" in names
    handed = [place for first, count in drafter.additions for place in range(first, first + count)]
    assert handed == list(range(len(handed))), "a position was skipped or handed over twice"
    assert len(drafter.additions) == len(drafter.drafts), "context was handed over unasked"


@settings(max_examples=100, deadline=None)
@given(
    salt=st.integers(0, 10_000),
    width=st.integers(2, 8),
    hit_rate=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
    max_tokens=st.integers(1, 50),
)
def test_a_recurrent_target_gives_the_plain_answer(
    salt: int, width: int, hit_rate: float, seed: int, max_tokens: int
) -> None:
    next_token = mixing(VOCAB, salt)
    chance = random.Random(seed)
    prompt = [1, 2, 3]

    def chain(tokens: Sequence[int], count: int) -> list[int]:
        right = plain_answer(next_token, tokens, count)
        return [t if chance.random() < hit_rate else chance.randrange(VOCAB) for t in right]

    policy = FixedWidth({"dspine": width - 1})
    target = FakeTarget(next_token, VOCAB, n_batch=40, recurrent=True)
    run = make_run(target, prompt, max_tokens=max_tokens, end=None)
    drafter = FakeDrafter(chain)
    network = DrafterProposer(policy, drafter, target, max_positions=100)
    stepper = SpeculativeStepper(run, network, policy, CheckpointRollback(target))
    fast = collect(list(generate(run, stepper)))
    assert fast.tokens == plain_answer(next_token, prompt, max_tokens)
    assert network.disabled_reason is None
    whole = [*prompt, *fast.tokens]
    assert target.memory == whole[: len(target.memory)]
    # Replayed rows stay bounded, so a verify never grows beyond its drafts and those.
    assert max(len(tokens) for _, tokens in target.decoded) <= MAX_REPLAY + width
