"""The CPU kernels as a library of functions, for tests of single ones."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from dspine.ggml import kernels
from dspine.ggml import library as ggml_library
from dspine.kernels.build import build, is_supported, library_path
from dspine.llama.library import find_library


@pytest.fixture(scope="module")
def compiled() -> ctypes.CDLL:
    """The kernels, not plugged in, from the developer's own cache: compiling takes a while."""
    if not is_supported():
        pytest.skip("no CPU kernels for this machine")
    find_library()
    cache = Path.home() / ".cache" / "dspine"
    path = library_path(cache, ggml_library.functions().ggml_version().decode())
    if not path.exists():
        build(path)
    if not kernels.families(path):
        pytest.skip("no CPU kernels for this processor")
    return ctypes.CDLL(str(path))
