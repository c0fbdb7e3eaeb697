"""Whole answers on targets of every kind of memory, with the shipped ways to propose."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dspine
from dspine.engine import state_copies
from dspine.engine.compare import Comparison
from dspine.engine.engine import Engine
from dspine.errors import UsageError
from dspine.llama import context as context_module
from tests.support.tiny_memories import tiny_gemma2, tiny_lfm2, tiny_mamba
from tests.support.tiny_models import tiny_llama, tiny_qwen35
from tests.support.tiny_pair import write_pair_drafter

MAKERS: dict[str, Callable[..., Path]] = {
    "llama": tiny_llama,
    "gemma2": tiny_gemma2,
    "qwen35": tiny_qwen35,
    "lfm2": tiny_lfm2,
    "mamba": tiny_mamba,
}
PROMPT = [5, 6, 7, 8, 5, 6, 7]
PAIRS = (
    ("llama", "trim"),
    ("gemma2", "trim"),
    ("qwen35", "snapshots"),
    ("qwen35", "checkpoint"),
    ("lfm2", "snapshots"),
    ("lfm2", "checkpoint"),
    ("mamba", "checkpoint"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    folder = tmp_path_factory.mktemp("pairs")
    made = {}
    for name, make in MAKERS.items():
        target = make(folder / f"{name}.gguf", seed=5)
        made[name] = target, write_pair_drafter(folder / f"{name}-drafter.gguf", target)
    return made


def load(pair: tuple[Path, Path], **options: Any) -> Engine:
    defaults = {"n_ctx": 256, "n_threads": 1, "calibrate": False, "probe": False}
    return dspine.load(pair[0], pair[1], **defaults | options)


def explained(comparison: Comparison) -> bool:
    """Identical, or the target alone gives the speculative answer in the same batches."""
    return comparison.divergence is None or comparison.divergence.reproduced


@pytest.mark.parametrize(("name", "mode"), PAIRS)
@pytest.mark.parametrize("proposer", ["dspine", "ngram"])
def test_64_tokens_equal_the_plain_ones(
    files: dict[str, tuple[Path, Path]], name: str, mode: str, proposer: str
) -> None:
    with load(files[name], rollback=mode, proposer=proposer) as engine:
        assert engine.rollback == mode
        comparison = engine.compare(PROMPT, max_tokens=64)
        assert explained(comparison), comparison.divergence
        stats = comparison.speculative.stats
        assert stats.disabled_reason is None
        assert stats.drafted > stats.accepted, "nothing had to be taken back"


def test_auto_picks_what_the_memory_allows(files: dict[str, tuple[Path, Path]]) -> None:
    found = {}
    for name, pair in files.items():
        with load(pair) as engine:
            found[name] = engine.rollback
    assert found == {
        "llama": "trim",
        "gemma2": "trim",
        "qwen35": "snapshots",
        "lfm2": "snapshots",
        "mamba": "checkpoint",
    }


def test_auto_keeps_snapshots_where_they_are_small(
    files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = files["qwen35"]
    for free, options, mode, reason in (
        (2**33, {}, "snapshots", "15 snapshots take .* MiB, at most 5% of the 8192 MiB"),
        (2**33, {"spec_draft_n_max": 3}, "snapshots", "3 snapshots take"),
        (2**33, {"n_batch": 8}, "checkpoint", r"need batches of 17 tokens \(-b\)"),
        (2**33, {"proposer": "none"}, "checkpoint", "nothing is drafted"),
        (2**33, {"rollback": "checkpoint"}, "checkpoint", "as was asked for"),
        (2**17, {}, "checkpoint", "more than 5% of the 0 MiB"),
        (None, {}, "checkpoint", "how much memory is free is unknown"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(state_copies, "free_state_bytes", lambda _model, free=free: free)
            with load(pair, **options) as engine:
                assert engine.rollback == mode
                assert re.search(reason, engine.rollback_reason)


def test_an_interrupted_answer_is_not_read_again(files: dict[str, tuple[Path, Path]]) -> None:
    """With snapshots the memory keeps all that was confirmed, the anchor included."""
    with load(files["qwen35"], proposer="ngram") as engine:
        assert engine.rollback == "snapshots"
        target = engine._parts.target
        decode, calls = target.decode, 0

        def interrupted(*arguments: Any) -> None:
            nonlocal calls
            decode(*arguments)
            calls += 1
            if calls == 6:
                raise KeyboardInterrupt

        target.decode = interrupted  # type: ignore[method-assign, assignment]
        cut = engine.complete(PROMPT, max_tokens=40)
        target.decode = decode  # type: ignore[method-assign]
        assert cut.reason == "cancelled" and cut.tokens
        said = [*engine.encode(PROMPT), *cut.tokens]
        assert engine.held.tokens == len(said)
        rest = engine.complete([*said, 5], max_tokens=20)
        assert rest.stats.cached_tokens == len(said)
        cold = engine.complete([*said, 5], max_tokens=20, cache_prompt=False)
        assert rest.tokens == cold.tokens


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen35", {"rollback": "trim"}, r"rollback is trim, .*architecture qwen35"),
        ("llama", {"rollback": "snapshots"}, r"rollback is snapshots, .*llama has none"),
        ("mamba", {"rollback": "snapshots"}, r"keeps 0 of 15 for architecture mamba"),
        ("qwen35", {"rollback": "snapshots", "n_batch": 8}, r"batches of at least 17 .*\(-b\)"),
        ("llama", {"rollback": "undo"}, r"rollback is 'undo': choose one of auto, trim"),
    ],
)
def test_a_mode_that_cannot_work_is_refused_in_one_sentence(
    files: dict[str, tuple[Path, Path]], name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load(files[name], **options)
    assert "\n" not in str(caught.value)


def test_no_snapshots_are_kept_for_plain_decoding(files: dict[str, tuple[Path, Path]]) -> None:
    for options, kept in (({"proposer": "none"}, 0), ({"spec_draft_n_max": 3}, 3), ({}, 15)):
        with load(files["qwen35"], rollback="snapshots", **options) as engine:
            assert engine._parts.target.context.snapshots == kept  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["snapshots", "checkpoint"])
@pytest.mark.parametrize("n_batch", [24, 40])
def test_a_prompt_longer_than_a_batch(
    files: dict[str, tuple[Path, Path]], mode: str, n_batch: int
) -> None:
    prompt = [3 + (7 * i) % 250 for i in range(110)]
    with load(files["qwen35"], rollback=mode, n_batch=n_batch, proposer="dspine") as engine:
        comparison = engine.compare(prompt, max_tokens=30)
    assert explained(comparison), comparison.divergence
    with load(files["qwen35"], proposer="none") as engine:
        whole = engine.complete(prompt, max_tokens=30)
    assert comparison.plain.tokens == whole.tokens


@pytest.mark.parametrize("n_batch", [1, 2, 5, 12])
def test_batches_too_small_for_waiting_tokens(
    files: dict[str, tuple[Path, Path]], n_batch: int
) -> None:
    with load(files["qwen35"], n_batch=n_batch, proposer="dspine") as engine:
        comparison = engine.compare(PROMPT, max_tokens=30)
        assert explained(comparison), comparison.divergence
        assert (comparison.speculative.stats.drafted > 0) == (n_batch > 1)


@pytest.mark.parametrize(("name", "mode"), PAIRS[1:])
def test_a_context_is_filled_to_its_end(
    files: dict[str, tuple[Path, Path]], name: str, mode: str
) -> None:
    for length in (20, 47, 48, 62, 63, 64):
        prompt = [3 + (11 * i) % 250 for i in range(length)]
        with load(files[name], rollback=mode, n_ctx=64, proposer="dspine") as engine:
            comparison = engine.compare(prompt)
        for answer in (comparison.plain, comparison.speculative):
            if answer.reason == "context":
                assert len(answer.tokens) == 64 - length + 1
        assert explained(comparison), comparison.divergence


def test_a_state_that_does_not_fit_ends_drafting_with_one_sentence(
    files: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(files["qwen35"], proposer="none") as engine:
        plain = engine.complete(PROMPT, max_tokens=20)
    monkeypatch.setattr(context_module, "free_state_bytes", lambda _model: 5000)
    with load(files["qwen35"], proposer="dspine") as engine:
        found = engine.complete(PROMPT, max_tokens=20)
    assert found.tokens == plain.tokens
    assert found.stats.drafted == 0
    reason = found.stats.disabled_reason
    assert reason is not None and "could not be taken back" in reason and "\n" not in reason
    assert "a copy of the target's state needs 0 MiB and 0 MiB of memory are free" in reason


def resident_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


@pytest.mark.parametrize(("name", "mode"), [PAIRS[2], PAIRS[3], PAIRS[5]])
def test_memory_does_not_grow_with_steps(
    files: dict[str, tuple[Path, Path]], name: str, mode: str
) -> None:
    if resident_bytes() is None:
        pytest.skip("this system does not tell a process's memory")
    with load(files[name], rollback=mode, proposer="dspine", n_ctx=512) as engine:
        sizes = []
        for turn in range(4):
            result = engine.complete([3 + turn, *PROMPT], max_tokens=230, cache_prompt=False)
            assert result.stats.steps > 100 or result.reason == "stop"
            sizes.append(resident_bytes() or 0)
    # The first answer brings buffers and caches of the interpreter along; then 600 steps more.
    assert sizes[-1] - sizes[0] < 2 * 2**20


@pytest.mark.parametrize("limit", [None, 3])
def test_measured_costs_decide_when_waiting_tokens_are_stored(
    files: dict[str, tuple[Path, Path]], tmp_path: Path, limit: int | None
) -> None:
    options = {"calibrate": True, "cache_dir": tmp_path, "spec_draft_n_max": limit}
    with load(files["qwen35"], rollback="checkpoint", proposer="ngram", **options) as engine:
        comparison = engine.compare(PROMPT * 4, max_tokens=60)
        assert explained(comparison)
        assert limit is None or comparison.speculative.stats.drafted > 0
