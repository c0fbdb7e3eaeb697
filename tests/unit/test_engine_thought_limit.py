"""A limit of thoughts holds for emitted tokens, plainly and with drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine.engine.engine import Engine
from dspine.engine.thought_limit import Marks, ThoughtLimit
from dspine.errors import UsageError
from dspine.text.grammar import GrammarOptions
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_engine import BOS, EOS, ByteTokenizer, make_engine
from tests.support.fake_target import FakeTarget

OPENING, CLOSING, VOCAB = 258, 259, 260
MARKS = Marks(OPENING, CLOSING)
SAYS = b"so it is."


class MarkTokenizer(ByteTokenizer):
    vocab_size = VOCAB

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        marks = {"<think>": [OPENING], "</think>": [CLOSING]}
        if parse_special and text in marks:
            return marks[text]
        return super().encode(text, add_special=add_special, parse_special=parse_special)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token >= OPENING:
            return (b"<think>", b"</think>")[token - OPENING]
        return super().piece(token, special=special)


def endless(tokens: Sequence[int]) -> int:
    """Opens thoughts and never ends them by itself; after them it says SAYS."""
    if CLOSING in tokens:
        at = len(tokens) - 1 - [*tokens].index(CLOSING)
        return SAYS[at] if at < len(SAYS) else EOS
    return 97 + len(tokens) % 3 if OPENING in tokens else OPENING


def guess(tokens: Sequence[int], count: int) -> list[int]:
    """What the target would say without a limit."""
    found = list(tokens)
    for _ in range(count):
        found.append(endless(found))
    return found[len(tokens) :]


def engine_that_thinks(drafter: FakeDrafter | None = None) -> Engine:
    target = FakeTarget(endless, VOCAB, n_ctx=500)
    return make_engine(target, drafter, tokenizer=MarkTokenizer())


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("prompt", [[BOS], [BOS, OPENING], [BOS, OPENING, 10]])
@pytest.mark.parametrize("way", ["plain", "ngram", "drafter"])
def test_thoughts_have_at_most_so_many_tokens(budget: int, prompt: list[int], way: str) -> None:
    drafter = FakeDrafter(guess) if way == "drafter" else None
    with engine_that_thinks(drafter) as engine:
        result = engine.complete(prompt, max_thoughts=budget, max_tokens=100, plain=way == "plain")
    tokens = list(result.tokens)
    start = 0 if OPENING in prompt else tokens.index(OPENING) + 1
    assert tokens.index(CLOSING) - start == budget
    assert bytes(tokens[tokens.index(CLOSING) + 1 : -1]) == SAYS
    assert result.reason == "stop"
    if way == "drafter":
        assert result.stats.accepted > 0


def test_without_a_limit_nothing_ends_them() -> None:
    with engine_that_thinks() as engine:
        result = engine.complete([BOS], max_tokens=60)
    assert CLOSING not in result.tokens


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    def short(tokens: Sequence[int]) -> int:
        return CLOSING if len(tokens) == 6 else endless(tokens)

    answers = []
    for budget in (None, 30):
        target = FakeTarget(short, VOCAB, n_ctx=500)
        with make_engine(target, tokenizer=MarkTokenizer()) as engine:
            answers.append(engine.complete([BOS], max_thoughts=budget, max_tokens=100).tokens)
    assert answers[0] == answers[1]


@given(
    tokens=st.lists(st.sampled_from([32, 10, 97, 98, OPENING, CLOSING]), max_size=12),
    budget=st.integers(0, 4),
    begun=st.booleans(),
)
def test_drafts_are_allowed_as_long_as_each_would_be_chosen(
    tokens: list[int], budget: int, begun: bool
) -> None:
    limit = ThoughtLimit(budget, MARKS, lambda t: t in (10, 32), [BOS, OPENING] if begun else [BOS])
    expected = 0
    start = limit.mark()
    for token in tokens:
        logits = np.zeros(VOCAB, np.float32)
        limit.mask(logits)
        if logits[token] == -np.inf:
            break
        expected += 1
        limit.accept(token)
    limit.restore(start)
    assert limit.allowed(tokens) == expected
    assert limit.mark() == start


def test_a_mark_that_samplers_forbade_is_still_the_only_one() -> None:
    limit = ThoughtLimit(0, MARKS, lambda t: False, [OPENING])
    logits = np.full(VOCAB, 3.0, np.float32)
    logits[CLOSING] = -np.inf
    limit.mask(logits)
    assert np.flatnonzero(logits > -np.inf).tolist() == [CLOSING]
    assert limit.forced().tokens == (CLOSING,)


def test_what_cannot_be_limited_is_one_sentence() -> None:
    with engine_that_thinks() as engine:
        with pytest.raises(UsageError, match="max_thoughts is -1: it must be at least 0"):
            engine.generate([BOS], max_thoughts=-1)
        with pytest.raises(UsageError, match="max_thoughts is 3 beside a grammar"):
            engine.generate([BOS], max_thoughts=3, grammar=GrammarOptions.regex("a+"))
        with pytest.raises(UsageError, match="max_thoughts is 3 beside min_tokens"):
            engine.generate([BOS], max_thoughts=3, min_tokens=2)
    target = FakeTarget(lambda _: EOS, VOCAB)
    with pytest.raises(UsageError, match="<think> and </think> with several tokens"):
        make_engine(target, template="{{ x }}<think>").generate([BOS], max_thoughts=3)


def test_where_there_are_no_thoughts_any_limit_holds() -> None:
    engine = make_engine(FakeTarget(lambda t: 97 if len(t) < 9 else EOS, 258))
    assert engine.complete([BOS], max_thoughts=0).text == "a" * 8
