"""Which kernel family is used: what is asked for, what a self-test found, what is faster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dspine.errors import LibraryError, UsageError
from dspine.ggml import kernels
from dspine.kernels import build, rivals
from dspine.kernels.status import SWITCH, switched_off, wanted_family
from dspine.kernels.verdict import ANY, NO_RESULT, RETRY_SECONDS, Verdict, kept_in, verdict

_AVX2_SECONDS = 1e-3


@pytest.mark.parametrize(
    ("value", "family", "off"),
    [
        ("", None, False),
        ("on", None, False),
        ("1", None, False),
        ("off", None, True),
        ("No", None, True),
        ("avx2", "avx2", False),
        (" AVX512 ", "avx512", False),
        ("avxvnni", "avxvnni", False),
        ("amx", "amx", False),
    ],
)
def test_the_environment_asks_for_a_family(value: str, family: str | None, off: bool) -> None:
    assert wanted_family({SWITCH: value}) == family
    assert switched_off({SWITCH: value}) == off


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="is 'sse2': use amx, avx512, avxvnni, avx2, on or off"):
        wanted_family({SWITCH: "sse2"})


def test_a_family_that_is_not_here_is_refused() -> None:
    assert kernels.choose(["avxvnni", "avx2"]) == "avxvnni"
    assert kernels.choose(["avxvnni", "avx2"], "avx2") == "avx2"
    with pytest.raises(LibraryError, match=r"no AVX512-VNNI .*: use avxvnni, avx2$"):
        kernels.choose(["avxvnni", "avx2"], "avx512")
    with pytest.raises(LibraryError, match="they need AVX2"):
        kernels.choose([])


class FakeTrial:
    """What a family computes takes `slowness` times as long as with AVX2; `wrong` ones differ in a
    bit.
    """

    def __init__(self, wrong: str = "", wrong_attention: str = "", **slowness: float) -> None:
        self.slowness = {"avx2": 1.0, **slowness}
        self.wrong = wrong
        self.wrong_attention = wrong_attention

    def __call__(
        self, path: Path, family: str, type_name: str, ne: tuple[int, int], rows: int, repeats: int
    ) -> tuple[float, npt.NDArray[np.float32]]:
        result = np.full((rows, ne[1]), len(type_name), dtype=np.float32)
        if family == self.wrong and type_name == "q6_k":
            result[-1, -1] = np.nextafter(result[-1, -1], np.float32(0))
        return self.slowness[family] * _AVX2_SECONDS * rows, result

    def attention(
        self, path: Path, family: str, cache: str, shape: kernels.AttentionShape, repeats: int
    ) -> tuple[float, npt.NDArray[np.float32]]:
        result = np.full((shape.rows, shape.heads, shape.width), len(cache), dtype=np.float32)
        if family == self.wrong_attention and cache == "q8_0":
            result[0, -1, 0] = np.nextafter(result[0, -1, 0], np.float32(0))
        return self.slowness[family] * _AVX2_SECONDS * shape.rows, result


def _fastest(here: list[str], trial: FakeTrial) -> tuple[str, str]:
    return rivals.fastest(Path(), here, trial, trial.attention)


def test_the_fastest_family_is_chosen() -> None:
    here = ["avx512", "avxvnni", "avx2"]
    assert _fastest(here, FakeTrial(avx512=0.5, avxvnni=0.8)) == (
        "avx512",
        "AVX512-VNNI 2.00 times as fast as AVX2, AVX-VNNI 1.25 times as fast as AVX2",
    )
    assert _fastest(here, FakeTrial(avx512=2.0, avxvnni=1.25))[0] == "avx2"
    assert _fastest(["avx2"], FakeTrial()) == ("avx2", "")


@pytest.mark.parametrize(
    "trial",
    [FakeTrial(wrong="avx512", avx512=0.1), FakeTrial(wrong_attention="avx512", avx512=0.1)],
)
def test_a_family_with_other_results_is_no_choice(trial: FakeTrial) -> None:
    assert _fastest(["avx512", "avx2"], trial) == (
        "avx2",
        "AVX512-VNNI left out: its results differ",
    )


def test_ggml_is_a_rival_only_where_it_has_wider_kernels() -> None:
    assert not rivals.wide_vectors(frozenset({"avx2", "avx_vnni"}))
    assert rivals.wide_vectors(frozenset({"avx2", "avx512f"}))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Kernels and the folder of a library, as far as a verdict looks at them."""
    for name in ("kernels.so", "libggml-cpu.so", "libggml-base.so"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path / "kernels.so", tmp_path


def test_a_family_that_fails_leaves_its_place_to_the_next(files: tuple[Path, Path]) -> None:
    asked: list[tuple[str, list[str]]] = []

    def tester(path: Path, folder: Path, wanted: str, without: Sequence[str]) -> Verdict:
        asked.append((wanted, list(without)))
        if "avx512" in without:
            return Verdict("avx2", "AVX-VNNI 0.90 times as fast as AVX2")
        return Verdict(complaint="signal 4", tried="avx512")

    for _ in range(2):  # the second time it is remembered
        found = verdict(*files, ANY, tester)
        assert found.family == "avx2"
        assert found.note == (
            "avx512 kernels failed their self-test (signal 4); AVX-VNNI 0.90 times as fast as AVX2"
        )
    assert asked == [(ANY, []), (ANY, ["avx512"])]
    assert kept_in(files[1]) is True

    # Asked for by name, it has no substitute.
    assert verdict(*files, "avx512", tester).complaint == "signal 4"
    assert asked[2:] == [("avx512", [])]


def test_a_test_without_an_end_is_tried_again_later(files: tuple[Path, Path]) -> None:
    results = [Verdict(complaint=NO_RESULT), Verdict("avx2")]

    def tester(path: Path, folder: Path, wanted: str, without: Sequence[str]) -> Verdict:
        return results.pop(0)

    assert verdict(*files, ANY, tester).complaint == NO_RESULT
    assert verdict(*files, ANY, tester).complaint == NO_RESULT
    assert len(results) == 1

    (kept,) = files[1].glob("*.json")
    before = kept.stat().st_mtime - RETRY_SECONDS - 1.0
    os.utime(kept, (before, before))
    assert verdict(*files, ANY, tester).family == "avx2"


def test_where_ggml_is_faster_the_verdict_is_against_our_kernels(files: tuple[Path, Path]) -> None:
    def tester(path: Path, folder: Path, wanted: str, without: Sequence[str]) -> Verdict:
        return Verdict(None, "ggml's own kernels are 1.50 times as fast here")

    assert kept_in(files[1]) is None
    assert verdict(*files, ANY, tester).family is None
    assert kept_in(files[1]) is False


@pytest.mark.parametrize(
    ("unknown", "without"),
    [("avxvnni", ["avxvnni"]), ("amx-int8", ["amx"]), ("avx512vnni", ["amx", "avx512"])],
)
def test_a_compiler_that_does_not_know_a_family_builds_the_others(
    unknown: str, without: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "old-compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *-m{unknown}*) echo "error: unrecognized option" >&2; exit 1;; esac\n'
        f'echo "$*" >> {tmp_path}/calls\n'
        'while [ "$1" != -o ]; do shift; done; : > "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    left_out = build.build(tmp_path / "made" / "kernels.so")
    assert sorted(left_out) == without
    assert all("unrecognized option" in complaint for complaint in left_out.values())
    calls = (tmp_path / "calls").read_text().splitlines()
    linked = next(call for call in calls if "-shared" in call)
    listed = next(call for call in calls if "families.cpp" in call)
    assert "avx2_attention.o" in linked
    for family in ("amx", "avx512", "avxvnni"):
        assert (f"{family}_small.o" in linked) == (family not in without)
        assert (f"-DDSPINE_WITHOUT_{family.upper()}" in listed.split()) == (family in without)
