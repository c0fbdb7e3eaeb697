"""The three ways to take drafts back, on a target that refuses what the library refuses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.engine.choose import GreedyChooser
from dspine.engine.events import Finish, Step
from dspine.engine.loop import generate
from dspine.engine.plain import PlainStepper
from dspine.engine.proposal import Ask, Proposal
from dspine.engine.proposers import DrafterProposer
from dspine.engine.replay import replay
from dspine.engine.rollback import (
    MAX_REPLAY,
    CheckpointRollback,
    Rollback,
    RollbackMode,
    TrimRollback,
    check_snapshots,
    choose_rollback,
    make_rollback,
)
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.width import FixedWidth
from dspine.errors import CapacityError, LibraryError, UsageError
from tests.support.engine_runs import PIECES, Outcome, collect, make_run
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_target import FakeTarget, InterruptedTarget, mixing, plain_answer

VOCAB = len(PIECES)
MODES: tuple[RollbackMode, ...] = ("trim", "snapshots", "checkpoint")


def make_target(mode: RollbackMode, salt: int, **changes: int) -> FakeTarget:
    return FakeTarget(
        mixing(VOCAB, salt),
        VOCAB,
        recurrent=mode != "trim",
        snapshots=7 if mode == "snapshots" else 0,
        **{"n_batch": 40, **changes},
    )


def answer(
    target: FakeTarget, rollback: Rollback, right: Sequence[int], width: int, count: int
) -> Outcome:
    """Step by step `right` of the drafts are right, in turn, of `width - 1` each."""
    hits = itertools.cycle(right)

    def chain(tokens: Sequence[int], wanted: int) -> list[int]:
        good = plain_answer(target.next_token, tokens, wanted)
        kept = next(hits)
        return [t if i < kept else (t + 1) % VOCAB for i, t in enumerate(good)]

    policy = FixedWidth({"dspine": width - 1})
    run = make_run(target, [1, 2, 3], max_tokens=count, end=None)
    network = DrafterProposer(policy, FakeDrafter(chain), target, max_positions=999)
    outcome = collect(list(generate(run, SpeculativeStepper(run, network, policy, rollback))))
    assert outcome.tokens == plain_answer(target.next_token, [1, 2, 3], count)
    assert network.disabled_reason is None
    assert run.trace is not None
    again = replay(target, run.trace, outcome.tokens, GreedyChooser(target), rollback)
    assert list(again.tokens) == outcome.tokens, "the trace cannot be repeated"
    return outcome


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_every_number_of_accepted_drafts_gives_the_plain_answer(
    mode: RollbackMode, width: int
) -> None:
    for first in range(width):
        target = make_target(mode, salt=first)
        right = [first, *range(width)]
        answer(target, make_rollback(mode, target), right, width, 50)


def test_after_a_restore_the_same_state_is_not_saved_again() -> None:
    target = make_target("checkpoint", 1)
    answer_ = answer(target, CheckpointRollback(target), [1], 4, 17)
    # Two tokens a step; the checkpoint after the prompt serves until 16 tokens wait.
    assert [len(step.tokens) for step in answer_.steps][:8] == [2] * 8
    assert target.checkpoints <= 2 * 2  # the answer and its repetition


def test_sixteen_confirmed_tokens_wait_and_with_more_the_next_step_has_no_drafts() -> None:
    target = make_target("checkpoint", 1)
    rollback = CheckpointRollback(target)
    answer(target, rollback, [1], 4, 40)
    half = target.decoded[: len(target.decoded) // 2]
    # The prompt but its anchor, then verifies from position 2 with 0, 2, ... 16 waiting rows.
    assert half[0] == (0, (1, 2))
    assert [(at, len(rows)) for at, rows in half[1:10]] == [(2, 4 + 2 * i) for i in range(9)]
    # 18 would wait: the anchor follows them alone, and the next verify starts behind it.
    assert half[10][0] == 2 and len(half[10][1]) == 19
    assert half[11][0] == 21 and len(half[11][1]) == 4


def test_the_width_policy_hears_of_waiting_rows() -> None:
    target = make_target("checkpoint", 1)
    asks: list[Ask] = []

    class Listening(DrafterProposer):
        def propose(self, ask: Ask) -> Proposal:
            asks.append(ask)
            return super().propose(ask)

    run = make_run(target, [1, 2, 3], max_tokens=12, end=None)
    policy = FixedWidth({"dspine": 3})
    drafter = FakeDrafter(
        lambda tokens, count: [*plain_answer(target.next_token, tokens, 1), *[0] * (count - 1)]
    )
    network = Listening(policy, drafter, target, max_positions=99)
    stepper = SpeculativeStepper(run, network, policy, CheckpointRollback(target))
    collect(list(generate(run, stepper)))
    rows = [len(rows) for _, rows in target.decoded[1:]]
    assert [ask.extra for ask in asks][:4] == [0, 2, 4, 6]
    # Only a block with nothing in front finds a state that was not saved yet.
    costs = [ask.copies for ask in asks[:4]]
    assert all(copies is not None and copies.save_ms == 0.0 for copies in costs)
    assert costs[1] is not None and costs[1].restore_ms > 0.0
    assert rows[:4] == [0 + 4, 2 + 4, 4 + 4, 6 + 4]


@pytest.mark.parametrize("n_batch", [1, 2, 3, 5, 9])
def test_small_batches_still_hold_waiting_tokens_and_drafts(n_batch: int) -> None:
    target = make_target("checkpoint", 2, n_batch=n_batch)
    outcome = answer(target, CheckpointRollback(target), [1, 0, 2], 4, 40)
    assert (outcome.finish.stats.drafted > 0) == (n_batch > 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [4, 8])
def test_a_context_that_fills_up_is_filled_to_its_last_position(
    mode: RollbackMode, width: int
) -> None:
    for n_ctx in range(20, 30):
        target = make_target(mode, 3, n_ctx=n_ctx)
        outcome = answer(target, make_rollback(mode, target), [1], width, n_ctx - 2)
        # Waiting tokens take rows of a batch, not room of the context or of the answer.
        assert outcome.finish.stats.tokens == n_ctx - 2
        assert outcome.steps[-1].drafted + 1 >= len(outcome.steps[-1].tokens)


def test_waiting_tokens_do_not_shorten_the_last_blocks() -> None:
    target = make_target("checkpoint", 3, n_ctx=24)
    outcome = answer(target, CheckpointRollback(target), [1], 8, 22)
    trimmed = make_target("trim", 3, n_ctx=24)
    expected = answer(trimmed, TrimRollback(trimmed), [1], 8, 22)
    # One step, after 18 tokens, stores what waits; the rest draft what is left to be said.
    assert [step.drafted for step in expected.steps] == [7, 7, 7, 7, 7, 7, 7, 7, 5, 3, 1]
    assert [step.drafted for step in outcome.steps] == [7, 7, 7, 7, 7, 7, 7, 7, 5, 0, 2, 0]


@settings(max_examples=150, deadline=None)
@given(
    at=st.integers(1, 90),
    salt=st.integers(0, 50),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 999),
)
def test_an_interrupt_anywhere_can_be_undone_and_decoding_goes_on(
    at: int, salt: int, mode: RollbackMode, seed: int
) -> None:
    target = InterruptedTarget(
        mixing(VOCAB, salt), VOCAB, n_batch=32, recurrent=mode != "trim",
        snapshots=4 if mode == "snapshots" else 0,
    )  # fmt: skip
    chance = random.Random(seed)

    def chain(tokens: Sequence[int], count: int) -> list[int]:
        good = plain_answer(target.next_token, tokens, count)
        return [t if chance.random() < 0.7 else (t + 1) % VOCAB for t in good]

    policy = FixedWidth({"dspine": 4})
    run = make_run(target, [1, 2, 3, 4], max_tokens=40, end=None)
    drafter = FakeDrafter(chain)
    network = DrafterProposer(policy, drafter, target, max_positions=999)
    stepper = SpeculativeStepper(run, network, policy, make_rollback(mode, target))
    target.decode([1, 2, 3], 0, "none")
    target.at = target.moments + at  # the prompt's decode is not interrupted
    stepper.begin(0)
    stepper.saw_prompt(0, 3)
    stepper.prompt_done()
    while run.sequence.emitted < 40:
        length, mark = len(run.sequence.tokens), run.emitter.mark()
        try:
            stepper.step()
        except KeyboardInterrupt:
            run.sequence.truncate(length)
            run.emitter.restore(mark)
            stepper.undo()
            held = len(target.memory)
            assert target.memory == run.sequence.tokens[:held]
            if held > run.sequence.anchor_position:
                # The anchor stayed, for a longer text; this one begins anew.
                assert mode == "snapshots" and held == length
                target.clear()
                stepper._rollback.start(0)
    assert run.sequence.tokens == [1, 2, 3, 4, *plain_answer(target.next_token, [1, 2, 3, 4], 40)]
    assert network.disabled_reason is None


def test_an_interrupted_plain_step_on_a_recurrent_target_keeps_what_is_confirmed() -> None:
    target = make_target("checkpoint", 4)
    run = make_run(target, [1, 2], end=None)
    stepper = PlainStepper(run)
    target.decode([1, 2], 0, "all")  # the anchor too: what an interrupt left behind
    stepper.undo()
    assert target.memory == [1, 2]
    target.decode([3], 2, "all")
    stepper.undo()
    assert target.memory == []


def test_a_state_that_cannot_be_saved_ends_drafting_and_not_the_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Full(FakeTarget):
        def checkpoint(self) -> None:
            if self.checkpoints == 1:
                raise CapacityError("a copy of the target's state needs 150 MiB and 3 MiB are free")
            super().checkpoint()

    target = Full(mixing(VOCAB, 5), VOCAB, n_batch=40, recurrent=True)
    policy = FixedWidth({"dspine": 3})
    run = make_run(target, [1, 2, 3], max_tokens=30, end=None)
    drafter = FakeDrafter(lambda tokens, count: plain_answer(target.next_token, tokens, count))
    network = DrafterProposer(policy, drafter, target, max_positions=999)
    stepper = SpeculativeStepper(run, network, policy, CheckpointRollback(target))
    events = list(generate(run, stepper))
    finish = events[-1]
    assert isinstance(finish, Finish)
    tokens = [t for event in events if isinstance(event, Step) for t in event.tokens]
    assert tokens == plain_answer(target.next_token, [1, 2, 3], 30)
    assert finish.stats.disabled_reason is not None
    assert "could not be taken back: a copy of the target's state" in finish.stats.disabled_reason
    assert finish.stats.drafted == 3
    assert len(caplog.records) == 1


def test_a_library_that_refuses_to_cut_says_what_helps() -> None:
    target = make_target("checkpoint", 1)
    target.decode([1, 2, 3, 4], 0, "all")
    with pytest.raises(LibraryError, match=r"back to 2 of 4 positions.*--proposer none"):
        TrimRollback(target).settle(4, 2)


def test_auto_takes_what_fits_the_memory() -> None:
    def auto(is_recurrent: bool, architecture: str) -> str:
        return choose_rollback("auto", is_recurrent=is_recurrent, architecture=architecture)

    assert auto(False, "llama") == "trim"
    assert auto(True, "qwen35") == "checkpoint"
    assert auto(False, "deepseek4") == "snapshots"
    for mode in MODES[1:]:
        assert choose_rollback(mode, is_recurrent=True, architecture="qwen35") == mode
    assert choose_rollback("checkpoint", is_recurrent=False, architecture="llama") == "checkpoint"


@pytest.mark.parametrize(
    ("wanted", "is_recurrent", "architecture", "message"),
    [
        ("trim", True, "qwen35", r"rollback is trim, .*architecture qwen35.*--rollback auto"),
        ("trim", False, "deepseek4", r"rollback is trim, .*deepseek4"),
        ("snapshots", False, "llama", r"rollback is snapshots, .*architecture llama has none"),
        ("checkpoint", False, "deepseek4", r"rollback is checkpoint, .*deepseek4"),
        ("rewind", False, "llama", r"rollback is 'rewind': choose one of auto, trim, snapshots"),
    ],
)
def test_a_mode_that_cannot_work_is_refused(
    wanted: str, is_recurrent: bool, architecture: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose_rollback(wanted, is_recurrent=is_recurrent, architecture=architecture)


def test_a_library_without_snapshots_is_refused() -> None:
    check_snapshots(15, 15, "qwen35")
    with pytest.raises(UsageError, match=r"keeps 0 of 15 for architecture mamba: use --rollback"):
        check_snapshots(15, 0, "mamba")


def test_replay_is_bounded_by_its_own_limit() -> None:
    for width in (2, 5, 8):
        target = make_target("checkpoint", width)
        answer(target, CheckpointRollback(target), [1, 0, 1], width, 55)
        verifies = [len(rows) for _, rows in target.decoded]
        assert max(verifies) <= MAX_REPLAY + max(width, 2)
