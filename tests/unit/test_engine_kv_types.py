"""The look at a quantised cache: when it happens, what is kept of it, what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspine.engine import kv_types
from dspine.engine.kv_types import LEAST, check_cache_types
from dspine.errors import UsageError


@pytest.fixture
def model(tmp_path: Path) -> Any:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    kernels = SimpleNamespace(text="none")
    return SimpleNamespace(path=file, library=SimpleNamespace(file=file, kernels=kernels))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Types that were looked at; q4_0 anywhere changes half of the choices."""
    seen: list[tuple[str, str]] = []

    def agreement(_model: Any, k: str, v: str, **_: Any) -> float:
        seen.append((k, v))
        return 0.5 if "q4_0" in (k, v) else 0.97

    monkeypatch.setattr(kv_types, "agreement", agreement)
    return seen


def check(model: Any, k: str, v: str, folder: Path) -> float | None:
    return check_cache_types(model, k, v, n_threads=1, folder=folder)


def test_exact_types_need_no_look(model: Any, looks: list[tuple[str, str]], tmp_path: Path) -> None:
    assert check(model, "f16", "f16", tmp_path) is None
    assert check(model, "f32", "bf16", tmp_path) is None
    assert looks == []


def test_a_look_is_kept_for_the_same_target_and_types(
    model: Any, looks: list[tuple[str, str]], tmp_path: Path
) -> None:
    assert check(model, "q8_0", "q8_0", tmp_path) == 0.97
    assert check(model, "q8_0", "q8_0", tmp_path) == 0.97
    assert check(model, "q8_0", "f16", tmp_path) == 0.97
    assert looks == [("q8_0", "q8_0"), ("q8_0", "f16")]
    model.path.write_bytes(b"GGUF of another target")
    check(model, "q8_0", "f16", tmp_path)
    assert len(looks) == 3
    for file in (tmp_path / "cache-types").iterdir():
        file.write_text("damaged")
    check(model, "q8_0", "f16", tmp_path)
    assert len(looks) == 4


def test_a_type_that_changes_too_many_choices_is_refused_with_the_number(
    model: Any, looks: list[tuple[str, str]], tmp_path: Path
) -> None:
    assert LEAST > 0.5
    for _ in range(2):
        with pytest.raises(UsageError, match=r"q8_0 and q4_0.*only 50%.*--proposer"):
            check(model, "q8_0", "q4_0", tmp_path)
    assert len(looks) == 1, "a refusal is kept as well"


def test_a_folder_that_cannot_be_written_costs_a_look_only(
    model: Any, looks: list[tuple[str, str]], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert check(model, "q8_0", "q8_0", file) == 0.97
    assert check(model, "q8_0", "q8_0", file) == 0.97
    assert len(looks) == 2
