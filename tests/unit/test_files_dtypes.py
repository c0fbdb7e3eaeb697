"""Number formats: hand-computed roundings, and the gguf package as an independent oracle."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from dspine.errors import FileError
from dspine.files.dtypes import (
    bf16_from_float32,
    decode_rows,
    encode,
    float32_from_bf16,
    quantise_q8_0,
)


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        # 1 + 2^-8 lies halfway between 1 and 1 + 2^-7: ties go to the even mantissa.
        (1.0 + 2.0**-8, 0x3F80),
        (1.0 + 3 * 2.0**-8, 0x3F82),
        (1.0 + 2.0**-8 + 2.0**-20, 0x3F81),
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (float("inf"), 0x7F80),
    ],
)
def test_bfloat16_rounds_to_nearest_with_ties_to_even(value: float, bits: int) -> None:
    assert bf16_from_float32(np.array([value], np.float32)).tolist() == [bits]


def test_a_nan_stays_a_nan_in_bfloat16() -> None:
    # All mantissa bits set: plain rounding would carry into the sign and give -0.
    nan = np.array([0x7FFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(float32_from_bf16(bf16_from_float32(nan))).all()


def test_every_bfloat16_survives_the_way_through_float32() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    is_nan = (bits & 0x7FFF) > 0x7F80
    assert (bf16_from_float32(float32_from_bf16(bits)) == bits)[~is_nan].all()


def test_q8_0_blocks_by_hand() -> None:
    # Largest value 127: scale exactly 1, halves go away from zero.
    row = np.zeros((1, 32), np.float32)
    row[0, :5] = (127.0, 0.5, -0.5, 1.5, -2.5)
    raw = quantise_q8_0(row)
    assert raw[0, :2].view("<f2")[0] == 1.0
    assert raw[0, 2:7].view(np.int8).tolist() == [127, 1, -1, 2, -3]
    assert not raw[0, 7:].any()


def test_a_q8_0_block_of_zeros_has_scale_zero() -> None:
    assert not quantise_q8_0(np.zeros((2, 64), np.float32)).any()
    assert not quantise_q8_0(np.full((1, 32), 1e-44, np.float32)).any()


def test_q8_0_equals_the_gguf_package_byte_by_byte() -> None:
    values = np.random.default_rng(1).normal(0, 3, (40, 96)).astype(np.float32)
    assert (quantise_q8_0(values) == quantize(values, GGMLQuantizationType.Q8_0)).all()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "F16", "BF16"])
def test_decoding_equals_the_gguf_package(name: str) -> None:
    values = np.random.default_rng(2).normal(0, 3, (6, 64)).astype(np.float32)
    kind = GGMLQuantizationType[name]
    stored = quantize(values, kind)
    raw = stored.view(np.uint8).reshape(6, -1)
    expected = dequantize(stored, kind)
    assert (decode_rows(raw, name.lower(), "w") == expected).all()


def test_encoding_goes_in_chunks_of_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspine.files.dtypes._CHUNK_VALUES", 64)
    values = np.random.default_rng(4).normal(0, 1, (7, 32)).astype(np.float32)
    chunks = list(encode(values, "q8_0", "w"))
    assert [c.nbytes for c in chunks] == [68, 68, 68, 34]
    assert b"".join(chunks) == quantise_q8_0(values).tobytes()
    raw = np.frombuffer(b"".join(chunks), np.uint8).reshape(7, 34)
    assert (decode_rows(raw, "q8_0", "w") == decode_rows(raw[3:4], "q8_0", "w")[0]).all(1)[3]


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (np.nan, "f32", "NaN"),
        (np.inf, "q8_0", "infinite"),
        (70000.0, "f16", "70000"),
        (1e30, "q8_0", "1e+30"),
        (3.4e38, "bf16", "bfloat16"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_their_tensor(
    value: float, kind: str, words: str
) -> None:
    array = np.zeros((2, 32), np.float32)
    array[1, 3] = value
    with pytest.raises(FileError, match=r"layers\.0\.w") as caught:
        list(encode(array, kind, "layers.0.w"))
    assert words in str(caught.value)


def test_integers_are_no_weights() -> None:
    with pytest.raises(FileError, match="int32"):
        list(encode(np.zeros((2, 32), np.int32), "f32", "w"))
    with pytest.raises(FileError, match="float32"):
        list(encode(np.zeros(4, np.float32), "i32", "d2t"))
