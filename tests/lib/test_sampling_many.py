"""20,000 tokens drawn through llama.cpp's samplers, with drafts: their exact distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dspine.engine.sampling import SamplingChooser, SamplingOptions, TokenSampler, Verification
from dspine.llama.sampler import SamplerChain
from tests.support.toy_answers import PURE, answer
from tests.support.toy_target import (
    OracleSampler,
    Probabilities,
    ToyDrafter,
    ToyTarget,
    is_plausible,
)
from tests.support.transitions import Fit, History, fit, surplus

VOCAB = 8
SAMPLES = 20_000
START = (1, 2)

SETTINGS: dict[str, dict[str, Any]] = {
    "top-k and top-p": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.0},
    "penalties": {
        "temperature": 1.0,
        "top_k": 6,
        "min_p": 0.02,
        "repeat_penalty": 1.4,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.5,
        "repeat_last_n": 2,
    },
    "typical": PURE | {"temperature": 1.0, "typical_p": 0.9},
    "dry": PURE
    | {
        "temperature": 1.0,
        "dry_multiplier": 0.9,
        "dry_base": 1.6,
        "dry_allowed_length": 1,
        "dry_penalty_last_n": 6,
        "dry_sequence_breakers": (),
    },
    "xtc": PURE | {"temperature": 1.0, "xtc_probability": 0.6, "xtc_threshold": 0.15},
    "min-p and bias": PURE
    | {"temperature": 1.0, "min_p": 0.04, "logit_bias": ((2, 0.6), (5, -np.inf), (6, -1.0))},
    "all, in another order": {
        "samplers": ("top_k", "temperature", "dry", "xtc", "typ_p", "penalties", "min_p"),
        "temperature": 0.7,
        "top_k": 7,
        "min_p": 0.02,
        "typical_p": 0.9,
        "repeat_penalty": 1.2,
        "repeat_last_n": 3,
        "dry_multiplier": 0.5,
        "dry_allowed_length": 1,
        "dry_penalty_last_n": 4,
        "dry_sequence_breakers": (),
        "xtc_probability": 0.3,
        "xtc_threshold": 0.25,
        "logit_bias": ((3, 0.7),),
    },
}
ALIKE = 2
"""Tokens that the rows of the target depend on."""


def memory(options: SamplingOptions) -> int:
    """Tokens that the chances of the next one depend on."""
    penalised = options.repeat_last_n if options.penalises else 0
    return max(ALIKE, penalised, options.dry_penalty_last_n if options.dries else 0)


@cache
def row(*seen: int) -> npt.NDArray[np.float32]:
    chance = np.random.default_rng([5, *seen])
    return (1.6 * chance.standard_normal(VOCAB)).astype(np.float32)


@cache
def draft_row(*seen: int) -> tuple[Sequence[int], Sequence[float]]:
    chance = np.random.default_rng([6, *seen])
    ids = chance.permutation(VOCAB)[:5]
    return ids.tolist(), (row(*seen)[ids] + 0.7 * chance.standard_normal(5)).tolist()


def drawn(
    options: SamplingOptions, chain: TokenSampler, target: ToyTarget, count: int = SAMPLES
) -> list[int]:
    """The start and `count` tokens after it, three drafts a step."""
    chooser = SamplingChooser(target, chain, options, len(START))
    drafter = ToyDrafter(lambda tokens: draft_row(*tokens[-ALIKE:]))
    tokens = answer(target, START, chooser, count, drafter)
    chooser.close()
    assert len(tokens) == count
    assert len(target.decoded) < 0.7 * count, "hardly any draft was accepted"
    return [*START, *tokens]


def toy() -> ToyTarget:
    return ToyTarget(lambda tokens: row(*tokens[-ALIKE:]), VOCAB, n_ctx=SAMPLES + 10)


def judged(options: SamplingOptions, tokens: Sequence[int]) -> tuple[Fit, float | None]:
    """The tokens against the chain's description in NumPy, over both sides of XTC's coin; and by
    how much too many are tokens which penalties or DRY make less likely, None without these.
    """
    often = options.xtc_probability if options.excludes else 0.0

    def chances_after(options: SamplingOptions, history: History) -> Probabilities:
        oracle, logits = OracleSampler(options, history), row(*history[-ALIKE:])
        acting = oracle.probabilities(logits, 0.0)
        if often == 0:
            return acting
        return often * acting + (1 - often) * oracle.probabilities(logits, 1.0)

    forgetful = replace(options, dry_multiplier=0.0, repeat_last_n=0)
    chances = cache(partial(chances_after, options))
    freely = cache(partial(chances_after, forgetful))
    found = fit(tokens, len(START), chances, memory=memory(options), alike=ALIKE)
    if not (options.dries or options.penalises):
        return found, None
    return found, surplus(
        tokens,
        len(START),
        chances,
        lambda history: freely(history) > chances(history) + 1e-9,
        memory=memory(options),
    )


def settings_and_ways() -> Iterator[Any]:
    """Both ways for the usual settings. The others with rejection, where the drafts have a say:
    with match the text is that without them, so that it is enough to look now and then.
    """
    for name in SETTINGS:
        usual, again = name in ("top-k and top-p", "penalties"), name == "min-p and bias"
        yield pytest.param(name, "match", marks=() if usual else pytest.mark.slow)
        yield pytest.param(name, "rejection", marks=pytest.mark.slow if again else ())


@pytest.mark.parametrize(("name", "verification"), [*settings_and_ways()])
def test_tokens_with_drafts_have_the_distribution_of_the_chain(
    name: str, verification: Verification
) -> None:
    options = SamplingOptions(seed=2, verification=verification, **SETTINGS[name])
    with SamplerChain(options, n_vocab=VOCAB, n_ctx=SAMPLES + 10) as chain:
        chain.accept_all(START)
        found, repeats = judged(options, drawn(options, chain, toy()))
    assert found.groups > 40
    assert is_plausible(found.statistic, found.freedom), found
    assert repeats is None or abs(repeats) < 3.5


class Deaf:
    """A chain with a fault: it hears of the tokens of a block when the next one is decoded."""

    def __init__(self, chain: SamplerChain, target: ToyTarget) -> None:
        self.chain, self.target = chain, target
        self.waiting: list[tuple[int, int]] = []

    def apply(self, logits: npt.NDArray[np.float32], coin: float) -> Any:
        while self.waiting and self.waiting[0][0] < len(self.target.decoded):
            self.chain.accept(self.waiting.pop(0)[1])
        return self.chain.apply(logits, coin)

    def accept(self, token: int) -> None:
        self.waiting.append((len(self.target.decoded), token))

    def mark(self) -> int:
        return self.chain.mark()

    def restore(self, mark: int) -> None:
        self.chain.restore(mark)

    def close(self) -> None:
        self.chain.close()


@pytest.mark.parametrize(("name", "verification"), [("penalties", "match"), ("dry", "rejection")])
def test_a_chain_that_does_not_hear_of_tokens_inside_a_block_would_be_noticed(
    name: str, verification: Verification
) -> None:
    options = SamplingOptions(seed=2, verification=verification, **SETTINGS[name])
    target = toy()
    with SamplerChain(options, n_vocab=VOCAB, n_ctx=SAMPLES + 10) as chain:
        chain.accept_all(START)
        tokens = drawn(options, Deaf(chain, target), target, count=5_000)
    _, repeats = judged(options, tokens)
    assert repeats is not None and repeats > 5
