"""An engine with a DFlash or DFlash2 file as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dspine
from dspine.errors import PairError, UsageError
from tests.support.tiny_models import tiny_llama
from tests.support.tiny_pair import as_others_write_it, write_dflash_drafter

PROMPT = "hello world"
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "calibrate": False, "probe": False}


@pytest.fixture(scope="module", params=["DFlash", "DFlash2"])
def files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path]:
    folder = tmp_path_factory.mktemp("dflash")
    target = tiny_llama(folder / "t.gguf", hidden_size=320, num_heads=5, num_kv_heads=5)
    written = write_dflash_drafter(folder / "d.gguf", target, request.param)
    return request.param, target, as_others_write_it(written)


@pytest.mark.parametrize(
    "sampling", [None, dspine.SamplingOptions(temperature=0.8, seed=3)], ids=["greedy", "seeded"]
)
def test_random_drafts_change_nothing(
    files: tuple[str, Path, Path], sampling: dspine.SamplingOptions | None
) -> None:
    kind, target, drafter = files
    more = {} if sampling is None else {"sampling": sampling}
    with dspine.load(target, proposer="none", **OPTIONS) as engine:
        plain = engine.complete(PROMPT, max_tokens=24, **more)
    with dspine.load(target, drafter, proposer="drafter", spec_draft_n_max=4, **OPTIONS) as engine:
        found = engine.complete(PROMPT, max_tokens=24, **more)
        assert engine.proposer == kind.lower()
        assert [n for n in engine.notices if "does not say which target" in n]
    assert found.tokens == plain.tokens
    assert found.stats.proposers[kind.lower()].drafted > 24


def test_a_target_of_another_size_is_refused(files: tuple[str, Path, Path], tmp_path: Path) -> None:
    _, _, drafter = files
    with pytest.raises(PairError, match="needs a target hidden size of 320"):
        dspine.load(tiny_llama(tmp_path / "o.gguf"), drafter, **OPTIONS)


def test_a_drafter_must_be_named(files: tuple[str, Path, Path]) -> None:
    with pytest.raises(UsageError, match="proposer drafter needs a drafter"):
        dspine.load(files[1], proposer="drafter", **OPTIONS)
