"""Sampling with the real chain: exact distributions with drafts, and on the real target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import dspine
from dspine.engine.emit import Emitter
from dspine.engine.engine import Engine
from dspine.engine.loop import Run, generate
from dspine.engine.proposers import DrafterProposer
from dspine.engine.rollback import TrimRollback
from dspine.engine.sampling import SamplingChooser, SamplingOptions, Verification
from dspine.engine.sequence import TokenSequence
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.width import FixedWidth
from dspine.errors import UsageError
from dspine.llama.sampler import SamplerChain
from tests.support.default_pair import TASKS, held_out
from tests.support.engine_runs import collect
from tests.support.toy_target import (
    OracleSampler,
    ToyDrafter,
    ToyTarget,
    chi_square,
    is_plausible,
)

VOCAB = 8
SAMPLES = 20_000


@cache
def row(*seen: int) -> npt.NDArray[np.float32]:
    chance = np.random.default_rng([5, *seen])
    return (1.6 * chance.standard_normal(VOCAB)).astype(np.float32)


@cache
def draft_row(*seen: int) -> tuple[Sequence[int], Sequence[float]]:
    chance = np.random.default_rng([6, *seen])
    ids = chance.permutation(VOCAB)[:5]
    return ids.tolist(), (row(*seen)[ids] + 0.7 * chance.standard_normal(5)).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "verification": "rejection", "top_k": 5, "top_p": 0.9, "min_p": 0.0},
        {
            "temperature": 1.0,
            "verification": "rejection",
            "top_k": 6,
            "min_p": 0.02,
            "repeat_penalty": 1.4,
            "frequency_penalty": 0.3,
            "repeat_last_n": 2,
        },
        {"temperature": 1.0, "verification": "match", "top_p": 0.9, "presence_penalty": 0.5,
         "repeat_last_n": 1},
    ],
    ids=["rejection-0.7", "rejection-1-penalties", "match-1-penalties"],
)  # fmt: skip
def test_transitions_with_drafts_have_the_distribution_of_the_chain(
    options: dict[str, Any],
) -> None:
    sampling = SamplingOptions(seed=2, **options)
    target = ToyTarget(lambda tokens: row(*tokens[-2:]), VOCAB, n_ctx=SAMPLES + 10)
    chain = SamplerChain(sampling, n_vocab=VOCAB, n_ctx=SAMPLES + 10)
    chain.accept_all([1, 2])
    chooser = SamplingChooser(target, chain, sampling, 2)
    emitter = Emitter(lambda _: b"x", lambda _: False, max_tokens=SAMPLES)
    run = Run(target, TokenSequence([1, 2]), emitter, chooser)
    policy = FixedWidth({"dspine": 3})
    drafter = ToyDrafter(lambda tokens: draft_row(*tokens[-2:]))
    proposer = DrafterProposer(policy, drafter, target, max_positions=SAMPLES + 10)
    stepper = SpeculativeStepper(run, proposer, policy, TrimRollback(target))
    tokens = [1, 2, *collect(list(generate(run, stepper))).tokens]
    chooser.close()
    assert len(target.decoded) < 0.7 * SAMPLES, "hardly any draft was accepted"
    counts: dict[tuple[int, int], npt.NDArray[np.float64]] = {}
    for one, two, three in zip(tokens, tokens[1:], tokens[2:], strict=False):
        counts.setdefault((one, two), np.zeros(VOCAB))[three] += 1
    tests = [
        chi_square(count, OracleSampler(sampling, pair).probabilities(row(*pair)))
        for pair, count in counts.items()
        if count.sum() >= 50
    ]
    assert len(tests) > 15
    assert is_plausible(sum(test[0] for test in tests), sum(test[1] for test in tests))


@pytest.fixture(scope="module")
def engine(default_target: Path) -> Iterator[Engine]:
    with dspine.load(
        n_ctx=512, n_threads=1, proposer="dspine", spec_draft_n_max=3, calibrate=False
    ) as opened:
        assert opened.model_path == default_target
        yield opened


def test_seeds_on_the_default_pair(engine: Engine) -> None:
    prompt = held_out(TASKS[0], 1)[0].prompt
    ways: tuple[Verification, ...] = ("match", "rejection")
    for verification in ways:
        texts = [
            engine.complete(
                prompt,
                max_tokens=24,
                sampling=SamplingOptions(temperature=1.0, seed=seed, verification=verification),
                cache_prompt=False,
            ).text
            for seed in (4, 4, 5)
        ]
        assert texts[0] == texts[1] and texts[0] != texts[2]


def test_comparing_drawn_answers(engine: Engine) -> None:
    prompt = held_out(TASKS[2], 1)[0].prompt
    comparison = engine.compare(
        prompt, max_tokens=32, sampling=SamplingOptions(temperature=0.8, repeat_penalty=1.1, seed=3)
    )
    assert comparison.divergence is None or comparison.divergence.reproduced
    assert comparison.speculative.stats.drafted > 0
    with pytest.raises(UsageError, match="choose match"):
        engine.compare(prompt, sampling=SamplingOptions(temperature=1.0, verification="rejection"))
