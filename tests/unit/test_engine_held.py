"""Answers on a memory that is kept: the same tokens as cold, whatever came before."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.engine.engine import Engine
from dspine.engine.events import Event, Finish, Prefill, Step
from dspine.engine.held import MARGIN, WORTH_KEEPING, HeldContext
from dspine.engine.sequence import common_prefix
from dspine.engine.trace import Trace
from dspine.errors import CapacityError, LibraryError
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_engine import VOCAB, make_engine
from tests.support.fake_target import FakeTarget, mixing, plain_answer

N_CTX = 400


@dataclass(frozen=True)
class Turn:
    """How the prompt comes from the text so far, and how its answer ends."""

    keep: float
    new: list[int]
    max_tokens: int
    plain: bool
    ending: str
    cache: bool


TURNS = st.lists(
    st.builds(
        Turn,
        keep=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
        new=st.lists(st.integers(0, 9), max_size=60),
        max_tokens=st.integers(1, 30),
        plain=st.booleans(),
        ending=st.sampled_from(["whole", "cancel", "cancel at once", "leave", "interrupt"]),
        cache=st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=7,
)


class Interrupting(FakeTarget):
    """Raises KeyboardInterrupt in a chosen decode, before or after it has happened."""

    fuse = -1
    late = False

    def decode(self, tokens, position, logits):  # type: ignore[no-untyped-def]
        self.fuse -= 1
        if self.fuse == 0 and not self.late:
            raise KeyboardInterrupt
        super().decode(tokens, position, logits)
        if self.fuse == 0:
            raise KeyboardInterrupt


def read(events: Iterator[Event], ending: str, cancel: threading.Event) -> list[Event]:
    seen: list[Event] = []
    if ending == "cancel at once":
        cancel.set()
    for event in events:
        seen.append(event)
        if len(seen) == 3 and ending == "cancel":
            cancel.set()
        if len(seen) == 3 and ending == "leave":
            break
    events.close()  # type: ignore[attr-defined]
    return seen


@settings(max_examples=300, deadline=None)
@given(
    turns=TURNS,
    salt=st.integers(0, 10_000),
    window=st.one_of(st.none(), st.integers(2, 40)),
    recurrent=st.booleans(),
    proposer=st.sampled_from(["dspine", "auto", "ngram"]),
    hit_rate=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
)
def test_any_conversation_gives_the_tokens_of_cold_runs(
    turns: list[Turn],
    salt: int,
    window: int | None,
    recurrent: bool,
    proposer: str,
    hit_rate: float,
    seed: int,
) -> None:
    next_token, chance = mixing(VOCAB, salt), random.Random(seed)

    def chain(tokens: Sequence[int], count: int) -> list[int]:
        right = plain_answer(next_token, tokens, count)
        return [t if chance.random() < hit_rate else 1 for t in right]

    target = Interrupting(next_token, VOCAB, n_ctx=N_CTX, n_batch=40, recurrent=recurrent)
    drafter = FakeDrafter(chain, window=window)
    engine = make_engine(target, drafter, proposer=proposer, is_recurrent=recurrent)
    text: list[int] = []
    for turn in turns:
        prompt = ([*text[: round(turn.keep * len(text))], *turn.new] or [1])[: N_CTX - 40]
        cancel = threading.Event()
        target.fuse = chance.randrange(1, 9) if turn.ending == "interrupt" else -1
        target.late = chance.random() < 0.5
        before = list(target.memory)
        events = read(
            engine.generate(
                prompt,
                max_tokens=turn.max_tokens,
                plain=turn.plain,
                cancel=cancel,
                cache_prompt=turn.cache,
            ),
            turn.ending,
            cancel,
        )
        answer = [t for event in events if isinstance(event, Step) for t in event.tokens]
        cold = plain_answer(next_token, prompt, len(answer))
        if 257 in cold:
            assert cold.index(257) == len(cold) - 1
        assert answer == cold
        if turn.ending == "whole":
            assert len(answer) == turn.max_tokens or answer[-1] == 257
        for event in events:
            if isinstance(event, Prefill):
                assert event.reused <= min(common_prefix(before, prompt), len(prompt) - 1)
                assert turn.cache or event.reused == 0
            if isinstance(event, Finish):
                assert event.stats.disabled_reason is None
        text = [*prompt, *answer]
        held = engine._held.tokens
        assert list(held) == target.memory == text[: len(held)]
        assert len(held) < len(text) or turn.ending == "interrupt"
        for position, token in drafter.context.items():
            assert position >= len(text) or token == text[position]


def conversation(
    recurrent: bool = False, window: int | None = None, **options: object
) -> tuple[Engine, FakeTarget, FakeDrafter]:
    next_token = mixing(VOCAB - 2, 3)
    target = FakeTarget(next_token, VOCAB, n_ctx=2000, n_batch=512, recurrent=recurrent)
    drafter = FakeDrafter(lambda tokens, n: plain_answer(next_token, tokens, n), window=window)
    return make_engine(target, drafter, is_recurrent=recurrent), target, drafter


def answered(engine: Engine, prompt: list[int], **options: object) -> tuple[Prefill, list[int]]:
    events = list(engine.generate(prompt, max_tokens=12, **options))  # type: ignore[arg-type]
    assert isinstance(events[0], Prefill)
    tokens = [t for event in events if isinstance(event, Step) for t in event.tokens]
    finish = events[-1]
    assert isinstance(finish, Finish) and finish.stats.cached_tokens == events[0].reused
    return events[0], tokens


def numbers(count: int, salt: int = 0) -> list[int]:
    return [random.Random(salt * 1000 + i).randrange(200) for i in range(count)]


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_next_turn_decodes_only_what_is_new(recurrent: bool) -> None:
    engine, target, _ = conversation(recurrent)
    prompt = numbers(300)
    first, answer = answered(engine, prompt)
    assert (first.tokens, first.reused, first.decoded) == (300, 0, 299)
    held = engine.held.tokens
    assert held >= 300 + 12 - 16
    target.decoded.clear()
    second, _ = answered(engine, [*prompt, *answer, *numbers(20, 1)])
    assert second.reused == held
    assert target.decoded[0][0] == held


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_same_prompt_again_decodes_its_anchor_only(recurrent: bool) -> None:
    engine, target, _ = conversation(recurrent)
    prompt = numbers(300)
    _, answer = answered(engine, prompt)
    target.decoded.clear()
    again, repeated = answered(engine, prompt)
    assert (again.reused, again.decoded) == (299, 0)
    assert target.decoded[0][0] == 299
    assert repeated == answer


def test_a_prompt_that_is_all_in_memory_is_cut_before_its_last_token() -> None:
    engine, _, _ = conversation()
    prompt = numbers(50)
    answered(engine, prompt)
    shorter, _ = answered(engine, prompt[:30])
    assert shorter.reused == 29
    assert answered(engine, prompt[:1])[0].reused == 0


def test_an_edit_of_the_first_token_starts_cold() -> None:
    engine, target, _ = conversation()
    prompt = numbers(50)
    answered(engine, prompt)
    target.decoded.clear()
    edited, _ = answered(engine, [prompt[0] + 1, *prompt[1:]])
    assert edited.reused == 0
    assert target.decoded[0][0] == 0
    assert engine._held.tokens[0] == prompt[0] + 1


@pytest.mark.parametrize("rewritten", [1, 5, MARGIN])
def test_a_template_that_rewrites_the_end_of_the_prompt_costs_a_recurrent_target_little(
    rewritten: int,
) -> None:
    engine, _, _ = conversation(recurrent=True)
    prompt = numbers(300)
    _, answer = answered(engine, prompt)
    common = len(prompt) - rewritten
    following, _ = answered(engine, [*prompt[:common], 201, *numbers(40, 2), *answer])
    assert common - 64 <= following.reused <= common


def test_where_texts_parted_once_a_recurrent_state_is_kept() -> None:
    engine, _, _ = conversation(recurrent=True)
    system = numbers(200)
    answered(engine, [*system, *numbers(100, 1)])
    parted, _ = answered(engine, [*system, 201, *numbers(100, 2)])
    assert parted.reused == 0  # no state was kept there
    again, _ = answered(engine, [*system, 202, *numbers(100, 3)])
    assert again.reused == 200
    assert WORTH_KEEPING < 200


def test_recurrent_states_are_bounded_and_reported() -> None:
    engine, _, _ = conversation(recurrent=True)
    text = numbers(50)
    for turn in range(12):
        _, answer = answered(engine, text)
        text = [*text, *answer, *numbers(40, turn)]
        facts = engine.held
        assert facts.checkpoints <= 8
        assert facts.checkpoint_bytes > 0
    assert facts.checkpoints == 8
    dense, _, _ = conversation()
    answered(dense, text)
    assert (dense.held.checkpoints, dense.held.checkpoint_bytes) == (0, 0)


def test_an_answer_without_drafts_leaves_a_gap_that_is_decoded_again_for_the_window() -> None:
    engine, _, drafter = conversation(window=20)
    prompt = numbers(300)
    _, answer = answered(engine, prompt)
    text = [*prompt, *answer, 7]
    _, answer = answered(engine, text, plain=True)
    text = [*text, *answer, 8]
    third, _ = answered(engine, text)
    # The anchor sits at 325 and sees from 306 on; features end at 311.
    assert len(text) == 326
    assert 306 <= third.reused <= 312
    far = [*text, *numbers(100, 5)]
    fourth, _ = answered(engine, far, plain=True)
    assert fourth.reused >= len(text)
    fifth, _ = answered(engine, [*far, 9])
    assert fifth.reused == drafter.first_visible(len(far))


def test_without_a_window_nothing_is_decoded_again_while_every_answer_drafts() -> None:
    engine, _, drafter = conversation()
    prompt = numbers(100)
    _, answer = answered(engine, prompt)
    second, _ = answered(engine, [*prompt, *answer])
    assert second.reused == 100 + 12 - 1
    assert sorted(drafter.context) == list(range(len(drafter.context)))


def test_two_conversations_take_turns_without_mixing() -> None:
    engine, _, _ = conversation(window=30)
    alone, _, _ = conversation(window=30)
    texts = {"a": numbers(60, 1), "b": [*numbers(20, 1), *numbers(40, 2)]}
    for turn in range(3):
        for name in "ab":
            _, answer = answered(engine, texts[name])
            assert answered(alone, texts[name], cache_prompt=False)[1] == answer
            texts[name] = [*texts[name], *answer, turn]


def test_a_prompt_that_is_too_long_leaves_the_memory_as_it_was() -> None:
    engine, _, _ = conversation()
    prompt = numbers(50)
    answered(engine, prompt)
    held = engine._held.tokens
    with pytest.raises(CapacityError, match="2001 tokens"):
        engine.generate([1] * 2001)
    assert engine._held.tokens == held


def test_after_a_failure_nothing_counts_as_held() -> None:
    class Failing(FakeTarget):
        broken = False

        def decode(self, tokens, position, logits):  # type: ignore[no-untyped-def]
            super().decode(tokens, position, logits)
            if self.broken:
                raise LibraryError("it failed")

    next_token = mixing(VOCAB - 2, 3)
    target = Failing(next_token, VOCAB, n_ctx=200)
    engine = make_engine(target)
    answered(engine, [1, 2, 3])
    target.broken = True
    with pytest.raises(LibraryError):
        answered(engine, [1, 2, 3, 4])
    assert engine.held.tokens == 0
    target.broken = False
    first, tokens = answered(engine, [1, 2, 3, 4])
    assert first.reused == 0
    assert tokens == plain_answer(next_token, [1, 2, 3, 4], 12)


def test_features_that_wait_are_dropped_when_no_window_reaches_back_to_them() -> None:
    engine, _, drafter = conversation(window=4)
    list(engine.generate([1], max_tokens=1))
    answered(engine, [1, *plain_answer(mixing(VOCAB - 2, 3), [1], 1), *numbers(30)])
    assert engine.disabled_reason is None
    assert drafter.additions[0][0] == 31 - 4 + 1


def test_an_interrupt_while_memory_is_cut_back_leaves_nothing_certain() -> None:
    class Interrupted(FakeTarget):
        armed = False

        def trim(self, length: int) -> bool:
            if self.armed:
                raise KeyboardInterrupt
            return super().trim(length)

    next_token = mixing(VOCAB - 2, 3)
    target = Interrupted(next_token, VOCAB, n_ctx=200)
    engine = make_engine(target)
    answered(engine, [1, 2, 3])
    target.armed = True
    (finish,) = engine.generate([1, 2, 9, 9, 9], max_tokens=5)
    assert isinstance(finish, Finish) and finish.reason == "cancelled"
    assert engine.held.tokens == 0
    target.armed = False
    first, tokens = answered(engine, [1, 2, 9])
    assert (first.reused, tokens) == (0, plain_answer(next_token, [1, 2, 9], 12))


def test_with_a_trace_everything_is_decoded() -> None:
    engine, _, _ = conversation()
    prompt = numbers(50)
    answered(engine, prompt)
    trace = Trace()
    first, _ = answered(engine, prompt, trace=trace)
    assert first.reused == 0
    assert [t for chunk in trace.chunks for t in chunk] == prompt[:-1]


def test_after_a_comparison_the_next_answer_starts_cold() -> None:
    engine, _, _ = conversation()
    prompt = numbers(50)
    engine.compare(prompt, max_tokens=12)
    first, tokens = answered(engine, prompt)
    assert first.reused == 0
    assert tokens == plain_answer(mixing(VOCAB - 2, 3), prompt, 12)


def test_common_prefix() -> None:
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], (1, 2, 3)) == 2
    assert common_prefix([1, 2, 3], [1, 9, 3]) == 1


def test_a_memory_that_cannot_be_cut_is_emptied() -> None:
    class Stubborn(FakeTarget):
        def trim(self, length: int) -> bool:
            return False

    target = Stubborn(mixing(9), 9)
    held = HeldContext(target)
    assert held.begin([1, 2, 3]) == 0
    target.decode([1, 2], 0, "none")
    held.end([1, 2, 3])
    assert held.begin([1, 5, 6]) == 0
    assert target.memory == []
