"""Kernels for processors that this one is not: compiled with their real flags, and run here with
their instructions emulated. Every family must compute the bits of the AVX2 kernels.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspine.errors import LibraryError
from dspine.ggml import kernels
from dspine.ggml import library as ggml_library
from dspine.ggml.kernels import AttentionShape
from dspine.kernels.build import (
    FAMILY_FLAGS,
    build,
    compile_command,
    find_compiler,
    is_supported,
    library_path,
    source_folder,
)
from dspine.kernels.selftest import TYPES
from dspine.kernels.status import SWITCH
from dspine.kernels.verdict import ANY, Verdict, run_test
from dspine.llama.library import find_library
from dspine.machine import usable_cores

_ROOT = Path(__file__).parents[2]
_NEWER = ("amx", "avx512", "avxvnni")
_SUPPORT = _ROOT / "tests" / "support"
_AVX2 = (*FAMILY_FLAGS["avx2"], "-Og")


def _emulated(family: str) -> tuple[str, ...]:
    """Flags with which a newer family is compiled for AVX2."""
    header = "emulated_amx.h" if family == "amx" else "emulated_vnni.h"
    return ("-Og", "-Wno-psabi", "-include", str(_SUPPORT / header))


pytestmark = pytest.mark.skipif(not is_supported(), reason="no CPU kernels for this machine")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with kernels whose newer families are emulated, so that they run anywhere."""
    find_library()
    folder = tmp_path_factory.mktemp("emulated")
    path = library_path(folder, ggml_library.functions().ggml_version().decode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", f"{' '.join(find_compiler())} -DDSPINE_EMULATED")
        flags = {"avx2": _AVX2, **{key: (*_AVX2, *_emulated(key)) for key in _NEWER}}
        assert build(path, flags) == {}
    if kernels.families(path)[-1:] != ["avx2"]:
        pytest.skip("this processor has no AVX2")
    return folder


@pytest.fixture(scope="module")
def emulated(cache: Path) -> Path:
    """The kernels in it."""
    return library_path(cache, ggml_library.functions().ggml_version().decode())


@pytest.fixture(scope="module")
def built() -> Path:
    """The real kernels, from the developer's own cache."""
    find_library()
    home = Path.home() / ".cache" / "dspine"
    path = library_path(home, ggml_library.functions().ggml_version().decode())
    if not path.exists():
        build(path)
    return path


def _child(*arguments: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.native_child", *arguments],
        cwd=_ROOT,
        env={**{k: v for k, v in os.environ.items() if k != SWITCH}, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _children(
    calls: Sequence[tuple[str, ...]], environments: Sequence[Mapping[str, str]] = ()
) -> list[dict[str, Any]]:
    """What each call finds, as many at once as there are cores."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        made = environments or [{}] * len(calls)
        return list(pool.map(lambda call, more: _child(*call, **more), calls, made))


def test_real_instructions_compile_without_a_warning(tmp_path: Path) -> None:
    """And no file of a family leaves code of its own that another file might be linked with."""
    if not shutil.which("nm") or not shutil.which("objdump"):
        pytest.skip("binutils are not installed")
    sources = [f for f in source_folder().glob("*_*.cpp") if f.stem.split("_")[0] in _NEWER]
    assert len(sources) == 9

    def compile_one(source: Path) -> tuple[str, Path]:
        made = tmp_path / f"{source.stem}.o"
        command = compile_command(source, made)
        done = subprocess.run([*command, "-Werror"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return source.stem, made

    with ThreadPoolExecutor(usable_cores()) as pool:
        objects = dict(pool.map(compile_one, sources))
    for name, made in objects.items():
        symbols = subprocess.run(["nm", str(made)], capture_output=True, text=True, check=True)
        assert not re.search(r" [WVu] ", symbols.stdout), f"{name}: {symbols.stdout}"
    for kind in ("small", "k_quants"):
        code = subprocess.run(
            ["objdump", "-d", str(objects[f"amx_{kind}"])], capture_output=True, text=True
        )
        # The last is the sum, the one before it the inputs; AT&T's order is the reverse of Intel's.
        assert re.search(r"tdpbssd %tmm1,%tmm0,%tmm4", code.stdout)
        assert all(f"{word} " in code.stdout for word in ("ldtilecfg", "sttilecfg", "tileloadd"))
    code = subprocess.run(
        ["objdump", "-d", str(objects["amx_eight_bit"])], capture_output=True, text=True
    )
    assert re.search(r"tdpbssd %tmm2,%tmm0,%tmm4", code.stdout)  # upper bytes
    assert re.search(r"tdpbusd %tmm2,%tmm1,%tmm5", code.stdout)  # lower bytes, unsigned
    for family, register in {"avx512": "zmm", "avxvnni": "ymm"}.items():
        for kind in ("small", "k_quants"):
            made = objects[f"{family}_{kind}"]
            code = subprocess.run(["objdump", "-d", str(made)], capture_output=True, text=True)
            assert len(re.findall(rf"vpdpbusd.*{register}", code.stdout)) > 100
    code = subprocess.run(
        ["objdump", "-d", str(objects["avx512_attention"])], capture_output=True, text=True
    )
    assert len(re.findall(r"vfmadd.*zmm", code.stdout)) > 100


def test_products_have_the_bits_of_avx2(built: Path, emulated: Path) -> None:
    """All types, on the weights, shapes and rows that the AVX2 kernels are tested with."""
    folder = str(find_library().path)
    here = [(built, family) for family in kernels.families(built) if family in _NEWER]
    others = [*((emulated, family) for family in _NEWER), *here]
    real, *all_found = _children(
        [("products", str(path), folder, family) for path, family in [(built, "avx2"), *others]]
    )
    for (_, family), found in zip(others, all_found, strict=True):
        assert set(found) == set(real) == set(TYPES)
        for type_name, facts in found.items():
            assert facts["digest"] == real[type_name]["digest"], f"{family} {type_name}"
            assert all(facts["same"]), f"{family} {type_name}"


@pytest.mark.parametrize("family", _NEWER)
def test_groups_of_any_number_of_rows_agree(family: str, emulated: Path, built: Path) -> None:
    for type_name in TYPES:
        for rows in (*range(1, 10), *range(15, 19), 31, 33):
            _, expected = kernels.trial(built, "avx2", type_name, (512, 37), rows, 1)
            _, found = kernels.trial(emulated, family, type_name, (512, 37), rows, 1)
            assert np.isfinite(expected).all() and np.abs(expected).max() > 0
            assert np.array_equal(found, expected), f"{type_name}, {rows} rows"


_ATTENTIONS = (
    AttentionShape(9, 3, 1, 257, 64),
    AttentionShape(9, 3, 7, 130, 64),
    AttentionShape(4, 1, 20, 64, 128),
    AttentionShape(8, 8, 5, 31, 96),
    AttentionShape(12, 6, 2, 15, 256),
    AttentionShape(2, 1, 70, 200, 32),
    AttentionShape(9, 3, 17, 321, 64),
    AttentionShape(6, 6, 9, 129, 40),
    AttentionShape(3, 1, 1, 1, 32),
)
"""Groups of 1 to 6 queries, keys and widths that fill no vector."""


def test_attention_has_the_bits_of_avx2(emulated: Path, built: Path) -> None:
    for shape in (*_ATTENTIONS, AttentionShape(5, 5, 4, 77, 80), AttentionShape(5, 5, 4, 72, 8)):
        for cache in ("f16", "bf16", "f32") if shape.width % 32 else ("f16", "bf16", "f32", "q8_0"):
            _, expected = kernels.attention_trial(built, "avx2", cache, shape, 1)
            assert np.isfinite(expected).all() and np.abs(expected).max() > 0
            for family in _NEWER:
                _, found = kernels.attention_trial(emulated, family, cache, shape, 1)
                assert np.array_equal(found, expected), f"{family}, {cache}, {shape}"


def test_logits_of_the_target_have_the_bits_of_avx2(
    built: Path, cache: Path, default_target: Path
) -> None:
    places = {"avx2": built.parents[1], **dict.fromkeys(_NEWER, cache)}
    real, *all_found = _children(
        [("logits", str(default_target))] * len(places),
        [{"DSPINE_CACHE_DIR": str(at), SWITCH: family} for family, at in places.items()],
    )
    assert real["text"].startswith("dspine (AVX2)")
    for family, found in zip(_NEWER, all_found, strict=True):
        assert found["text"].startswith(f"dspine ({kernels.FAMILIES[family]})")
        assert found["digest"] == real["digest"], family


def test_the_fastest_family_is_chosen_and_compared(emulated: Path) -> None:
    """Emulation is slow, so AVX2 wins against families that would come first."""
    found = run_test(emulated, find_library().path)
    assert not found.complaint
    assert "AVX512-VNNI 0." in found.note
    assert "AVX-VNNI 0." in found.note
    assert found.family in ("avx2", None)


def test_emulated_products_are_no_match_for_ggml(built: Path, emulated: Path) -> None:
    """As a slow family would be on a processor where ggml has wide kernels."""
    folder = str(find_library().path)
    slow = _child("rival", str(emulated), folder, "avx512")["ratio"]
    assert 0 < _child("rival", str(built), folder, "avx2")["ratio"] < slow / 4
    assert slow > 1


def test_a_family_that_cannot_run_here_is_refused(built: Path) -> None:
    folder = find_library().path
    for family in set(_NEWER) - set(kernels.families(built)):
        complaint = run_test(built, folder, family).complaint
        assert f"has no {kernels.FAMILIES[family]} for the CPU kernels: use " in complaint
        assert not complaint.count("\n")
    with pytest.raises(LibraryError, match="they need AVX2"):
        kernels.choose([])
    assert run_test(built, folder, "avx2") == Verdict("avx2")
    assert ANY not in kernels.FAMILIES
