"""Sampling with real random numbers: the right distribution, the same text for the same seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.engine.sampling import SamplingChooser, SamplingOptions
from dspine.errors import UsageError
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_engine import VOCAB as VOCAB_OF_BYTES
from tests.support.fake_engine import make_engine
from tests.support.fake_target import FakeTarget, mixing
from tests.support.toy_answers import PURE, Forbid, answer
from tests.support.toy_target import (
    OracleSampler,
    ToyDrafter,
    ToyTarget,
    chi_square,
    is_plausible,
)

VOCAB = 6


def random_logits(salt: int, memory: int = 2) -> Callable[[Sequence[int]], npt.NDArray[np.float32]]:
    """Logits that look random and depend on the last `memory` tokens."""

    @cache
    def of(seen: tuple[int, ...]) -> npt.NDArray[np.float32]:
        chance = np.random.default_rng([salt, *seen])
        return (1.5 * chance.standard_normal(VOCAB)).astype(np.float32)

    return lambda tokens: of(tuple(tokens[-memory:]))


def scores_of(tokens: Sequence[int]) -> tuple[Sequence[int], Sequence[float]]:
    """A drafter that is roughly right about 4 of 6 tokens."""
    return drafter_row(*tokens[-2:])


@cache
def drafter_row(*seen: int) -> tuple[Sequence[int], Sequence[float]]:
    chance = np.random.default_rng([7, *seen])
    logits = random_logits(3)(seen)
    ids = chance.permutation(VOCAB)[:4]
    return ids.tolist(), (logits[ids] + 0.7 * chance.standard_normal(4)).tolist()


@pytest.mark.parametrize("verification", ["match", "rejection"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_transitions_of_a_long_answer_have_the_targets_distribution(
    verification: Any, temperature: float
) -> None:
    options = SamplingOptions(
        temperature=temperature,
        seed=11,
        verification=verification,
        **PURE,
    )
    logits = random_logits(3)
    known = {
        pair: OracleSampler(options).probabilities(logits(pair))
        for pair in product(range(VOCAB), repeat=2)
    }
    target = ToyTarget(logits, VOCAB, n_ctx=5010)
    chooser = SamplingChooser(target, OracleSampler(options), options, 2)
    tokens = [1, 2, *answer(target, [1, 2], chooser, 5000, ToyDrafter(scores_of))]
    counts = {pair: np.zeros(VOCAB) for pair in known}
    for one, two, three in zip(tokens, tokens[1:], tokens[2:], strict=False):
        counts[one, two][three] += 1
    tests = [chi_square(counts[pair], chances) for pair, chances in known.items()]
    assert is_plausible(sum(test[0] for test in tests), sum(test[1] for test in tests))
    assert len(target.decoded) < 4000, "no draft was accepted"


@settings(max_examples=60, deadline=None)
@given(
    salt=st.integers(0, 1000),
    seed=st.integers(0, 2**64 - 1),
    drafts=st.integers(1, 5),
    quality=st.floats(0, 3),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    penalty=st.sampled_from([1.0, 1.3]),
    frequency=st.sampled_from([0.0, 1.5]),
)
def test_match_gives_the_plain_answer_of_the_seed_whatever_is_drafted(
    salt: int,
    seed: int,
    drafts: int,
    quality: float,
    temperature: float,
    penalty: float,
    frequency: float,
) -> None:
    options = SamplingOptions(
        temperature=temperature,
        seed=seed,
        repeat_penalty=penalty,
        frequency_penalty=frequency,
        repeat_last_n=5,
        xtc_probability=0.4,
        xtc_threshold=0.2,
        top_k=4,
    )
    logits = random_logits(salt)

    def scores(tokens: Sequence[int]) -> tuple[Sequence[int], Sequence[float]]:
        chance = np.random.default_rng([salt, drafts, *tokens[-3:]])
        ids = chance.permutation(VOCAB)[:3]
        return ids.tolist(), (quality * logits(tokens)[ids] + chance.standard_normal(3)).tolist()

    def start(drafter: FakeDrafter | None) -> list[int]:
        target = ToyTarget(logits, VOCAB)
        sampler = OracleSampler(options, [1, 2, 3])
        chooser = SamplingChooser(target, sampler, options, 3)
        return answer(target, [1, 2, 3], chooser, 30, drafter, drafts)

    plain = start(None)
    assert start(ToyDrafter(scores)) == plain
    assert start(None) == plain


def test_the_same_seed_gives_the_same_text_with_rejection_too() -> None:
    def start(seed: int) -> list[int]:
        options = SamplingOptions(temperature=1.0, seed=seed, verification="rejection", **PURE)
        target = ToyTarget(random_logits(3), VOCAB)
        chooser = SamplingChooser(target, OracleSampler(options), options, 2)
        return answer(target, [1, 2], chooser, 40, ToyDrafter(scores_of))

    assert start(5) == start(5)
    assert start(5) != start(6)


def test_a_shared_seed_makes_more_drafts_right_than_the_best_ones_are() -> None:
    def steps(coupled: bool) -> int:
        options = SamplingOptions(temperature=1.0, seed=5, **PURE)
        target = ToyTarget(random_logits(3), VOCAB, n_ctx=1100)
        chooser = SamplingChooser(target, OracleSampler(options), options, 2)
        if not coupled:
            chooser.draw = lambda: None  # type: ignore[method-assign]
        assert len(answer(target, [1, 2], chooser, 1000, ToyDrafter(scores_of))) == 1000
        return len(target.decoded)

    assert steps(coupled=True) < 0.9 * steps(coupled=False)


def test_an_undone_step_leaves_no_trace_in_the_chooser() -> None:
    options = SamplingOptions(temperature=1.0, seed=3, frequency_penalty=2.0, **PURE)
    target = ToyTarget(random_logits(1), VOCAB)
    sampler = OracleSampler(options, [1, 2])
    chooser = SamplingChooser(target, sampler, options, 2, constraint=Forbid(2))
    target.decode([1, 2, 3], 0, "all")

    def step() -> list[int]:
        tokens = list[int]()
        for row in (0, 1, 2):
            tokens.append(chooser.choose(row))
            chooser.accept(tokens[-1])
        return tokens

    mark = chooser.mark()
    first = step()
    chooser.restore(mark)
    assert sampler.history == [1, 2]
    assert step() == first


def test_listeners_hear_the_row_as_the_target_gave_it() -> None:
    heard: list[tuple[float, int]] = []

    class Listener:
        def chosen(self, logits: npt.NDArray[np.float32], token: int) -> None:
            heard.append((float(logits[2]), token))

        def mark(self) -> object:
            return len(heard)

        def restore(self, mark: object) -> None:
            assert isinstance(mark, int)
            del heard[mark:]

    options = SamplingOptions(temperature=1.0, seed=3)
    target = ToyTarget(random_logits(1), VOCAB)
    chooser = SamplingChooser(
        target, OracleSampler(options), options, 1, constraint=Forbid(2), listener=Listener()
    )
    target.decode([2], 0, "all")
    token = chooser.choose(0)
    assert token != 2
    assert heard == [(float(random_logits(1)([2])[2]), token)]


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("temperature", -0.1, "temperature is -0.1"),
        ("temperature", float("nan"), "temperature is nan"),
        ("top_k", -1, "top_k is -1"),
        ("top_p", 1.5, "between 0 and 1"),
        ("min_p", -1, "between 0 and 1"),
        ("repeat_penalty", 0, "above 0"),
        ("frequency_penalty", float("inf"), "frequency_penalty is inf"),
        ("repeat_last_n", -2, "repeat_last_n is -2"),
        ("dry_base", 0.5, "at least 1"),
        ("dry_sequence_breakers", ("",), "1 to 40"),
        ("xtc_threshold", 2, "between 0 and 1"),
        ("logit_bias", ((3, float("nan")),), "token 3"),
        ("logit_bias", ((-3, 1.0),), "-3"),
        ("seed", -1, "seed is -1"),
        ("verification", "typical", "auto, match or rejection"),
    ],
)
def test_values_that_cannot_be_are_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingOptions(**{option: value})


def test_only_what_changes_the_best_token_needs_a_chain() -> None:
    assert SamplingOptions().is_greedy
    assert SamplingOptions(top_k=1, seed=4).is_greedy
    assert not SamplingOptions(temperature=1.0).is_greedy
    assert not SamplingOptions(repeat_penalty=1.1).is_greedy
    assert not SamplingOptions(logit_bias=((1, 2.0),)).is_greedy
    assert SamplingOptions(repeat_penalty=1.1, repeat_last_n=0).is_greedy
    assert SamplingOptions(seed=None).rejects and not SamplingOptions(seed=1).rejects


@pytest.mark.parametrize("plain", [True, False])
def test_without_samplers_a_temperature_is_refused_and_not_dropped(plain: bool) -> None:
    engine = make_engine(FakeTarget(mixing(VOCAB_OF_BYTES), VOCAB_OF_BYTES))
    with engine, pytest.raises(UsageError, match="cannot sample"):
        engine.complete([1, 2, 3], sampling=SamplingOptions(temperature=0.8), plain=plain)
