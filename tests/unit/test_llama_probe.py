"""The probe's decisions, with children that really die but no llama.cpp in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dspine.errors import LibraryError
from dspine.llama import probe as probe_module
from dspine.llama.library import Library
from dspine.llama.probe import CURE, ProbeResult, probe
from dspine.machine import cache_folder
from tests.support.libraries import described_library

DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
WORKS = "pass"
FAILS = "import sys; sys.exit(2)"


class Children:
    """Builds child commands and remembers which were started."""

    def __init__(self, with_extra: str, without_extra: str) -> None:
        self.codes = {True: with_extra, False: without_extra}
        self.started: list[bool] = []

    def __call__(self, model: Path, library: Library, extra_buffers: bool) -> Sequence[str]:
        self.started.append(extra_buffers)
        return [sys.executable, "-S", "-c", self.codes[extra_buffers]]


@pytest.fixture(autouse=True)
def one_kind_of_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "model_kind", lambda path: "llama [3]")


@pytest.fixture
def library(tmp_path: Path) -> Library:
    found = described_library(tmp_path)
    found.file.write_bytes(b"first build")
    return found


def run(library: Library, children: Children, tmp_path: Path) -> ProbeResult:
    return probe(Path("model.gguf"), library, command=children, folder=tmp_path / "cache")


def test_a_child_that_lives_makes_everything_ok_and_is_asked_once(
    library: Library, tmp_path: Path
) -> None:
    children = Children(WORKS, DIES)
    result = run(library, children, tmp_path)
    assert (result.status, result.use_extra_buffers, result.notice) == ("ok", True, None)
    assert run(library, children, tmp_path) == result
    assert children.started == [True]


def test_a_child_that_dies_is_followed_by_one_without_extra_buffers(
    library: Library, tmp_path: Path
) -> None:
    children = Children(DIES, WORKS)
    result = run(library, children, tmp_path)
    assert children.started == [True, False]
    assert (result.status, result.use_extra_buffers, result.cure) == ("fallback", False, CURE)
    assert result.notice is not None
    assert "SIGKILL" in result.notice and CURE in result.notice
    result.require_usable()
    assert run(library, children, tmp_path) == result
    assert children.started == [True, False]


def test_two_deaths_are_an_error_that_names_the_cure_and_is_not_kept(
    library: Library, tmp_path: Path
) -> None:
    children = Children(DIES, DIES)
    result = run(library, children, tmp_path)
    assert result.status == "broken"
    with pytest.raises(LibraryError, match=r"SIGKILL.*model\.gguf.*fno-tree-dse"):
        result.require_usable()
    run(library, children, tmp_path)
    assert children.started == [True, False, True, False]


def test_an_ordinary_failure_is_left_to_the_load_that_follows(
    library: Library, tmp_path: Path
) -> None:
    children = Children(FAILS, WORKS)
    result = run(library, children, tmp_path)
    assert (result.status, result.reason) == ("ok", "")
    run(library, children, tmp_path)
    assert children.started == [True, True]


def test_a_rebuilt_library_or_another_kind_of_model_is_probed_anew(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = Children(WORKS, WORKS)
    run(library, children, tmp_path)
    library.file.write_bytes(b"second build, other size")
    run(library, children, tmp_path)
    assert children.started == [True, True]
    monkeypatch.setattr(probe_module, "model_kind", lambda path: "llama [2, 8]")
    run(library, children, tmp_path)
    assert children.started == [True] * 3
    monkeypatch.setattr(probe_module, "cpu_model", lambda: "another processor")
    run(library, children, tmp_path)
    assert children.started == [True] * 4


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"ok": 1, "use_extra_buffers": true}'])
def test_a_damaged_cache_file_is_ignored(content: str, library: Library, tmp_path: Path) -> None:
    children = Children(WORKS, WORKS)
    run(library, children, tmp_path)
    [file] = (tmp_path / "cache" / "probe").glob("*.json")
    file.write_text(content)
    assert run(library, children, tmp_path).status == "ok"
    assert children.started == [True, True]
    assert json.loads(file.read_text())["ok"] is True


def test_a_cache_folder_that_cannot_be_written_costs_only_time(
    library: Library, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert run(library, Children(WORKS, WORKS), tmp_path).status == "ok"


def test_the_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("DSPINE_CACHE_DIR", raising=False)
    assert cache_folder() == tmp_path / "xdg" / "dspine"
    monkeypatch.setenv("DSPINE_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
