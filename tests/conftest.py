"""What every test has: no settings of the developer's shell, and a cache folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from dspine.default_pair import default_drafter as find_default_drafter
from dspine.default_pair import default_target as find_default_target

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("dspine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dspine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--drafter",
        type=Path,
        metavar="FILE",
        help="test this GGUF where the tests use the shipped drafter of the default target",
    )


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for the whole run, so that the machine is measured once and not in every test."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session", autouse=True)
def _shared_environment(cache_folder: Path) -> Iterator[None]:
    """For fixtures that outlive a test: they start before `_own_environment` does."""
    with pytest.MonkeyPatch.context() as patch:
        _clean(patch, cache_folder)
        yield


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    """Whatever the test before left behind."""
    _clean(monkeypatch, cache_folder)


@pytest.fixture(scope="session")
def users_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For child processes that run as a user's do: with the CPU kernels, where this machine has
    them. The tests' own process, whose cache has none, computes with ggml's.
    """
    folder = tmp_path_factory.mktemp("users-cache")
    # Compiling takes a while, and the name of the result holds the sources' hash.
    built = Path.home() / ".cache" / "dspine" / "kernels"
    built.mkdir(parents=True, exist_ok=True)
    (folder / "kernels").symlink_to(built)
    environment = {**os.environ, "DSPINE_CACHE_DIR": str(folder)}
    subprocess.run(
        [sys.executable, "-m", "dspine.kernels"], env=environment, check=True, capture_output=True
    )
    return folder


@pytest.fixture(scope="session")
def default_target() -> Path:
    """The GGUF of the default target; `make test` installs it."""
    return find_default_target()


@pytest.fixture(scope="session")
def default_drafter(pytestconfig: pytest.Config) -> Path:
    """The drafter shipped for the default target, or the one that `--drafter` names."""
    named: Path | None = pytestconfig.getoption("--drafter")
    found = named or find_default_drafter()
    assert found is not None, "no drafter is shipped in src/dspine/data: name one with --drafter"
    return found


def _clean(patch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    for name in list(os.environ):
        if name.startswith("DSPINE_"):
            patch.delenv(name)
    patch.setenv("XDG_CACHE_HOME", str(cache_folder))
