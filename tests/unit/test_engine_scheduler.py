"""Several answers at once: the same texts as alone, in fair turns, none harmed by another."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.drafters.base import Draft, DraftAsk, Draw
from dspine.engine.engine import Engine
from dspine.engine.events import Finish, Prefill, Step
from dspine.engine.scheduler import Scheduler
from dspine.engine.width import FixedWidth, WidthPolicy
from dspine.errors import CapacityError, ClosedError, LibraryError, UsageError
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_engine import EOS, VOCAB, ByteTokenizer, make_parallel
from tests.support.fake_target import FakeTarget, plain_answer
from tests.support.scheduling import (
    NEXT,
    Listener,
    adaptive,
    drafter,
    interrupt_after_decode,
    start,
    targets,
    targets_of,
    together,
)

PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 1, 2], [7], [2] * 9)


@pytest.mark.parametrize("proposer", ["none", "ngram", "dspine", "auto"])
@pytest.mark.parametrize("policy", [None, adaptive])
def test_four_answers_at_once_are_those_that_each_would_be_alone(
    proposer: str, policy: Callable[[], WidthPolicy] | None
) -> None:
    parts = make_parallel(
        targets(4),
        drafter() if proposer in ("dspine", "auto") else None,
        proposer=proposer,
        make_policy=policy,
    )
    heard = start(parts, PROMPTS, max_tokens=20).finish()
    for number, prompt in enumerate(PROMPTS, 1):
        assert heard[number].tokens == plain_answer(NEXT, prompt, 20)
        assert heard[number].reason == "length"
        assert isinstance(heard[number].events[0], Prefill)


def test_a_step_decodes_all_that_answer_once_and_with_as_many_rows_each() -> None:
    parts = make_parallel(targets(4), drafter(), proposer="dspine")
    listener = start(parts, PROMPTS, max_tokens=12)
    for _ in range(8):
        listener.step()
    widths = [set(rows.values()) for rows in together(parts).decodes]
    assert all(len(width) == 1 for width in widths)
    assert {4} in widths, "three drafts are wanted of each"
    assert max(len(rows) for rows in together(parts).decodes) == 4
    assert isinstance(parts.drafter, FakeDrafter) and 4 in parts.drafter.together


def test_filler_rows_are_neither_judged_nor_kept() -> None:
    """One slot has three drafts, the other none: it gets rows without a meaning."""
    parts = make_parallel(targets(2), proposer="ngram")
    # The first prompt repeats nothing, the second one everything.
    heard = start(parts, ([1, 2, 3], [3] * 12), max_tokens=6).finish()
    assert heard[1].tokens == plain_answer(NEXT, [1, 2, 3], 6)
    assert heard[2].tokens == plain_answer(NEXT, [3] * 12, 6)
    stats = [h.events[-1].stats for h in heard.values() if isinstance(h.events[-1], Finish)]
    assert all(one.drafted < 3 * one.steps for one in stats)
    assert any(rows == {0: 4, 1: 4} for rows in together(parts).decodes)


def test_sequences_between_add_rows_that_leave_no_trace() -> None:
    parts = make_parallel(targets(3), proposer="none")
    listener = start(parts, ([1, 2, 3], [4, 5], [6, 7]), max_tokens=10)
    for _ in range(3):
        listener.step()
    listener.scheduler.cancel(2)
    heard = listener.finish()
    assert heard[2].reason == "cancelled"
    assert heard[1].tokens == plain_answer(NEXT, [1, 2, 3], 10)
    assert heard[3].tokens == plain_answer(NEXT, [6, 7], 10)
    assert together(parts).decodes[-1] == {0: 1, 1: 1, 2: 1}
    assert targets_of(parts)[1].memory == [4, 5, *heard[2].tokens[:-1]]


def test_a_gap_that_costs_more_than_another_pass_is_left() -> None:
    parts = make_parallel(targets(4), proposer="none", rows_ms=lambda rows: 10.0 * rows)
    listener = start(parts, PROMPTS, max_tokens=10)
    for number in (2, 3):
        listener.scheduler.cancel(number)
    heard = listener.finish()
    assert heard[4].tokens == plain_answer(NEXT, PROMPTS[3], 10)
    assert all(set(rows) == {0, 3} for rows in together(parts).decodes)


def test_long_prompts_come_in_pieces_between_the_steps_of_others() -> None:
    parts = make_parallel(targets(3, n_ctx=128), proposer="none")
    scheduler = Scheduler(parts, 3, chunk=4)
    listener = Listener(scheduler)
    scheduler.start([1, 2, 3], max_tokens=60)
    listener.step()
    scheduler.start([5] * 21, max_tokens=3)
    scheduler.start([6] * 21, max_tokens=3)
    pieces = [len(target.decoded) for target in targets_of(parts)]
    for _ in range(8):
        happened = listener.step()
        assert (1, Step) in [(number, type(event)) for number, event in happened]
        now = [len(target.decoded) for target in targets_of(parts)]
        assert sum(now[1:]) - sum(pieces[1:]) <= 1, "one piece of one prompt at a time"
        pieces = now
    decoded = [t.decoded for t in targets_of(parts)]
    assert [len(tokens) for _, tokens in decoded[1]] == [4, 4, 4, 4]
    assert abs(len(decoded[1]) - len(decoded[2])) <= 1, "in turn"
    heard = listener.finish()
    assert heard[2].tokens == plain_answer(NEXT, [5] * 21, 3)
    assert heard[3].tokens == plain_answer(NEXT, [6] * 21, 3)


def test_without_others_a_prompt_is_read_in_whole_batches() -> None:
    parts = make_parallel(targets(2, n_ctx=128), proposer="none")
    listener = start(parts, ([5] * 33,), max_tokens=2)
    listener.finish()
    assert [len(tokens) for _, tokens in targets_of(parts)[0].decoded[:2]] == [16, 16]


def test_cancel_frees_the_slot_within_the_next_step() -> None:
    parts = make_parallel(targets(2), proposer="none")
    event = threading.Event()
    scheduler = Scheduler(parts, 2)
    listener = Listener(scheduler)
    scheduler.start([1, 2, 3])
    second = scheduler.start([4, 5] * 10, cancel=event)
    assert scheduler.free_slots() == 0
    with pytest.raises(UsageError, match="all 2 slots are answering"):
        scheduler.start([1])
    listener.step()
    event.set()
    listener.step()
    assert scheduler.free_slots() == 1 and listener.heard[second].reason == "cancelled"
    scheduler.cancel(1)
    scheduler.cancel(second)  # over already
    listener.step()
    assert listener.heard[1].reason == "cancelled"
    assert scheduler.step() == []


def test_an_error_in_one_answer_leaves_the_others() -> None:
    class Failing(ByteTokenizer):
        def piece(self, token: int, *, special: bool = False) -> bytes:
            if token == 6:
                raise RuntimeError("a piece that cannot be")
            return super().piece(token, special=special)

    def next_token(tokens: Sequence[int]) -> int:
        return (6 if len(tokens) > 8 else 3) if tokens[0] == 9 else NEXT(tokens[-3:]) % 5

    fakes = [FakeTarget(next_token, VOCAB, n_batch=16) for _ in range(3)]
    parts = make_parallel(fakes, proposer="ngram", tokenizer=Failing())
    heard = start(parts, ([1, 2, 3], [9, 1], [4, 4]), max_tokens=20).finish()
    assert isinstance(heard[2].error, RuntimeError) and len(heard[2].tokens) >= 4
    assert heard[1].tokens == plain_answer(next_token, [1, 2, 3], 20)
    assert heard[3].tokens == plain_answer(next_token, [4, 4], 20)


def test_the_slot_of_a_failed_answer_starts_afresh() -> None:
    parts = make_parallel(targets(2), proposer="ngram")
    scheduler = Scheduler(parts, 2)
    listener = Listener(scheduler)
    bad, good = scheduler.start([1, 2, 3], max_tokens=9), scheduler.start([4, 5], max_tokens=9)
    listener.step()
    targets_of(parts)[0].next_token = lambda _tokens: 1 // 0
    listener.step()
    listener.step()
    assert listener.heard[bad].error is not None
    targets_of(parts)[0].next_token = NEXT
    again = scheduler.start([1, 2, 3], max_tokens=9)
    heard = listener.finish()
    assert heard[again].tokens == plain_answer(NEXT, [1, 2, 3], 9)
    assert heard[good].tokens == plain_answer(NEXT, [4, 5], 9)


def test_when_a_decode_of_several_fails_each_goes_on_by_itself() -> None:
    parts = make_parallel(targets(3), drafter(), proposer="auto")
    listener = start(parts, PROMPTS[:3], max_tokens=16)
    for _ in range(4):
        listener.step()
    together(parts).failures = [LibraryError("no room"), LibraryError("again")]
    heard = listener.finish()
    assert together(parts).failures == []
    for number, prompt in enumerate(PROMPTS[:3], 1):
        assert heard[number].tokens == plain_answer(NEXT, prompt, 16)


def test_a_drafter_that_fails_for_all_is_asked_for_each() -> None:
    class Single(FakeDrafter):
        def draft_many(self, asks: Sequence[DraftAsk]) -> list[Draft]:
            raise LibraryError("not together")

        def draft(
            self,
            seq: int,
            anchor: int,
            width: int,
            draw: Draw | None = None,
            lead: tuple[int, ...] = (),
        ) -> Draft:
            if seq == 1:
                raise LibraryError("not for this one")
            return super().draft(seq, anchor, width, draw)

    parts = make_parallel(targets(3), Single(drafter().chain), proposer="dspine")
    heard = start(parts, PROMPTS[:3], max_tokens=16).finish()
    drafted = []
    for number, prompt in enumerate(PROMPTS[:3], 1):
        assert heard[number].tokens == plain_answer(NEXT, prompt, 16)
        finish = heard[number].events[-1]
        assert isinstance(finish, Finish)
        drafted.append(finish.stats.drafted)
        assert (finish.stats.disabled_reason is not None) is (number == 2)
    assert drafted[0] > 0 and drafted[1] == 0 and drafted[2] > 0


def test_ctrl_c_in_a_step_of_several_loses_nothing() -> None:
    parts = make_parallel(targets(3), drafter(), proposer="auto")
    listener = start(parts, PROMPTS[:3], max_tokens=16)
    for _ in range(3):
        listener.step()
    target = targets_of(parts)[1]

    def interrupted(tokens: Sequence[int]) -> int:
        target.next_token = NEXT
        raise KeyboardInterrupt

    target.next_token = interrupted
    with pytest.raises(KeyboardInterrupt):
        listener.step()
    heard = listener.finish()
    for number, prompt in enumerate(PROMPTS[:3], 1):
        assert heard[number].tokens == plain_answer(NEXT, prompt, 16)


def test_ctrl_c_while_a_prompt_is_read_loses_nothing() -> None:
    parts = make_parallel(targets(2, n_ctx=128), drafter(), proposer="auto")
    scheduler = Scheduler(parts, 2, chunk=4)
    listener = Listener(scheduler)
    scheduler.start([1, 2, 3], max_tokens=20)
    listener.step()
    scheduler.start([5] * 21, max_tokens=5)
    for _ in range(2):
        listener.step()
    interrupt_after_decode(targets_of(parts)[1])
    with pytest.raises(KeyboardInterrupt):
        listener.step()
    heard = listener.finish()
    assert heard[1].tokens == plain_answer(NEXT, [1, 2, 3], 20)
    assert heard[2].tokens == plain_answer(NEXT, [5] * 21, 5)


def test_a_prompt_takes_the_slot_that_holds_most_of_it_else_the_one_unused_longest() -> None:
    parts = make_parallel(targets(3), proposer="none")
    scheduler = Scheduler(parts, 3)
    listener = Listener(scheduler)

    def slot_of(prompt: list[int]) -> int:
        number = scheduler.start(prompt, max_tokens=2)
        found = next(facts.id for facts in scheduler.slots() if facts.answer == number)
        listener.finish()
        return found

    assert [slot_of([1, 1, 1, 1]), slot_of([2, 2, 2, 2]), slot_of([3, 3, 3, 3])] == [0, 1, 2]
    assert slot_of([2, 2, 2, 5]) == 1
    assert slot_of([7, 7, 7]) == 0, "the one that was not used for longest"
    assert slot_of([3, 3, 3, 3, 3]) == 2
    prefill = listener.heard[6].events[0]
    assert isinstance(prefill, Prefill) and prefill.reused == 4
    # A beginning that is little of what a slot holds is no reason to take its memory away.
    assert slot_of([7, *range(8, 20)]) == 1, "the one that was not used for longest"
    assert slot_of([7, *range(8, 20), 20]) == 1


def test_slots_say_what_they_do() -> None:
    parts = make_parallel(targets(2, n_ctx=128), proposer="none")
    scheduler = Scheduler(parts, 2, chunk=4)
    listener = Listener(scheduler)
    scheduler.start([1, 2, 3], max_tokens=30)
    listener.step()
    listener.step()
    scheduler.start([4] * 20, max_tokens=1)
    listener.step()
    first, second = scheduler.slots()
    assert (first.state, first.prompt_tokens, first.decoded_tokens) == ("answer", 3, 3)
    assert (first.held_tokens, first.n_ctx, first.answer) == (5, 128, 1)
    assert (second.state, second.answer, second.held_tokens) == ("prompt", 2, 4)
    listener.finish()
    assert [facts.state for facts in scheduler.slots()] == ["idle", "idle"]
    assert scheduler.slots()[1].held_tokens == 20


def test_what_cannot_be_answered_is_refused_at_once_and_takes_no_slot() -> None:
    parts = make_parallel(targets(2))
    scheduler = Scheduler(parts, 2)
    with pytest.raises(CapacityError, match=r"65 tokens.*64"):
        scheduler.start([1] * 65)
    with pytest.raises(UsageError, match="max_tokens is 0"):
        scheduler.start([1], max_tokens=0)
    with pytest.raises(TypeError):
        scheduler.start([1], unknown=1)
    assert scheduler.free_slots() == 2
    with pytest.raises(UsageError, match="loaded with 2: load it with parallel=3"):
        Scheduler(parts, 3)


def test_the_engine_waits_until_the_scheduler_is_closed() -> None:
    engine = Engine(make_parallel(targets(2)))
    assert engine.slots == 2
    before = engine.complete([1, 2, 3], max_tokens=8)
    scheduler = engine.scheduler()
    with pytest.raises(UsageError, match="still running"):
        next(iter(engine.generate([1, 2, 3])))
    scheduler.start([9, 9, 9], max_tokens=8)
    scheduler.step()
    scheduler.close()
    with pytest.raises(ClosedError):
        scheduler.step()
    assert engine.complete([1, 2, 3], max_tokens=8).tokens == before.tokens


def test_the_engine_goes_on_with_the_costs_of_one_sequence() -> None:
    """Its policy is that of the scheduler's first slot, which may end in a step of several."""

    class Noting(FixedWidth):
        sharing = 1

        def share(self, sequences: int) -> None:
            self.sharing = sequences

    policies: list[Noting] = []

    def make() -> WidthPolicy:
        policies.append(Noting({"ngram": 3}))
        return policies[-1]

    engine = Engine(make_parallel(targets(2), make_policy=make))
    scheduler = engine.scheduler()
    for prompt in ([1, 2, 3], [4, 5]):
        scheduler.start(prompt)
    for _ in range(3):
        scheduler.step()
    assert [policy.sharing for policy in policies] == [2, 2]
    scheduler.close()
    assert policies[0].sharing == 1


def test_recurrent_targets_are_decoded_in_groups_of_equal_rows() -> None:
    parts = make_parallel(targets(4, recurrent=True), drafter(), proposer="auto", is_recurrent=True)
    heard = start(parts, PROMPTS, max_tokens=20).finish()
    for number, prompt in enumerate(PROMPTS, 1):
        assert heard[number].tokens == plain_answer(NEXT, prompt, 20)
    assert any(len(rows) > 1 for rows in together(parts).decodes)


def test_answers_fill_their_contexts_to_the_last_position() -> None:
    parts = make_parallel(targets(2, n_ctx=24), drafter(1.0), proposer="dspine")
    heard = start(parts, ([1] * 20, [2] * 10)).finish()
    for number, prompt in ((1, [1] * 20), (2, [2] * 10)):
        count = 24 - len(prompt) + 1
        assert heard[number].tokens == plain_answer(NEXT, prompt, count)
        assert heard[number].reason == "context"


prompts = st.lists(st.integers(1, 7), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(prompts, st.integers(1, 25), st.integers(0, 6), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    kind=st.sampled_from(["none", "ngram", "auto", "adaptive"]),
    recurrent=st.booleans(),
    slots=st.integers(2, 4),
    chunk=st.sampled_from([3, 9]),
    seed=st.integers(0, 99),
)
def test_in_any_schedule_every_answer_is_the_one_it_would_be_alone(
    requests: list[tuple[list[int], int, int, bool]],
    kind: str,
    recurrent: bool,
    slots: int,
    chunk: int,
    seed: int,
) -> None:
    """Answers begin and are cancelled at random times; the next ones use what is in memory."""
    parts = make_parallel(
        targets(slots, recurrent=recurrent),
        drafter() if kind != "ngram" else None,
        proposer="auto" if kind == "adaptive" else kind,
        make_policy=adaptive if kind == "adaptive" else None,
        is_recurrent=recurrent,
    )
    scheduler = Scheduler(parts, slots, chunk=chunk)
    listener, chance = Listener(scheduler), random.Random(seed)
    wanted: dict[int, tuple[list[int], int]] = {}
    waiting, cancelled = list(requests), dict[int, int]()
    while waiting or scheduler.free_slots() < slots:
        if waiting and scheduler.free_slots() and chance.random() < 0.5:
            prompt, count, when, is_cancelled = waiting.pop(0)
            number = scheduler.start(prompt, max_tokens=count, plain=chance.random() < 0.2)
            wanted[number] = (prompt, count)
            if is_cancelled:
                cancelled[number] = when
        listener.step()
        for number, when in list(cancelled.items()):
            if not when:
                scheduler.cancel(number)
            cancelled[number] = when - 1
    for number, (prompt, count) in wanted.items():
        heard = listener.heard[number]
        expected = plain_answer(NEXT, prompt, count)
        assert EOS not in expected
        assert heard.tokens == expected[: len(heard.tokens)]
        assert heard.reason == ("length" if len(heard.tokens) == count else "cancelled")
