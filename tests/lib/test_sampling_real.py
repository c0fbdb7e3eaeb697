"""Drawn answers of the default pair: seeds, and comparing plain with speculative."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import dspine
from dspine.engine.engine import Engine
from dspine.engine.sampling import SamplingOptions, Verification
from dspine.errors import UsageError
from tests.support.default_pair import TASKS, held_out


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
