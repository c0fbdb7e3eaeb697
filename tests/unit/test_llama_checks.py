"""Checks that need no library: taps, file beginnings, library paths, CPU features."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspine.errors import FileError, LibraryError, UsageError
from dspine.llama import library as library_module
from dspine.llama import model as model_module
from dspine.llama.checks import require_count
from dspine.llama.library import cpu_features
from dspine.llama.model import check_file
from dspine.llama.native import MANDATORY, bind, missing_symbols
from dspine.llama.taps import check_taps
from tests.support.libraries import described_library


def test_taps_of_all_layers_but_the_last_are_accepted() -> None:
    check_taps((0, 2, 28), 30)
    check_taps((), 1)


@pytest.mark.parametrize(
    ("taps", "words"),
    [
        ((29,), "output of layer 29 cannot be read: of the 30 layers .* only 0 to 28"),
        ((40,), "layer 40"),
        ((-1,), "tap is -1"),
        ((True,), "tap is True"),
        ((1, 3, 1), r"\[1, 3, 1\] name a layer twice"),
    ],
)
def test_unreadable_taps_are_refused(taps: tuple[int, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_taps(taps, 30)


@pytest.mark.parametrize("value", [0, -3, 1.5, "4", None, True])
def test_counts_must_be_positive_whole_numbers(value: object) -> None:
    with pytest.raises(UsageError, match=r"n_ctx is .*: it must be a whole number of at least 1"):
        require_count("n_ctx", value)


def test_a_missing_file_a_folder_and_other_formats_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no\.gguf does not exist"):
        check_file(tmp_path / "no.gguf")
    with pytest.raises(FileError, match="is a folder"):
        check_file(tmp_path)
    other = tmp_path / "model.gguf"
    other.write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}" + bytes(40))
    with pytest.raises(FileError, match=r"is not a GGUF file .*08 00 00 00"):
        check_file(other)
    other.write_bytes(b"")
    with pytest.raises(FileError, match="begins with nothing"):
        check_file(other)
    other.write_bytes(b"GGUF\x03\x00")
    with pytest.raises(FileError, match="cut off after 6 bytes"):
        check_file(other)
    other.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 5) + bytes(100))
    with pytest.raises(FileError, match="holds a vocabulary and no weights"):
        check_file(other)


def fake_kind(encoder: bool, decoder: bool, diffusion: bool, vocabulary: int) -> SimpleNamespace:
    return SimpleNamespace(
        llama_model_has_encoder=lambda model: encoder,
        llama_model_has_decoder=lambda model: decoder,
        llama_model_is_diffusion=lambda model: diffusion,
        llama_model_get_vocab=lambda model: 7,
        llama_vocab_type=lambda vocab: vocabulary,
    )


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ((True, True, False, 2), "encoder"),
        ((False, False, False, 2), "encoder"),
        ((False, True, True, 2), "diffusion"),
        ((False, True, False, 0), "no tokenizer"),
    ],
)
def test_models_that_do_not_generate_token_after_token_are_refused(
    facts: tuple[bool, bool, bool, int], words: str
) -> None:
    with pytest.raises(FileError, match=words):
        model_module._check_kind(fake_kind(*facts), 1, Path("m.gguf"))
    model_module._check_kind(fake_kind(False, True, False, 2), 1, Path("m.gguf"))


def test_a_library_without_a_function_is_named_with_it() -> None:
    class Lib:
        pass

    lib = Lib()
    for name in MANDATORY:
        setattr(lib, name, None)
    assert missing_symbols(lib, MANDATORY) == []
    delattr(lib, "llama_memory_seq_rm")
    with pytest.raises(LibraryError, match=r"/lib/here has no function llama_memory_seq_rm"):
        bind(SimpleNamespace(_lib=lib), Path("/lib/here"))


def test_the_library_path_is_checked_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = library_module._requested_folder
    monkeypatch.delenv("DSPINE_LIBRARY", raising=False)
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    assert find(None) is None
    with pytest.raises(LibraryError, match="gone, which does not exist"):
        find(tmp_path / "gone")
    with pytest.raises(LibraryError, match="has no libllama"):
        find(tmp_path)
    build = tmp_path / "build"
    build.mkdir()
    (build / "libllama.so").touch()
    assert find(build) == build
    assert find(build / "libllama.so") == build
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(build))
    assert find(None) == build
    monkeypatch.setenv("DSPINE_LIBRARY", str(tmp_path / "other"))
    with pytest.raises(LibraryError, match=r"DSPINE_LIBRARY names .*other"):
        find(None)


def test_cpu_features_are_those_that_are_on() -> None:
    info = "CPU : SSE3 = 1 | AVX512 = 0 | AVX2 = 1 | REPACK = 1 | "
    assert cpu_features(info) == ("SSE3", "AVX2", "REPACK")


@pytest.mark.parametrize(
    ("commit", "told"),
    [(None, False), ("0c1e570-dirty", False), ("0c1e57098", False), ("abcdef012", True)],
)
def test_another_llama_cpp_than_the_tested_one_is_told(
    tmp_path: Path, commit: str | None, told: bool
) -> None:
    library = described_library(tmp_path, version="0.3.36", commit=commit)
    notice = library.notice or ""
    assert ("llama.cpp abcdef012, and dspine was tested with 0c1e570 alone" in notice) is told
    assert bool(notice) is told
