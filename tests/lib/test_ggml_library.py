"""Loading the library, its type table, devices and backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspine.errors import ClosedError, LibraryError, UsageError
from dspine.ggml import Backend, default_device, devices, load, loaded, version
from dspine.ggml.library import functions
from dspine.ggml.types import all_types
from dspine.llama.library import find_library


@pytest.fixture(scope="module", autouse=True)
def folder() -> Path:
    return find_library().path


def test_loading_the_same_folder_again_changes_nothing(folder: Path) -> None:
    before = functions()
    load(folder)
    assert loaded() and functions() is before


def test_a_second_library_in_one_process_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"already loaded from .*new process"):
        load(tmp_path)


def test_the_type_table_is_that_of_the_library() -> None:
    lib = functions()
    for kind in all_types():
        assert lib.ggml_type_name(kind.number).decode().lower() == kind.name
        assert lib.ggml_blck_size(kind.number) == kind.block, kind.name
        assert lib.ggml_type_size(kind.number) == kind.size, kind.name


def test_version_names_release_and_commit() -> None:
    release, commit = version().split(" ")
    assert release.count(".") == 2 and commit.startswith("(")


def test_the_cpu_is_a_device_with_memory() -> None:
    device = default_device()
    assert device.kind == "cpu" and device in devices()
    free, total = device.memory()
    assert 0 < free <= total


def test_threads_must_be_positive_and_a_closed_backend_refuses_work() -> None:
    with Backend() as backend:
        with pytest.raises(UsageError, match="n_threads is 0"):
            backend.set_threads(0)
        backend.set_threads(2)
        assert backend.n_threads == 2
    assert backend.closed
    backend.close()
    with pytest.raises(ClosedError, match="backend"):
        backend.set_threads(1)


def test_unknown_functions_are_a_mistake_of_ours() -> None:
    with pytest.raises(AttributeError, match="ggml_no_such"):
        functions().ggml_no_such()
