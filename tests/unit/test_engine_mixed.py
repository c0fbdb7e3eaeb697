"""A prompt that is read while others answer: its pieces are part of their decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dspine.engine.events import Finish, Prefill, Step
from dspine.engine.parts import EngineParts
from dspine.engine.scheduler import Scheduler
from dspine.engine.target import LogitRows
from dspine.engine.width import FixedWidth, Outcome, WidthPolicy
from dspine.errors import LibraryError
from tests.support.fake_engine import make_parallel
from tests.support.fake_target import plain_answer
from tests.support.scheduling import (
    NEXT,
    Listener,
    drafter,
    interrupt_after_decode,
    targets,
    targets_of,
    together,
)

LONG = [5, 6, 7, 5, 6] * 4 + [3]
"""20 tokens before the anchor."""


def running(parts: EngineParts, *prompts: list[int], chunk: int = 8) -> Listener:
    """Answers that are under way."""
    scheduler = Scheduler(parts, parts.n_slots, chunk=chunk)
    listener = Listener(scheduler)
    for prompt in prompts:
        scheduler.start(prompt, max_tokens=40)
    for _ in prompts:
        listener.step()
    together(parts).decodes.clear()
    for target in targets_of(parts):
        target.decoded.clear()
    return listener


def make(count: int, proposer: str = "none", **options: Any) -> EngineParts:
    network = drafter() if proposer in ("dspine", "auto") else None
    return make_parallel(targets(count, n_ctx=128), network, proposer=proposer, **options)


def test_pieces_are_decoded_with_the_verify_and_the_last_one_before_it() -> None:
    parts = make(2)
    listener = running(parts, [1, 2, 3])
    number = listener.scheduler.start(LONG, max_tokens=6)
    happened = [listener.step() for _ in range(3)]
    assert together(parts).decodes == [{0: 1, 1: 8}, {0: 1, 1: 8}, {0: 1, 1: 1}]
    assert [len(tokens) for _, tokens in targets_of(parts)[1].decoded] == [8, 8, 4, 1]
    assert all((1, Step) in [(who, type(event)) for who, event in step] for step in happened)
    kinds = [[type(event) for who, event in step if who == number] for step in happened]
    assert kinds == [[], [], [Prefill, Step]], "it answers in the step that ends its prompt"
    heard = listener.finish()
    assert heard[number].tokens == plain_answer(NEXT, LONG, 6)
    assert heard[1].tokens == plain_answer(NEXT, [1, 2, 3], 40)


@pytest.mark.parametrize("proposer", ["ngram", "dspine", "auto"])
def test_drafts_and_texts_are_those_of_prompts_read_apart(proposer: str) -> None:
    found = []
    for mixes in (True, False):
        parts = make(3, proposer)
        together(parts).mixes = mixes
        listener = running(parts, [1, 2, 3], [4, 5])
        number = listener.scheduler.start(LONG, max_tokens=20)
        heard = listener.finish()
        assert heard[number].tokens == plain_answer(NEXT, LONG, 20)
        assert heard[2].tokens == plain_answer(NEXT, [4, 5], 40)
        assert any(rows.get(2) == 8 for rows in together(parts).decodes) is mixes
        ends = [heard[answer].events[-1] for answer in (1, 2, number)]
        stats = [end.stats for end in ends if isinstance(end, Finish)]
        found.append([(one.steps, one.drafted, one.accepted, one.prompt_tokens) for one in stats])
    assert found[0] == found[1]


def test_a_prompt_among_answers_needs_no_rows_without_meaning() -> None:
    parts = make(3)
    listener = running(parts, [1, 2, 3], [4], [6, 7])
    listener.scheduler.cancel(2)
    listener.step()
    assert together(parts).decodes == [{0: 1, 1: 1, 2: 1}], "an idle slot fills the gap"
    together(parts).decodes.clear()
    number = listener.scheduler.start(LONG, max_tokens=4)
    listener.step()
    assert together(parts).decodes == [{0: 1, 1: 8, 2: 1}]
    assert listener.finish()[number].tokens == plain_answer(NEXT, LONG, 4)


def narrow(parts: EngineParts) -> None:
    together(parts).n_batch = 17


@pytest.mark.parametrize(
    ("chunk", "change"),
    [(3, lambda _: None), (8, narrow)],
    ids=["fewer rows than a verify", "a batch without room"],
)
def test_a_piece_that_does_not_fit_is_decoded_apart(
    chunk: int, change: Callable[[EngineParts], None]
) -> None:
    parts = make(3, "ngram")
    change(parts)
    # The same token again and again: three drafts a step.
    targets_of(parts)[0].next_token = lambda _tokens: 3
    listener = running(parts, [3] * 12, chunk=chunk)
    number = listener.scheduler.start(LONG, max_tokens=4)
    listener.step()
    assert together(parts).decodes == [{0: 4}]
    assert [len(tokens) for _, tokens in targets_of(parts)[1].decoded] == [chunk]
    assert listener.finish()[number].tokens == plain_answer(NEXT, LONG, 4)


@pytest.mark.parametrize("recurrent", [True, False])
def test_states_and_taps_that_need_equal_rows_keep_prompts_apart(recurrent: bool) -> None:
    parts = make_parallel(
        targets(2, n_ctx=128, recurrent=recurrent), proposer="none", is_recurrent=recurrent
    )
    together(parts).mixes = recurrent
    scheduler = Scheduler(parts, 2, chunk=8)
    listener = Listener(scheduler)
    scheduler.start([1, 2, 3], max_tokens=20)
    listener.step()
    number = scheduler.start(LONG, max_tokens=4)
    assert listener.finish()[number].tokens == plain_answer(NEXT, LONG, 4)
    assert all(set(rows.values()) == {1} for rows in together(parts).decodes)


def test_a_failed_decode_costs_neither_a_piece_nor_a_step() -> None:
    parts = make(2, "auto")
    listener = running(parts, [1, 2, 3])
    number = listener.scheduler.start(LONG, max_tokens=6)
    listener.step()
    together(parts).failures = [LibraryError("no room")]
    happened = listener.step()
    assert (1, Step) in [(who, type(event)) for who, event in happened]
    assert together(parts).failures == []
    heard = listener.finish()
    pieces = [tokens for _, tokens in targets_of(parts)[1].decoded]
    assert [len(tokens) for tokens in pieces[:3]] == [8, 8, 4], "nothing is decoded twice"
    assert heard[number].tokens == plain_answer(NEXT, LONG, 6)
    assert heard[1].tokens == plain_answer(NEXT, [1, 2, 3], 40)


def test_a_piece_that_fails_by_itself_ends_its_answer_alone() -> None:
    parts = make(2)
    listener = running(parts, [1, 2, 3])
    number = listener.scheduler.start(LONG, max_tokens=6)
    listener.step()
    together(parts).failures = [LibraryError("no room")]

    def fail(tokens: Sequence[int], position: int, logits: LogitRows) -> None:
        raise LibraryError(f"no {len(tokens)} rows at {position} with logits {logits}")

    targets_of(parts)[1].decode = fail  # type: ignore[method-assign]
    listener.step()
    assert isinstance(listener.heard[number].error, LibraryError)
    assert listener.finish()[1].tokens == plain_answer(NEXT, [1, 2, 3], 40)


@pytest.mark.parametrize("sequence", [0, 1])
def test_ctrl_c_in_such_a_decode_loses_nothing(sequence: int) -> None:
    parts = make(2, "auto")
    listener = running(parts, [1, 2, 3])
    number = listener.scheduler.start(LONG, max_tokens=6)
    listener.step()
    interrupt_after_decode(targets_of(parts)[sequence])
    with pytest.raises(KeyboardInterrupt):
        listener.step()
    heard = listener.finish()
    assert heard[number].tokens == plain_answer(NEXT, LONG, 6)
    assert heard[1].tokens == plain_answer(NEXT, [1, 2, 3], 40)


def test_a_prompt_can_be_cancelled_between_its_pieces() -> None:
    parts = make(2)
    listener = running(parts, [1, 2, 3])
    number = listener.scheduler.start(LONG)
    listener.step()
    listener.scheduler.cancel(number)
    listener.step()
    assert listener.heard[number].reason == "cancelled"
    assert together(parts).decodes == [{0: 1, 1: 8}]
    again = listener.scheduler.start(LONG, max_tokens=6)
    heard = listener.finish()
    prefill = heard[again].events[0]
    assert isinstance(prefill, Prefill) and prefill.reused == 8
    assert heard[again].tokens == plain_answer(NEXT, LONG, 6)


def test_policies_learn_chances_of_such_a_step_but_no_time() -> None:
    class Noting(FixedWidth):
        def __init__(self) -> None:
            super().__init__({"ngram": 3})
            self.outcomes: list[Outcome] = []

        def observe(self, outcome: Outcome) -> None:
            self.outcomes.append(outcome)

    policies: list[Noting] = []

    def noting() -> WidthPolicy:
        policies.append(Noting())
        return policies[-1]

    parts = make(2, "ngram", make_policy=noting)
    listener = running(parts, [1, 2, 3])
    policies[0].outcomes.clear()
    listener.scheduler.start(LONG, max_tokens=6)
    for _ in range(3):
        listener.step()
    # Two pieces in its decodes; the third step is one of two answers.
    times = [outcome.verify_ms for outcome in policies[0].outcomes]
    assert times[:2] == [0.0, 0.0] and times[2] > 0.0
    assert all(outcome.confirmed for outcome in policies[0].outcomes)
