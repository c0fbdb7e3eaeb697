"""Drafter GGUFs: exact round trips, sizes, and refusal of everything that does not fit."""

from __future__ import annotations

import math
import resource
import struct
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.errors import FileError, PairError
from dspine.files.drafter_file import read_drafter, write_drafter
from dspine.files.gguf_file import open_tensors, read_header
from dspine.files.gguf_writer import TensorToWrite, WritableValue, write_gguf
from dspine.files.schema import DSpineConfig, Pair, TrainingRecord, default_taps, tensor_specs
from dspine.ggml.types import type_by_name
from tests.support.drafter_files import PAIR, RECORD, SMALL, weights, with_reduced_head

TARGET_27B = DSpineConfig(
    hidden_size=5120,
    intermediate_size=17408,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=248320,
    target_hidden_size=5120,
    block_size=16,
    taps=(1, 16, 31, 46, 61),
    mask_token_id=248070,
    windows=(8192,) * 5,
    causal=(True,) * 5,
    transfer_rank=1024,
    message_size=512,
    rope_theta=1e7,
    max_positions=262144,
)


def test_the_27b_geometry_has_the_published_number_of_parameters() -> None:
    specs = tensor_specs(TARGET_27B)
    parameters = sum(math.prod(spec.shape) for spec in specs)
    assert round(parameters / 1e6, 1) == 2025.4
    # 3 of the backbone, 5 of the injection and the codes, 13 for each of 5 layers... and the
    # flag transfer_ready, which only checkpoint folders carry, make the 74 entries known.
    assert len(specs) == 73
    assert default_taps(64, 5) == TARGET_27B.taps


@pytest.mark.parametrize(
    ("source", "dtype"),
    [("float32", "f32"), ("float16", "f16"), ("bfloat16", "bf16"), ("bfloat16", "f32")],
)
def test_float_formats_come_back_bit_by_bit(tmp_path: Path, source: str, dtype: str) -> None:
    path = tmp_path / "d.gguf"
    given = weights(dtype=source)
    write_drafter(path, SMALL, PAIR, RECORD, given, dtype)
    read = read_drafter(path)
    assert (read.config, read.pair, read.record) == (SMALL, PAIR, RECORD)
    assert read.draft_vocab is None
    assert read.matrix_type == dtype
    back = read.arrays()
    assert list(back) == [spec.torch_name for spec in tensor_specs(SMALL)]
    for spec in tensor_specs(SMALL):
        expected = given[spec.torch_name]
        if not spec.is_matrix or dtype == "f32":
            # Vectors are float32 in the file; widening is exact.
            if source == "bfloat16":
                expected = (expected.astype(np.uint32) << 16).view(np.float32)
            expected = expected.astype(np.float32)
        assert back[spec.torch_name].dtype == expected.dtype
        assert back[spec.torch_name].tobytes() == expected.tobytes(), spec.torch_name


def test_q8_0_with_its_fallback(tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    given = weights()
    write_drafter(path, SMALL, PAIR, RECORD, given, "q8_0")
    read = read_drafter(path)
    for spec in tensor_specs(SMALL):
        stored = read.tensors[spec.gguf_name]
        values: Any = given[spec.torch_name]
        if not spec.is_matrix:
            assert stored.type.name == "f32"
            expected = values
        elif spec.shape[1] == 20:
            assert spec.torch_name.startswith("injection.writes")
            assert stored.type.name == "f16"
            expected = values.astype(np.float16)
        else:
            assert stored.type.name == "q8_0"
            q8 = GGMLQuantizationType.Q8_0
            expected = dequantize(quantize(values, q8), q8)
        assert (stored.as_float32() == expected).all()
    # Read, write again: quantised bytes are copied as they are.
    again = tmp_path / "again.gguf"
    by_torch = {s.torch_name: read.tensors[s.gguf_name] for s in tensor_specs(SMALL)}
    write_drafter(again, SMALL, PAIR, RECORD, by_torch, "q8_0")
    assert again.read_bytes() == path.read_bytes()


def test_keys_are_the_documented_ones(tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    write_drafter(path, SMALL, PAIR, RECORD, weights(), "f16", name="Mine")
    meta = read_header(path).metadata

    def plain(key: str) -> object:
        value = meta[f"dspine.{key}"]
        return value.tolist() if isinstance(value, np.ndarray) else value

    assert meta["general.architecture"] == "dspine"
    assert (meta["general.name"], meta["general.file_type"]) == ("Mine", 1)
    assert plain("target_layers") == [2, 5], "layer id + 1, as in llama.cpp's own files"
    assert plain("attention.causal") == [True, True]
    assert plain("attention.sliding_window") == [0, 24]
    assert plain("attention.key_length") == plain("attention.value_length") == 16
    assert plain("target.vocab_hash") == "ab" * 32
    assert plain("target.thinking") is True
    assert plain("acceptance_curve") == [0.75, 0.5, 0.25, 0.125]
    assert plain("training") == '{"command": "fit", "answers": 12, "curve": [1.5]}'


def test_reduced_head(tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    config = with_reduced_head(size=6)
    write_drafter(path, config, PAIR, RECORD, weights(), "q8_0", [5, 0, 159, 7, 8, 9])
    read = read_drafter(path)
    assert read.config == config
    assert read.draft_vocab is not None
    assert read.draft_vocab.tolist() == [5, 0, 159, 7, 8, 9]
    assert read.draft_vocab.dtype.name == "int32"
    for ids, words in (
        ([1, 2, 3], "3 target ids, expected 6"),
        ([1, 2, 3, 4, 5, 160], "target id 160"),
        ([-1, 2, 3, 4, 5, 6], "target id -1"),
        ([1, 1, 3, 4, 5, 6], "twice"),
        (None, "missing"),
    ):
        with pytest.raises(FileError, match=words):
            write_drafter(tmp_path / "x.gguf", config, PAIR, RECORD, weights(), "f32", ids)
    with pytest.raises(FileError, match="given"):
        write_drafter(tmp_path / "x.gguf", SMALL, PAIR, RECORD, weights(), "f32", [1])


Damage = Callable[[dict[str, WritableValue], dict[str, TensorToWrite]], object]


def _rewrite(source: Path, target: Path, damage: Damage) -> None:
    """Copy a GGUF with some keys or tensors changed."""
    gguf = open_tensors(source)
    keys: dict[str, Any] = {}
    for key, value in gguf.header.metadata.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            keys[key] = value
        else:
            keys[key] = np.uint32(value) if isinstance(value, int) else np.float32(value)
    tensors = {
        t.name: TensorToWrite(t.name, t.type, t.ne, lambda raw=t.raw: [raw.data])  # type: ignore[misc]
        for t in gguf
    }
    damage(keys, tensors)
    write_gguf(target, keys, list(tensors.values()))


def _zeros(name: str, kind: str, ne: tuple[int, ...]) -> TensorToWrite:
    data = bytes(type_by_name(kind).row_bytes(ne[0]) * math.prod(ne[1:]))
    return TensorToWrite(name, type_by_name(kind), ne, lambda: [memoryview(data)])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafter") / "good.gguf"
    write_drafter(path, SMALL, PAIR, RECORD, weights(), "q8_0")
    return path


def test_an_undamaged_copy_loads(good: Path, tmp_path: Path) -> None:
    _rewrite(good, tmp_path / "copy.gguf", lambda keys, tensors: None)
    assert read_drafter(tmp_path / "copy.gguf").config == SMALL


U32 = np.uint32


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda k, t: k.pop("dspine.attention.causal"), "has no dspine.attention.causal"),
        (lambda k, t: k.pop("dspine.attention.sliding_window"), "sliding_window, which must say"),
        (lambda k, t: k.pop("dspine.rope.freq_base"), "has no dspine.rope.freq_base"),
        (lambda k, t: k.pop("dspine.target.vocab_hash"), "has no dspine.target.vocab_hash"),
        (lambda k, t: k.update({"dspine.gate": True}), "does not know .dspine.gate"),
        (lambda k, t: k.update({"dspine.block_size": "5"}), "block_size is '5', expected a whole"),
        (lambda k, t: k.update({"dspine.block_size": U32(1)}), "block_size is 1"),
        (lambda k, t: k.update({"dspine.attention.value_length": U32(8)}), "is 8, expected 16"),
        (
            lambda k, t: k.update({"dspine.attention.causal": True}),
            "causal is True, expected a list",
        ),
        (
            lambda k, t: k.update({"dspine.attention.causal": np.array([True, False])}),
            "causal is false",
        ),
        (
            lambda k, t: k.update({"dspine.attention.sliding_window": np.array([8], U32)}),
            "windows names 1 layers, the drafter has 2",
        ),
        (
            lambda k, t: k.update({"dspine.target_layers": np.array([0, 5], U32)}),
            "layer id . 1",
        ),
        (lambda k, t: k.update({"dspine.target_layers": np.array([2, 9], U32)}), "target layer 8"),
        (lambda k, t: k.update({"dspine.target.vocab_size": U32(161)}), "of 160.*has 161"),
        (lambda k, t: k.update({"dspine.rope.freq_base": np.float32(np.nan)}), "rope_theta nan"),
        (lambda k, t: k.update({"dspine.training": "[1]"}), "JSON object"),
        (lambda k, t: k.update({"dspine.training": "[" * 100000}), "JSON object"),
        (
            lambda k, t: k.update({"dspine.acceptance_curve": np.array([2.0] * 4, np.float32)}),
            "value 2.0",
        ),
        (
            lambda k, t: k.update({"dspine.acceptance_curve": np.array([0.5], np.float32)}),
            "1 values, expected 4",
        ),
        (lambda k, t: k.update({"general.architecture": "llama"}), "it is of architecture 'llama'"),
        (lambda k, t: t.pop("fc.weight"), r"1 missing \(fc.weight\)"),
        (
            lambda k, t: t.update(x=_zeros("blk.9.attn_q.weight", "f32", (4,))),
            r"1 unknown \(blk.9.attn_q.weight\)",
        ),
        (
            lambda k, t: t.update({"fc.weight": _zeros("fc.weight", "f32", (64, 128))}),
            r"fc.weight has shape \(128, 64\), expected \(64, 128\)",
        ),
        (
            lambda k, t: t.update({"fc.weight": _zeros("fc.weight", "i32", (128, 64))}),
            "fc.weight has type i32",
        ),
        (
            lambda k, t: t.update(
                {"output_norm.weight": _zeros("output_norm.weight", "f16", (64,))}
            ),
            "output_norm.weight has type f16, expected f32",
        ),
        (lambda k, t: t.update(d2t=_zeros("d2t", "i64", (6,))), "i32 target ids"),
        (lambda k, t: t.update(d2t=_zeros("d2t", "i32", (6,))), "twice"),
        (lambda k, t: t.update(d2t=_zeros("d2t", "i32", (2,))), "top_k 4 is larger"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    good: Path, tmp_path: Path, damage: Damage, words: str
) -> None:
    path = tmp_path / "bad.gguf"
    _rewrite(good, path, damage)
    with pytest.raises(FileError, match=words) as caught:
        read_drafter(path)
    assert str(path) in str(caught.value)


def _changed(**changes: Any) -> Mapping[str, Any]:
    return {"config": SMALL, "pair": PAIR, "record": RECORD, "tensors": weights()} | changes


def _without(name: str) -> dict[str, Any]:
    made = weights()
    del made[name]
    return made


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (_changed(tensors=_without("fc.weight")), r"1 missing \(fc.weight\)"),
        (_changed(tensors=weights() | {"extra": np.zeros(1)}), r"1 unknown \(extra\)"),
        (
            _changed(tensors=weights() | {"fc.weight": np.zeros((64, 64), np.float32)}),
            r"fc.weight has shape \(64, 64\), expected \(64, 128\)",
        ),
        (
            _changed(tensors=weights() | {"norm.weight": np.full(64, np.nan, np.float32)}),
            "norm.weight holds NaN",
        ),
        (_changed(pair=replace(PAIR, hidden_size=65)), "hidden size of 64"),
        (_changed(pair=replace(PAIR, num_layers=4)), "target layer 4"),
        (_changed(record=TrainingRecord((0.5,))), "1 values, expected 4"),
        (_changed(record=TrainingRecord((), {"x": {1}})), "JSON"),
        (_changed(record=TrainingRecord((), {"x": float("nan")})), "JSON"),
        (_changed(config=replace(SMALL, max_positions=1 << 40)), "max_positions 1099511627776"),
        (_changed(config=replace(SMALL, rope_theta=1e300)), "rope_theta 1e"),
        (_changed(dtype="q4_k"), "unknown drafter dtype 'q4_k'"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, given: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(FileError, match=words):
        write_drafter(tmp_path / "d.gguf", **given)
    assert not list(tmp_path.iterdir())


def test_a_wrong_pair_is_a_pair_error(tmp_path: Path) -> None:
    with pytest.raises(PairError):
        write_drafter(
            tmp_path / "d.gguf", SMALL, replace(PAIR, vocab_size=3), RECORD, weights(), "f32"
        )


def test_existing_files_are_kept_unless_asked(tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    path.write_text("mine")
    with pytest.raises(FileError, match="exists already"):
        write_drafter(path, SMALL, PAIR, RECORD, weights(), "f32")
    assert path.read_text() == "mine"
    write_drafter(path, SMALL, PAIR, RECORD, weights(), "f32", overwrite=True)
    assert read_drafter(path).config == SMALL


def test_a_file_that_outgrows_the_limit_leaves_the_old_one(tmp_path: Path) -> None:
    """The kernel itself refuses the write, as it does on a full disk."""
    path = tmp_path / "d.gguf"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, hard))
    try:
        with pytest.raises(FileError, match=r"d\.gguf: the file would be larger"):
            write_drafter(path, SMALL, PAIR, RECORD, weights(), "f32", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["d.gguf"]


def test_a_drafter_of_25_mb_opens_fast(tmp_path: Path) -> None:
    """Nothing is read but the header; the bytes stay mapped."""
    config = replace(SMALL, vocab_size=24576, mask_token_id=0, transfer_rank=32, top_k=16)
    config = replace(config, intermediate_size=64000)
    specs = tensor_specs(config)
    path = tmp_path / "big.gguf"
    zeros = {s.torch_name: np.zeros(s.shape, np.float32) for s in specs}
    write_drafter(path, config, replace(PAIR, vocab_size=24576), RECORD, zeros, "q8_0")
    assert path.stat().st_size > 25e6
    read_drafter(path)
    times = []
    for _ in range(5):
        start = time.thread_time()  # of the processor: other programs take none of it
        read_drafter(path)
        times.append(time.thread_time() - start)
    assert min(times) < 0.05
    tracemalloc.start()
    try:
        read_drafter(path)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1e6, "bytes of tensors were copied"
    assert not next(iter(read_drafter(path).tensors.values())).raw.flags.owndata


def test_pair_names_with_control_characters_are_made_harmless(tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    pair = Pair(**{**{f: getattr(PAIR, f) for f in Pair.__slots__}, "name": "a\x1b[31m\nb"})
    write_drafter(path, SMALL, pair, RECORD, weights(), "f32")
    read = read_drafter(path).pair
    assert read is not None and read.name == "a [31m b"


@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4),
    number=st.sampled_from([None, 0, 1 << 31, (1 << 32) - 1]),
)
def test_mutated_drafters_never_crash(
    good: Path, changes: list[tuple[float, int]], number: int | None
) -> None:
    data = bytearray(good.read_bytes())
    header_size = open_tensors(good).header.data_offset
    for place, value in changes:
        data[int(place * (header_size - 1))] = value
    if number is not None:
        place = int(changes[0][0] * (header_size - 4))
        data[place : place + 4] = struct.pack("<I", number)
    path = good.with_name("mutated.gguf")
    path.write_bytes(bytes(data))
    try:
        read = read_drafter(path)
    except FileError as error:
        message = str(error)
    else:
        assert read.pair is not None
        message = read.pair.name
    assert message.isprintable()
