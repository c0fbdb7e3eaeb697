"""On 60 held-out prompts speculative text is the plain text, or the target alone says otherwise.

With our row-invariant kernels there is no "or". Stock kernels round a row differently alone and
in a batch; a difference counts as the target's own only if the target without a drafter gives
the whole speculative answer in the same batches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.default_pair import TASKS
from tests.support.lossless import WAYS

Facts = dict[str, Any]
ROOT = Path(__file__).parents[2]
ALL = 20
SOME = 4
"""Prompts of a task on stock kernels, where a user of this machine would not meet them."""

NEAR_TIE = 3.0
"""Rounding moves a logit by up to 1.3 between batch shapes, and a gap has two of them."""


def child(target: Path, drafter: Path, count: int, *tasks: str, **environment: str) -> Facts:
    """The facts about `count` prompts of each task (all of them, if none is named), from a process
    of its own.
    """
    arguments = [str(target), str(drafter), str(count), *tasks]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.lossless", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts: Facts = json.loads(done.stdout)
    return facts


@pytest.fixture(scope="module")
def usual(default_target: Path, default_drafter: Path, users_cache: Path) -> Facts:
    """As a person's process runs: with our kernels, where this machine has them."""
    return child(default_target, default_drafter, ALL, DSPINE_CACHE_DIR=str(users_cache))


@pytest.fixture(scope="module")
def stock(usual: Facts, default_target: Path, default_drafter: Path) -> Facts:
    """The kernels of ggml; those are the usual ones on a machine without ours."""
    if usual["kernels"] is None:
        return usual
    return child(default_target, default_drafter, SOME, DSPINE_KERNELS="off")


@pytest.fixture(params=["usual", "stock"])
def either(request: pytest.FixtureRequest) -> Facts:
    facts: Facts = request.getfixturevalue(request.param)
    return facts


def test_row_invariant_kernels_leave_no_difference(
    usual: Facts, capsys: pytest.CaptureFixture[str]
) -> None:
    if usual["kernels"] is None:
        pytest.skip("this machine has no kernels of ours")
    with capsys.disabled():
        sys.stdout.write("".join(f"\n{line}" for line in report(usual)))
    check_counts(usual, ALL)
    for row in usual["rows"]:
        assert row["parts_at"] is None, row
        assert row["same_text"] and row["same_end"], row


def test_a_difference_on_stock_kernels_is_the_targets_own(
    stock: Facts, usual: Facts, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        sys.stdout.write("".join(f"\n{line}" for line in report(stock)))
    assert stock["kernels"] is None
    check_counts(stock, ALL if stock is usual else SOME)
    check_differences(stock)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_all_prompts_on_stock_kernels(
    task: str, default_target: Path, default_drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = child(default_target, default_drafter, ALL, task, DSPINE_KERNELS="off")
    with capsys.disabled():
        sys.stdout.write("".join(f"\n{line}" for line in report(facts)))
    check_counts(facts, ALL, (task,))
    check_differences(facts)


def check_counts(facts: Facts, prompts: int, tasks: tuple[str, ...] = TASKS) -> None:
    """Nothing was left out."""
    for way in WAYS:
        for task in tasks:
            found = [r for r in facts["rows"] if (r["way"], r["task"]) == (way.name, task)]
            assert len(found) == min(prompts, way.prompts)


def check_differences(facts: Facts) -> None:
    for row in facts["rows"]:
        if row["parts_at"] is None:
            assert row["same_text"] and row["same_end"], row
        else:
            assert row["reproduced"], row
            assert row["gaps"] is None or all(0 <= gap < NEAR_TIE for gap in row["gaps"]), row


def test_compare_explains_a_difference_like_the_target_alone(stock: Facts) -> None:
    row, told = stock["parted"], stock["explained"]
    if row is None:
        pytest.skip("no answer parts: the kernels of this library round every row alike")
    assert told["reproduced"] is True
    assert told["position"] == row["parts_at"]
    assert [told["plain_gap"], told["speculative_gap"]] == pytest.approx(row["gaps"], abs=1e-4)


def test_whole_blocks_were_verified_and_drafts_accepted(either: Facts) -> None:
    for row in either["rows"]:
        assert row["disabled"] is None, row
        assert row["narrow"] == 0, row
    for way in ("noise", "noise-dflash", "noise-dflash2"):
        assert sum(row["drafted"] for row in rows_of(either, way)) > 0
    assert acceptance_length(rows_of(either, "dspine")) > 1.4
    assert acceptance_length(rows_of(either, "auto")) > 1.4
    by_proposer = [row["accepted_by"] for row in rows_of(either, "auto")]
    for proposer in ("dspine", "ngram"):
        assert sum(accepted.get(proposer, 0) for accepted in by_proposer) > 0


def test_a_prompt_beyond_the_window_of_the_drafter_is_drafted_for(either: Facts) -> None:
    row = either["long"]
    assert row["prompt_tokens"] > row["window"]
    assert row["disabled"] is None
    assert row["narrow"] == 0
    assert row["parts_at"] is None or row["reproduced"]


def test_the_times_of_a_step_add_up_to_those_of_a_clock_outside(either: Facts) -> None:
    for way in WAYS:
        rows = rows_of(either, way.name)
        parts = sum(row["parts_ms"] for row in rows)
        assert parts == pytest.approx(sum(row["wall_ms"] for row in rows), rel=0.05)
        assert parts == pytest.approx(sum(row["outside_ms"] for row in rows), rel=0.05)


def rows_of(facts: Facts, way: str) -> list[Facts]:
    return [row for row in facts["rows"] if row["way"] == way]


def acceptance_length(rows: list[Facts]) -> float:
    tokens, steps = (sum(row[name] for row in rows) for name in ("tokens", "steps"))
    return float(tokens / steps)


def report(facts: Facts) -> Iterator[str]:
    """A line for each task and way, and one for each answer that is not the plain one."""
    yield f"kernels: {facts['kernels'] or 'stock'}"
    for task in dict.fromkeys(row["task"] for row in facts["rows"]):
        for way in WAYS:
            rows = [row for row in rows_of(facts, way.name) if row["task"] == task]
            parted = [row for row in rows if row["parts_at"] is not None]
            drafted, accepted = (sum(row[name] for row in rows) for name in ("drafted", "accepted"))
            yield (
                f"{task}, {way.name}: {len(rows) - len(parted)} of {len(rows)} answers are the "
                f"plain ones, acceptance length {acceptance_length(rows):.2f}, {accepted} of "
                f"{drafted} drafts accepted"
            )
            for row in parted:
                slow, fast = row["choices"]
                gaps = " and ".join(f"{gap:.4f}" for gap in row["gaps"] or ())
                yield (
                    f"  {row['id']} parts at token {row['parts_at']}: plain {slow}, speculative "
                    f"{fast}, gaps {gaps or 'unknown'}; the target alone decodes "
                    f"{'the same' if row['reproduced'] else 'SOMETHING ELSE'}"
                )
