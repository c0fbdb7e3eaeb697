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
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dspine.machine import usable_cores
from tests.support.default_pair import TASKS
from tests.support.lossless import WAYS, write_noise
from tests.support.rows import rows_are_invariant

Facts = dict[str, Any]
ROOT = Path(__file__).parents[2]
ALL = 20
SOME = 4
"""Prompts of a task on stock kernels, where a user of this machine would not meet them."""

STOCK = {"DSPINE_KERNELS": "off"}
NEAR_TIE = 3.0
"""Rounding moves a logit by up to 1.3 between batch shapes, and a gap has two of them."""


@dataclass(frozen=True)
class Child:
    """A process that finds the facts about `count` prompts of each of its tasks."""

    kernels: str
    count: int
    tasks: tuple[str, ...]
    environment: Mapping[str, str]


Files = tuple[Path, Path, Path]
"""The target, its drafter, and the folder with those of noise."""


def run(files: Files, child: Child) -> Facts:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.support.lossless"),
            *(*map(str, files), str(child.count), *child.tasks),
        ],
        cwd=ROOT,
        env={**os.environ, **child.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts: Facts = json.loads(done.stdout)
    return facts


def run_all(files: Files, children: Sequence[Child]) -> dict[str, Facts]:
    """The facts by kernels. Each process has one thread, so there is one for every core."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        found = list(pool.map(partial(run, files), children))
    return {
        name: joined([facts for c, facts in zip(children, found, strict=True) if c.kernels == name])
        for name in {child.kernels for child in children}
    }


def joined(parts: Sequence[Facts]) -> Facts:
    """One, as if one process had found all of them."""
    [kernels] = {part["kernels"] for part in parts}
    parted = next((part for part in parts if part["parted"]), parts[0])
    return {
        "kernels": kernels,
        "rows": [row for part in parts for row in part["rows"]],
        "long": next((part["long"] for part in parts if part["long"]), None),
        "parted": parted["parted"],
        "explained": parted["explained"],
    }


@pytest.fixture(scope="module")
def files(
    default_target: Path, default_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Files:
    folder = tmp_path_factory.mktemp("noise")
    write_noise(folder, default_target, default_drafter)
    return default_target, default_drafter, folder


@pytest.fixture(scope="module")
def by_kernels(files: Files, users_cache: Path) -> dict[str, Facts]:
    """The usual ones, as in a person's process, and ggml's where those are others."""
    user = {"DSPINE_CACHE_DIR": str(users_cache)}
    # What takes longest begins first.
    children = [Child("usual", ALL, (task,), user) for task in reversed(TASKS)]
    has_kernels = rows_are_invariant(users_cache)
    if has_kernels:
        children.insert(0, Child("stock", SOME, TASKS, STOCK))
    found = run_all(files, children)
    # Else the test of no difference would be left out on a machine that has them.
    assert (found["usual"]["kernels"] is not None) is has_kernels
    return found


@pytest.fixture(scope="module")
def usual(by_kernels: dict[str, Facts]) -> Facts:
    """As a person's process runs: with our kernels, where this machine has them."""
    return by_kernels["usual"]


@pytest.fixture(scope="module")
def stock(by_kernels: dict[str, Facts]) -> Facts:
    """The kernels of ggml; those are the usual ones on a machine without ours."""
    return by_kernels.get("stock", by_kernels["usual"])


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
    task: str, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = run(files, Child("stock", ALL, (task,), STOCK))
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
