"""Samplers and drafts together on the default pair, with the kernels that a person's process has.

Only row-invariant kernels make these exact: on stock ones a row's logits depend on its batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspine.engine.sampling import SamplingOptions
from dspine.machine import usable_cores
from tests.support.drawn import DRAWN_FROM, DRAWS
from tests.support.toy_target import OracleSampler, Probabilities, chi_square, is_plausible

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def facts(default_target: Path, default_drafter: Path, users_cache: Path) -> dict[str, Any]:
    assert default_target.exists() and default_drafter.exists()

    def part(name: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.drawn", name],
            cwd=ROOT,
            env={**os.environ, "DSPINE_CACHE_DIR": str(users_cache)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return facts

    with ThreadPoolExecutor(usable_cores()) as pool:  # each has one thread
        found = {
            key: fact for one in pool.map(part, ("drawn", "penalised")) for key, fact in one.items()
        }
    if found["kernels"] is None:
        pytest.skip("this machine has no kernels of ours")
    return found


def test_penalties_without_a_temperature_give_the_plain_text(facts: dict[str, Any]) -> None:
    rows = facts["penalised"]
    for row in rows:
        assert row["plain"] == row["speculative"], row["name"]
        assert row["reasons"][0] == row["reasons"][1]
        assert row["drafted"] > 0
    for name in {row["name"] for row in rows}:
        alike = [row for row in rows if row["name"] == name]
        assert any(row["changed"] for row in alike), f"{name} changed nothing"
        assert any(row["accepted"] > 0 for row in alike), f"no draft was kept with {name}"


def test_first_tokens_have_the_exact_distribution(facts: dict[str, Any]) -> None:
    """Drafted and judged by rejection, against softmax over what top-k and top-p leave."""
    drawn = facts["drawn"]
    assert drawn["drafted"] > DRAWS and 0 < drawn["accepted"] < drawn["drafted"]
    sampler = OracleSampler(SamplingOptions(**DRAWN_FROM))

    def chances(after: str) -> Probabilities:
        logits = np.full(drawn["vocab"], -np.inf, np.float32)
        for token, score in drawn["raw"][after]:
            logits[token] = score
        return sampler.probabilities(logits)

    counts: dict[str, Probabilities] = {}
    for pair, count in drawn["pairs"].items():
        first, second = pair.split()
        for after, token in (("", first), (first, second)):
            seen = counts.setdefault(after, np.zeros(drawn["vocab"]))
            seen[int(token)] += count
    assert counts[""].sum() == DRAWS
    tests = [chi_square(seen, chances(after)) for after, seen in counts.items() if seen.sum() >= 40]
    assert sum(freedom for _, freedom in tests) >= 8
    for statistic, freedom in tests:
        assert freedom == 0 or is_plausible(statistic, freedom), tests
