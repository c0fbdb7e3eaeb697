"""The CPU kernels against float64 arithmetic, against ggml, and against themselves in other batch
shapes; each group runs in a process of its own because the kernels stay plugged in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dspine.ggml import library as ggml_library
from dspine.kernels.build import build, is_supported, library_path
from dspine.kernels.status import SWITCH, enable
from dspine.kernels.verdict import ANY, Verdict, run_test
from dspine.llama.library import find_library
from tests.support.tiny_models import tiny_llama
from tests.support.tiny_pair import write_pair_drafter

_ROOT = Path(__file__).parents[2]
_LOSS_OF_8_BIT_INPUTS = 5e-3
_ERRORS = {"q8_0": 1e-4, "f16": 1e-5, "bf16": 1e-5}
"""Types whose inputs are not rounded to 8 bits."""

pytestmark = pytest.mark.skipif(not is_supported(), reason="no CPU kernels for this machine")


@pytest.fixture(scope="session")
def cache() -> Path:
    """The developer's own cache: compiling takes a while, and the name holds the sources' hash."""
    return Path.home() / ".cache" / "dspine"


@pytest.fixture(scope="session")
def built(cache: Path) -> Path:
    """The compiled kernels."""
    find_library()
    path = library_path(cache, ggml_library.functions().ggml_version().decode())
    if not path.exists():
        build(path)
    return path


@pytest.fixture(scope="session")
def folder(built: Path) -> Path:
    """The folder of the llama.cpp library."""
    complaint = run_test(built, find_library().path, "avx2").complaint
    if "no CPU kernels for this processor" in complaint:
        pytest.skip(complaint)
    return find_library().path


def _child(*arguments: str, **environment: str) -> dict[str, Any]:
    found: dict[str, Any] = _output("tests.support.native_child", *arguments, **environment)
    return found


def _output(module: str, *arguments: str, **environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=_ROOT,
        # Asked for by name, so that no comparison of times decides what is tested.
        env={**os.environ, SWITCH: "avx2", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_self_test_passes(built: Path, folder: Path) -> None:
    assert run_test(built, folder, "avx2") == Verdict("avx2")
    assert not run_test(built, folder).complaint


def test_products_are_right_and_row_invariant(built: Path, folder: Path) -> None:
    found = _child("products", str(built), str(folder))
    assert {"q4_1", "q8_0", "q4_0", "q5_0", "f16", "bf16"} <= set(found)
    for type_name, facts in found.items():
        most = _ERRORS.get(type_name, _LOSS_OF_8_BIT_INPUTS)
        assert facts["error"] <= most, f"{type_name}: {facts['error']}"
        # ggml's q4_1 overflows its 16-bit scale on large inputs: then there is nothing to compare.
        if facts["stock_error"] == facts["stock_error"]:
            assert facts["error"] <= 1.02 * facts["stock_error"], type_name
        assert all(facts["same"]), type_name


def test_attention_is_right_and_row_invariant(built: Path, folder: Path) -> None:
    found = _child("attention", str(built), str(folder))
    assert len(found) == 6
    for case, facts in found.items():
        assert facts["error"] <= 2e-6, f"{case}: {facts['error']}"
        assert all(facts["same"]), case


@pytest.mark.parametrize("what", ["products", "attention"])
def test_rows_of_random_shapes_do_not_depend_on_the_batch(
    what: str, built: Path, folder: Path
) -> None:
    assert _output("tests.support.native_random", what, str(built), str(folder), "7", "8") == []


def test_logits_of_random_texts_do_not_depend_on_the_batch(
    cache: Path, folder: Path, default_target: Path
) -> None:
    where = str(cache.parent)
    arguments = ("model", str(default_target), "7", "3")
    assert _output("tests.support.native_random", *arguments, XDG_CACHE_HOME=where) == []


def test_logits_of_the_target_do_not_depend_on_the_batch(
    cache: Path, folder: Path, default_target: Path
) -> None:
    found = _child("model", str(default_target), XDG_CACHE_HOME=str(cache.parent))
    assert found["active"], found["text"]
    assert found["same"] == [True, True, True]
    # Packed weights are copies: the file they came from must not stay in memory beside them.
    assert found["mapped_mib"] < default_target.stat().st_size / 2**20 / 4
    # A tied head is there once: rows of the embedding are looked up where it is multiplied by.
    assert found["embedding_in"] == "DSPINE"
    assert found["same_arg_max"] >= found["rows"] - 1
    for cache_type, facts in found["caches"].items():
        assert facts["same"], cache_type
        # The rounding of cached keys and values is all that may differ. llama.cpp rounds those of
        # an f32 cache to f16 before its attention.
        assert facts["difference"] < 0.04, cache_type
        assert (facts["difference"] == 0.0) == (cache_type == "f32"), cache_type


@pytest.mark.parametrize("draft_vocab_size", [None, 64])
def test_a_drafter_looks_rows_up_in_a_head_of_its_own(
    cache: Path, folder: Path, tmp_path: Path, draft_vocab_size: int | None
) -> None:
    """A head that is not the token embedding is packed too, and scores are of its exact rows."""
    target = tiny_llama(tmp_path / "target.gguf", weights="q8_0", tied=False)
    drafter = write_pair_drafter(
        tmp_path / "drafter.gguf", target, draft_vocab_size=draft_vocab_size
    )
    command = ("run", "-m", target, "-md", drafter, "-t", "1", "-c", "96", "-n", "12", "--raw",
               "--proposer", "drafter", "--spec-draft-n-max", "3", "--json", "abc")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "from dspine.cli.main import main; main()", *map(str, command)],
        cwd=_ROOT,
        env={**os.environ, SWITCH: "avx2", "XDG_CACHE_HOME": str(cache.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["stats"]["drafted"] > 0


def test_switched_off_means_stock_kernels(cache: Path, built: Path) -> None:
    home = str(cache.parent)
    assert not (found := _child("status", XDG_CACHE_HOME=home, **{SWITCH: "off"}))["active"]
    assert found["text"] == f"stock: switched off by {SWITCH}"
    assert _child("status", XDG_CACHE_HOME=home)["active"]


def test_without_a_build_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    status = enable(find_library().path, tmp_path)
    assert not status.active
    assert "python -m dspine.kernels" in status.text


def test_a_failed_self_test_is_remembered_and_means_stock(
    built: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    copy = library_path(tmp_path, ggml_library.functions().ggml_version().decode())
    copy.parent.mkdir()
    copy.write_bytes(built.read_bytes())
    calls = []

    def fail(path: Path, library_folder: Path, wanted: str, without: Sequence[str]) -> Verdict:
        assert (library_folder, wanted, list(without)) == (folder, ANY, [])
        calls.append(path)
        return Verdict(complaint="q4_1 product: differs")

    for _ in range(2):
        status = enable(folder, tmp_path, fail)
        assert (
            status.text == "stock: the CPU kernels failed their self-test (q4_1 product: differs)"
        )
    assert calls == [copy]


def test_a_child_that_dies_is_reported(tmp_path: Path, built: Path, folder: Path) -> None:
    damaged = tmp_path / "kernels.so"
    damaged.write_bytes(built.read_bytes()[:4096])
    assert run_test(damaged, folder).complaint
