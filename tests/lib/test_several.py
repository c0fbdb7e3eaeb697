"""Several requests at once on real targets: the answers that each request has alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dspine
from dspine.errors import CapacityError, UsageError
from tests.support.several import at_once, facts, one_after_the_other
from tests.support.tiny_memories import tiny_gemma2, tiny_lfm2, tiny_mamba
from tests.support.tiny_models import tiny_llama, tiny_qwen35
from tests.support.tiny_pair import write_pair_drafter

ROOT = Path(__file__).parents[2]

TINY: tuple[tuple[Callable[..., Path], str], ...] = (
    (tiny_llama, "trim"),
    (tiny_gemma2, "trim"),
    (tiny_qwen35, "snapshots"),
    (tiny_qwen35, "checkpoint"),
    (tiny_lfm2, "checkpoint"),
    (tiny_mamba, "checkpoint"),
)

PROMPTS: list[tuple[list[int], dict[str, Any]]] = [
    ([5, 6, 7, 8, 5, 6, 7], {}),
    ([9] * 40, {}),
    ([20, 30, 40], {"seed": 3}),
    (list(range(50, 110)), {}),
    ([5, 6, 7, 8, 5, 6, 7], {"plain": True}),
]
LONG: tuple[list[int], dict[str, Any]] = [*range(60, 110)] * 4, {}
"""A prompt of several pieces."""


def test_answers_of_the_default_pair_are_those_of_each_request_alone(
    default_target: Path, default_drafter: Path, users_cache: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.several", str(default_target), str(default_drafter)],
        cwd=ROOT,
        env={**os.environ, "DSPINE_CACHE_DIR": str(users_cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["proposer"] for row in rows} == {"none", "ngram", "dspine", "auto"}
    for row in rows:
        assert row["same"], row
        assert row["most"] == 4
        assert row["mixed"] >= 2, "the long prompt is read in the decodes of others"
    network = [row for row in rows if row["proposer"] == "dspine"]
    alone = sum(row["accepted"][0] for row in network) / sum(row["drafted"][0] for row in network)
    several = sum(row["accepted"][1] for row in network) / sum(row["drafted"][1] for row in network)
    assert several == pytest.approx(alone, rel=0.05)


@pytest.mark.parametrize(("make", "rollback"), TINY)
def test_targets_of_every_kind_of_memory_answer_several_at_once(
    make: Callable[..., Path],
    rollback: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = make(tmp_path / "target.gguf", seed=5)
    drafter = write_pair_drafter(tmp_path / "drafter.gguf", target)
    # A recurrent state may be rounded otherwise where a prompt comes in other pieces.
    prompts = [*PROMPTS, LONG] if rollback == "trim" else PROMPTS
    rows = facts(
        target, drafter, prompts, n_ctx=1024, rollback=rollback, probe=False, spec_draft_n_max=3
    )
    for row in rows:
        assert row["same"], row
        # Gemma 2 shows taps node by node, which keeps prompts apart where they are read.
        if make is not tiny_gemma2:
            assert bool(row["mixed"]) is (rollback == "trim"), row
    told = [one for one in caplog.messages if "first drafts are right" not in one]
    assert told == [], "every decode of several went well"
    assert len(caplog.messages) <= 2, "one for each engine"


def test_the_context_is_divided_among_the_sequences(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target.gguf", seed=5)
    with dspine.load(
        target, parallel=3, n_ctx=200, n_threads=1, calibrate=False, probe=False
    ) as engine:
        assert (engine.slots, engine.n_ctx) == (3, 66)
        with pytest.raises(CapacityError, match=r"67 tokens.*66"):
            engine.scheduler().start([5] * 67)
    with pytest.raises(UsageError, match="n_ctx is 2 for 3 sequences"):
        dspine.load(target, parallel=3, n_ctx=2, probe=False)
    with pytest.raises(UsageError, match="parallel is 0"):
        dspine.load(target, parallel=0, probe=False)


def test_measured_policies_change_no_text(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target.gguf", seed=5)
    with dspine.load(target, parallel=4, n_ctx=1024, n_threads=1, probe=False) as engine:
        alone = one_after_the_other(engine, PROMPTS)
        several, most = at_once(engine, PROMPTS)
    assert most == 4
    assert [outcome.tokens for outcome in several] == [outcome.tokens for outcome in alone]
