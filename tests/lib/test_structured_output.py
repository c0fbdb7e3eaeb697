"""JSON by schema on the default pair: valid, and the same plainly and speculatively."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dspine
from dspine.engine.logprobs import LogprobRecorder
from dspine.engine.replay import replay
from dspine.engine.rollback import TrimRollback
from dspine.engine.sampling import SamplingOptions
from dspine.engine.trace import Trace

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "structured_output.py"


def run(folder: Path, cache: Path, *arguments: str) -> dict[str, Any]:
    """In a process of its own: which kernels compute is decided once in a process."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "-t", "1", "-o", str(folder / "out.json"), *arguments],
        env={**os.environ, "DSPINE_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def check(found: dict[str, Any], count: int) -> None:
    assert found["tasks"] == count and found["invalid"] == 0 and found["unexplained"] == 0
    assert found["valid"] + found["cut"] == count
    assert found["acceptance_length"] > 1.0
    if found["kernels"] is not None:
        assert found["identical"] == count
        assert found["largest_logprob_gap"] == 0.0


@pytest.mark.parametrize(("proposer", "count"), [("dspine", 6), ("ngram", 3)])
def test_some_answers(
    proposer: str, count: int, tmp_path: Path, users_cache: Path, default_target: Path
) -> None:
    found = run(tmp_path, users_cache, "--count", str(count), "--proposer", proposer)
    check(found, count)
    assert found["cut"] == 0


def test_log_probabilities_are_the_targets_own_in_batches_of_the_same_shape(
    default_target: Path,
) -> None:
    """Holds on stock kernels too, which this process has: there a row depends on its batch."""
    grammar = dspine.GrammarOptions.json_schema(
        {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}},
         "required": ["city"]}
    )  # fmt: skip
    with dspine.load(
        default_target, n_ctx=512, n_threads=1, spec_draft_n_max=3, calibrate=False
    ) as engine:
        prompt = engine.encode("Name a city. Answer with JSON that has the field city.")
        trace = Trace()
        found = engine.complete(prompt, grammar=grammar, max_tokens=40, logprobs=3, trace=trace)
        assert found.logprobs is not None and found.stats.accepted > 0
        target, scores = engine._parts.target, LogprobRecorder(3, engine.tokenizer.vocab_size)
        chooser = engine._requests.chooser(target, SamplingOptions(), prompt, grammar, scores)
        again = replay(target, trace, found.tokens, chooser, TrimRollback(target))
        engine._held.forget()
    assert again.tokens == found.tokens
    for here, there in zip(found.logprobs, scores.take(), strict=True):
        assert here.logprob == pytest.approx(there.logprob, abs=0.02)
        assert dict(here.top) == pytest.approx(dict(there.top), abs=0.02)


@pytest.mark.slow
def test_two_hundred_answers(tmp_path: Path, users_cache: Path, default_target: Path) -> None:
    check(run(tmp_path, users_cache, "--count", "200"), 200)
