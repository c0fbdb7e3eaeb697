"""Answers on a kept memory, on the real library: the same as cold, with less decoded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dspine
from dspine.engine.engine import Engine
from dspine.engine.events import Event, Prefill, Step
from dspine.engine.kv_types import LEAST, agreement
from dspine.errors import DspineError
from dspine.llama.model import Model
from tests.support.tiny_models import tiny_llama, tiny_qwen35
from tests.support.tiny_pair import write_pair_drafter

ROOT = Path(__file__).parents[2]


def read(events: Iterator[Event]) -> tuple[Prefill, list[int]]:
    first, *rest = events
    assert isinstance(first, Prefill)
    return first, [t for event in rest if isinstance(event, Step) for t in event.tokens]


def load(files: tuple[Path, Path], **options: Any) -> Engine:
    quick = {"proposer": "dspine", "n_threads": 1, "calibrate": False, "probe": False}
    return dspine.load(*files, **{**quick, **options})


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp(str(request.param))
    make = tiny_llama if request.param == "dense" else tiny_qwen35
    target = make(folder / "target.gguf", seed=5)
    return target, write_pair_drafter(folder / "drafter.gguf", target)


@pytest.fixture(scope="module")
def engine(files: tuple[Path, Path]) -> Iterator[Engine]:
    with load(files, n_ctx=1024) as engine:
        yield engine


def test_turns_edits_and_repeats_equal_cold_answers(engine: Engine) -> None:
    text = list(range(5, 155))
    for cut, new in ((0, ()), (0, (9, 8, 7)), (30, (11, 12)), (1, ()), (100, (4, 5, 6)), (0, (7,))):
        text = [*text[: len(text) - cut], *new]
        first, tokens = read(engine.generate(text, max_tokens=25))
        _, cold = read(engine.generate(text, max_tokens=25, cache_prompt=False))
        assert tokens == cold
        again, repeated = read(engine.generate(text, max_tokens=25))
        assert again.reused == len(text) - 1
        assert repeated == cold
        assert first.reused <= len(text) - 1
        text = [*text, *cold]
    assert engine.disabled_reason is None


def test_a_turn_decodes_its_new_tokens_and_at_most_64_more(engine: Engine) -> None:
    text, answer = list(range(5, 205)), list[int]()
    for turn in range(4):
        text = [*text, *answer, *range(10 + turn, 60 + turn)]
        first, answer = read(engine.generate(text, max_tokens=30))
        new = 50 if turn else 250
        assert first.decoded <= new + 64
    facts = engine.held
    assert facts.tokens >= len(text) + 30 - 17
    assert (facts.checkpoints > 0) == (facts.checkpoint_bytes > 0)


def test_as_much_is_read_from_memory_with_drafts_as_without(
    engine: Engine, files: tuple[Path, Path]
) -> None:
    with load(files, n_ctx=1024, proposer="none") as undrafted:
        text, answer = list(range(7, 157)), list[int]()
        for turn in range(4):
            text = [*text, *answer, *range(20 + turn, 50 + turn)]
            plain, answer = read(undrafted.generate(text, max_tokens=30))
            drafted, same = read(engine.generate(text, max_tokens=30))
            assert same == answer
            assert drafted.reused == plain.reused
            assert (drafted.reused > 150) == (turn > 0)


def test_the_drafter_proposes_the_same_on_a_kept_context(engine: Engine) -> None:
    """Drafts of noise say nothing, unless they are the same ones: then all that is seen is."""
    drafter = engine._parts.drafter
    assert drafter is not None
    prompt = list(range(5, 105))
    _, answer = read(engine.generate(prompt, max_tokens=20))
    text = [*prompt, *answer, 9, 9]
    drafts = []
    for cache in (True, False):
        first, _ = read(engine.generate(text, max_tokens=6, cache_prompt=cache))
        assert (first.reused > 100) == cache
        drafts.append(drafter.draft(0, 7, 6).tokens)
    assert drafts[0] == drafts[1]


def test_a_saved_session_goes_on_in_another_engine(
    engine: Engine, files: tuple[Path, Path], tmp_path: Path
) -> None:
    session = dspine.Session(engine, system="Be brief.")
    list(session.ask("one two three", max_tokens=20, cache_prompt=False))
    path = tmp_path / "a.session"
    session.save(path)
    kept = engine.held.tokens
    drafter = engine._parts.drafter
    assert drafter is not None
    context = drafter.save_context(0)
    assert context is not None
    expected = read(session.ask("and four", max_tokens=20))
    again = load(files, n_ctx=700)
    with again as other:
        loaded = dspine.Session.load(other, path)
        assert other.held.tokens == kept
        assert other._parts.drafter is not None
        assert other._parts.drafter.save_context(0) == context
        first, tokens = read(loaded.ask("and four", max_tokens=20))
        assert (first.reused, tokens) == (expected[0].reused, expected[1])
        assert loaded.messages == session.messages
        assert other.disabled_reason is None
    for options, text in (
        ({"cache_type_k": "f32"}, "-ctk"),
        ({"n_ctx": 32}, "the context has 32"),
    ):
        with load(files, **options) as other, pytest.raises(DspineError, match=text):
            dspine.Session.load(other, path)


def test_a_quantised_cache_is_looked_at_once(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "t.gguf", seed=5, num_heads=2, num_kv_heads=1)
    drafter = write_pair_drafter(tmp_path / "d.gguf", target)
    with Model.load(target) as model:
        assert agreement(model, "f16", "f16", n_threads=1) == 1.0
        share = agreement(model, "q8_0", "q8_0", n_threads=1)
        assert LEAST < share <= 1.0
        assert agreement(model, "q4_0", "q4_0", n_threads=1) < share
    types = {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "cache_dir": tmp_path}
    for _ in range(2):
        with load((target, drafter), n_ctx=128, **types) as engine:
            read(engine.generate([5, 6, 7], max_tokens=9))
            assert engine.disabled_reason is None
    assert len(list((tmp_path / "cache-types").iterdir())) == 1


def test_the_default_pair_drafts_as_well_on_a_kept_memory(
    default_target: Path, default_drafter: Path, users_cache: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.conversation", default_target, default_drafter],
        env={**os.environ, "DSPINE_CACHE_DIR": str(users_cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert [row["reused"] for row in found["cold"]] == [0, 0, 0]
    held = 0
    for kept, cold in zip(found["reused"], found["cold"], strict=True):
        assert kept["disabled"] is None
        assert kept["reused"] == held
        held = kept["prompt"] + len(kept["tokens"]) - 1
        if found["kernels"] is not None:
            assert kept["tokens"] == cold["tokens"]
            assert kept["acceptance_length"] == pytest.approx(cold["acceptance_length"], rel=0.1)
        assert kept["acceptance_length"] > 1.2
