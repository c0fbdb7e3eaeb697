"""The CPU kernels with the compiler's checks of memory and arithmetic, over edge shapes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dspine.kernels.build import FAMILY_FLAGS, build, is_supported
from dspine.llama.library import find_library

_ROOT = Path(__file__).parents[2]
_CHECKS = "-fsanitize=address,undefined -fno-omit-frame-pointer -g"
_RUNS = (
    ("native_child", "products", ()),
    ("native_child", "attention", ()),
    ("native_random", "products", ("1", "6")),
    ("native_random", "attention", ("1", "6")),
    ("native_random", "lookups", ("1", "20")),
    ("native_random", "top_k", ("1", "300")),
    ("native_random", "rows_of_top_k", ("1", "20")),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_supported(), reason="no CPU kernels for this machine"),
]


@pytest.fixture(scope="module")
def runtime() -> Path:
    """GCC's address checker, which must be loaded before everything else."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    done = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    path = Path(done.stdout.strip())
    if not path.is_absolute():
        pytest.skip("GCC's address checker is not installed")
    return path.resolve()


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, runtime: Path) -> Path:
    """The kernels with checks, but for families whose checked code takes minutes to compile."""
    path = tmp_path_factory.mktemp("checked") / "kernels.so"
    flags = {
        family: flags if family == "avx2" else (*flags, "-fno-sanitize=all")
        for family, flags in FAMILY_FLAGS.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", f"g++ {_CHECKS}")
        build(path, flags)
    return path


def _run(runtime: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=_ROOT,
        env={
            **os.environ,
            "LD_PRELOAD": str(runtime),
            # Python itself leaves memory behind when it ends.
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.parametrize(("module", "what", "rest"), _RUNS)
def test_no_error_of_memory_or_arithmetic(
    module: str, what: str, rest: tuple[str, ...], checked: Path, runtime: Path
) -> None:
    folder = find_library().path
    done = _run(runtime, "-m", f"tests.support.{module}", what, str(checked), str(folder), *rest)
    if "no CPU kernels for this processor" in done.stderr:
        pytest.skip("no CPU kernels for this processor")
    assert done.returncode == 0, done.stderr[-4000:]
    assert module != "native_random" or done.stdout == "[]\n", done.stdout[-4000:]
    assert "runtime error" not in done.stderr, done.stderr[-4000:]
    assert "AddressSanitizer" not in done.stderr, done.stderr[-4000:]


def test_the_checks_notice_an_error(runtime: Path) -> None:
    reads_too_far = (
        "import ctypes; c = ctypes.CDLL(None); c.malloc.restype = ctypes.c_void_p;"
        "c.memcpy(ctypes.create_string_buffer(64), ctypes.c_void_p(c.malloc(8)), 64)"
    )
    done = _run(runtime, "-c", reads_too_far)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
