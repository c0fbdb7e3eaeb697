"""Which target a drafter belongs to: what is read from a target, and what is compared."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspine.errors import FileError, PairError
from dspine.files.pairing import (
    check_pair,
    check_unpaired,
    describe_target,
    rotary_base,
    vocab_hash,
)
from tests.support.drafter_files import (
    PAIR,
    SMALL,
    gguf_bytes,
    pair_text,
    pair_u32,
    tensor_entry,
    text,
)
from tests.support.tiny_models import tiny_llama

NORM = np.linspace(0.5, 2.0, 8).astype("<f4")


def _target(
    path: Path,
    *extra: bytes,
    architecture: str = "llama",
    layers: int = 4,
    norm: bytes = NORM.tobytes(),
    norm_type: int = 0,
) -> Path:
    pairs = [
        pair_text("general.architecture", architecture),
        pair_u32(f"{architecture}.block_count", layers),
        pair_u32(f"{architecture}.embedding_length", 8),
        *extra,
    ]
    entries = [
        tensor_entry("output_norm.weight", (8,), norm_type, 0),
        tensor_entry("token_embd.weight", (8, 3), 0, 64),
    ]
    path.write_bytes(gguf_bytes(pairs, entries, norm + bytes(64 - len(norm)) + bytes(96)))
    return path


TOKENS = (
    text("tokenizer.ggml.tokens")
    + struct.pack("<IIQ", 9, 8, 3)
    + b"".join(text(t) for t in ("a", "ü", b"\xff"))
)


def test_the_vocabulary_hash_by_hand() -> None:
    expected = hashlib.sha256(b"\x01\0\0\0a\x02\0\0\0\xc3\xbc\x01\0\0\0\xff").hexdigest()
    assert vocab_hash(["a", "ü", b"\xff"]) == expected
    assert vocab_hash(["a", "ü", "\udcff"]) == expected
    # The lengths keep neighbours apart.
    assert vocab_hash(["ab", "c"]) != vocab_hash(["a", "bc"])


def test_a_target_describes_itself(tmp_path: Path) -> None:
    pair = describe_target(_target(tmp_path / "M-1.gguf", TOKENS))
    assert (pair.name, pair.architecture) == ("M-1", "llama")
    assert (pair.hidden_size, pair.num_layers, pair.vocab_size) == (8, 4, 3)
    assert pair.vocab_hash == vocab_hash(["a", "ü", b"\xff"])
    assert pair.fingerprint == hashlib.sha256(NORM.tobytes()).hexdigest()
    assert pair.thinking is False


def test_the_fingerprint_is_of_float32_whatever_is_stored(tmp_path: Path) -> None:
    half = NORM.astype("<f2")
    pair = describe_target(_target(tmp_path / "m.gguf", norm=half.tobytes(), norm_type=1))
    assert pair.fingerprint == hashlib.sha256(half.astype("<f4").tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("Qwen3-4B-UD-IQ2_XXS.gguf", "Qwen3-4B"),
        ("Big-70B-Q4_K_M-00001-of-00003.gguf", "Big-70B"),
        ("Some-8B-bf16.gguf", "Some-8B"),
        ("model.gguf", "Folder of a run"),
        ("sha256-0123456789abcdef0123.gguf", "Folder of a run"),
    ],
)
def test_a_target_is_called_as_its_file_is(tmp_path: Path, file: str, name: str) -> None:
    path = _target(tmp_path / "m.gguf", TOKENS, pair_text("general.name", "Folder of a run"))
    (tmp_path / "named").mkdir()
    named = path.rename(tmp_path / "named" / file)
    if "-of-" in file:
        for number in (2, 3):
            named.with_name(file.replace("00001", f"{number:05d}", 1)).write_bytes(
                named.read_bytes()
            )
    assert describe_target(named).name == name


def test_names_and_vocabularies_that_are_missing(tmp_path: Path) -> None:
    pair = describe_target(_target(tmp_path / "Some-Model.gguf"))
    assert (pair.name, pair.vocab_size, pair.vocab_hash) == ("Some-Model", 3, "")


def test_built_in_mtp_layers_are_not_part_of_the_trunk(tmp_path: Path) -> None:
    mtp = pair_u32("qwen35.nextn_predict_layers", 1)
    path = _target(tmp_path / "m.gguf", mtp, architecture="qwen35", layers=5)
    assert describe_target(path).num_layers == 4
    with pytest.raises(FileError, match="MTP"):
        describe_target(_target(path, mtp, architecture="qwen35", layers=1))


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("dspine", "a DSpine drafter, not a target"),
        ("dflash", "DFlash family"),
        ("eagle3", "EAGLE-3"),
        ("clip", "mmproj"),
    ],
)
def test_what_accompanies_a_model_is_no_target(
    tmp_path: Path, architecture: str, words: str
) -> None:
    with pytest.raises(FileError, match=words):
        describe_target(_target(tmp_path / "m.gguf", architecture=architecture))


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([], "does not name its architecture"),
        ([pair_u32("general.architecture", 1)], "does not name its architecture"),
        ([pair_text("general.architecture", "llama")], "llama.block_count"),
        (
            [pair_text("general.architecture", "llama"), pair_text("llama.block_count", "4")],
            "llama.block_count",
        ),
        ([pair_text("general.architecture", "x"), pair_text("general.type", "adapter")], "adapter"),
        (
            [
                pair_text("general.architecture", "x"),
                pair_u32("x.block_count", 4),
                pair_u32("x.embedding_length", 4),
            ],
            "token_embd.weight",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, pairs: list[bytes], words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(pairs, []))
    with pytest.raises(FileError, match=words):
        describe_target(path)


def test_the_same_target_passes_without_a_word() -> None:
    assert check_pair(PAIR, PAIR) == []
    assert check_pair(PAIR, replace(PAIR, name="renamed", thinking=False)) == []


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("architecture", "qwen3", "architecture is llama, but A target has qwen3"),
        ("hidden_size", 65, "hidden size is 64, but A target has 65"),
        ("num_layers", 9, "number of layers is 8, but A target has 9"),
        ("vocab_size", 161, "vocabulary size is 160, but A target has 161"),
        ("vocab_hash", "ef" * 32, "abababababab, but that of A target has efefefefefef"),
    ],
)
def test_another_model_is_refused_by_field(field: str, value: Any, words: str) -> None:
    with pytest.raises(PairError, match=words):
        check_pair(PAIR, replace(PAIR, **{field: value}))


def test_a_fine_tune_is_a_warning() -> None:
    (warning,) = check_pair(PAIR, replace(PAIR, name="Tuned", fingerprint="00"))
    assert "Tuned is another version or a fine-tune of A target" in warning


def test_what_cannot_be_compared_is_a_warning() -> None:
    warnings = check_pair(PAIR, replace(PAIR, vocab_hash="", fingerprint=""))
    assert [w.split(" cannot")[0] for w in warnings] == ["the vocabulary", "the weights"]


@pytest.mark.parametrize(("base", "told"), [(None, 1), (1e6, 1), (1.0001e6, 1), (1e7, 2), (1e4, 2)])
def test_another_rotary_base_is_told_where_nothing_else_can_be(
    base: float | None, told: int
) -> None:
    config = replace(SMALL, rope_theta=1e6)
    target = replace(
        PAIR, hidden_size=config.target_hidden_size, vocab_size=config.vocab_size, num_layers=64
    )
    warnings = check_unpaired("d.gguf", config, target, base)
    assert len(warnings) == told
    if told == 2:
        assert f"base of 1e+06 and {target.name} one of {base:g}" in warnings[1]


def test_the_rotary_base_of_a_target(tmp_path: Path) -> None:
    assert rotary_base(tiny_llama(tmp_path / "t.gguf")) == 10000.0
