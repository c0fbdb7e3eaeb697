"""Log-probabilities against a softmax written out in high precision, and through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine.engine.events import Step
from dspine.engine.logprobs import LogprobRecorder
from dspine.errors import UsageError
from dspine.text.grammar import GrammarOptions
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_engine import BOS, EOS, VOCAB, make_engine
from tests.support.fake_target import FakeTarget, plain_answer

ANSWER = b'{"a": 12}'


def says(tokens: Sequence[int]) -> int:
    at = len(tokens) - 1
    return ANSWER[at] if at < len(ANSWER) else EOS


class Uneven(FakeTarget):
    """Logits that differ from place to place; the scripted token has the largest."""

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        chance = np.random.default_rng(len(self.decoded_prefix(row)))
        values = chance.normal(0, 2, self.vocab_size).astype(np.float32)
        values[self.argmax(row)] = 12.0
        return values


@given(st.lists(st.integers(-60, 60), min_size=2, max_size=40), st.data())
def test_logprobs_are_the_log_softmax_of_the_raw_logits(
    quarters: list[int], data: st.DataObject
) -> None:
    logits = (np.array(quarters, np.float32) / 4).astype(np.float32)
    token = data.draw(st.integers(0, len(quarters) - 1))
    count = data.draw(st.integers(0, len(quarters)))
    recorder = LogprobRecorder(count, len(quarters))
    recorder.chosen(logits, token)
    (noted,) = recorder.take()
    total = sum(Fraction(float(np.exp(np.float64(value)))) for value in logits)
    expected = [float(np.float64(value) - np.log(np.float64(float(total)))) for value in logits]
    assert noted.token == token
    assert noted.logprob == pytest.approx(expected[token], abs=1e-5)
    order = sorted(range(len(quarters)), key=lambda index: (-quarters[index], index))[:count]
    assert [index for index, _ in noted.top] == order
    assert [p for _, p in noted.top] == pytest.approx([expected[i] for i in order], abs=1e-5)


def test_an_interrupted_step_takes_its_choices_back() -> None:
    recorder = LogprobRecorder(1, 3)
    logits = np.array([0.0, 1.0, 2.0], np.float32)
    recorder.chosen(logits, 2)
    mark = recorder.mark()
    recorder.chosen(logits, 1)
    recorder.restore(mark)
    assert [noted.token for noted in recorder.take()] == [2]
    assert recorder.take() == ()


@pytest.mark.parametrize("count", [-1, VOCAB + 1])
def test_a_count_outside_of_the_vocabulary_is_refused(count: int) -> None:
    engine = make_engine(FakeTarget(says, VOCAB))
    with pytest.raises(UsageError, match=f"logprobs is {count}: ask for 0 to {VOCAB}"):
        engine.generate([BOS], logprobs=count)


def test_they_come_with_each_step_equal_for_plain_and_speculative() -> None:
    def half_right(tokens: Sequence[int], count: int) -> list[int]:
        right = plain_answer(says, tokens, count)
        return [t if (len(tokens) + i) % 3 else 65 for i, t in enumerate(right)]

    engine = make_engine(Uneven(says, VOCAB), FakeDrafter(half_right))
    plain = engine.complete([BOS], logprobs=2, plain=True)
    steps = [e for e in engine.generate([BOS], logprobs=2) if isinstance(e, Step)]
    assert any(len(step.tokens) > 1 for step in steps)
    for step in steps:
        assert step.logprobs is not None
        assert tuple(noted.token for noted in step.logprobs) == step.tokens
    fast = [noted for step in steps for noted in step.logprobs or ()]
    assert plain.logprobs is not None and tuple(fast) == plain.logprobs
    assert all(noted.top[0] == (noted.token, noted.logprob) for noted in fast)
    assert engine.complete([BOS]).logprobs is None


def test_with_a_grammar_they_stay_those_of_the_target() -> None:
    engine = make_engine(Uneven(says, VOCAB))
    grammar = GrammarOptions.regex("[xy]")
    result = engine.complete([BOS], grammar=grammar, logprobs=1)
    assert result.text in ("x", "y") and result.tokens[1] == EOS
    assert result.logprobs is not None
    first = result.logprobs[0]
    # The target wanted a brace, which the grammar forbids.
    assert first.token == result.tokens[0] and first.top[0][0] == ANSWER[0]
    assert first.logprob < first.top[0][1] < 0.0
