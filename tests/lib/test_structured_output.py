"""JSON by schema on the default pair: valid, and the same plainly and speculatively."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize(("proposer", "count"), [("dspine", 8), ("ngram", 4)])
def test_a_dozen_answers(
    proposer: str, count: int, tmp_path: Path, users_cache: Path, default_target: Path
) -> None:
    found = run(tmp_path, users_cache, "--count", str(count), "--proposer", proposer)
    check(found, count)
    assert found["cut"] == 0


@pytest.mark.slow
def test_two_hundred_answers(tmp_path: Path, users_cache: Path, default_target: Path) -> None:
    check(run(tmp_path, users_cache, "--count", "200"), 200)
