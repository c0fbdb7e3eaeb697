"""What every test has: no settings of the developer's shell, and a cache folder of its own."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from dspine.default_pair import default_target as find_default_target


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the whole run, so that the machine is measured once and not in every test."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    for name in list(os.environ):
        if name.startswith("DSPINE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder))


@pytest.fixture(scope="session")
def default_target() -> Path:
    """The GGUF of the default target; `make test` installs it."""
    return find_default_target()


def pytest_unconfigure() -> None:
    """llama-cpp-python leaves two handles of the null device open until Python ends."""
    warnings.simplefilter("ignore", ResourceWarning)
