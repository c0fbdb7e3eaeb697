"""Number formats of tensor data in files: sizes, and exact conversions to and from float32.

In numpy arrays bfloat16 is carried as its raw 16 bits (dtype uint16), because numpy has no
bfloat16; every function of this package reads a uint16 weight array that way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.errors import FileError
from dspine.files.mapped import release
from dspine.ggml.types import all_types

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

Q8_BLOCK = 32
"""Values per Q8_0 block: one float16 scale, then 32 signed bytes."""
_LEAST_SCALE = np.float32(1e-30)
_CHUNK_VALUES = 1 << 22
"""Values converted at a time, so that temporary copies stay near 16 MiB."""


_NOT_WEIGHTS = frozenset({"i8", "i16", "i32", "i64", "f64"})
WEIGHT_TYPES = frozenset(t.name for t in all_types()) - _NOT_WEIGHTS
"""Names of the ggml types that a weight matrix may have."""


def bf16_from_float32(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """float32 -> bfloat16 bits, to nearest with ties to even; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, (bits >> 16) | np.uint32(64), rounded).astype(np.uint16)


def float32_from_bf16(bits: Array) -> Floats:
    """bfloat16 bits (uint16) -> float32, exact."""
    return (np.ascontiguousarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def to_float32(array: Array) -> Floats:
    """A weight array of float64, float32, float16 or bfloat16 bits (uint16) as float32."""
    if array.dtype == np.uint16:
        return float32_from_bf16(array)
    return np.ascontiguousarray(array, dtype=np.float32)


def encode(array: Array, type_name: str, label: str) -> Iterator[memoryview]:
    """The bytes of a weight array (out, in) or (n,) in a ggml type, in chunks of whole rows.

    `type_name` is f32, f16, bf16, q8_0 (row length a multiple of 32), i32 or i64. Raises FileError
    when a value is not finite, or becomes infinite in the smaller format; `label` names the
    tensor in that message.
    """
    if array.dtype.kind not in "fui" or (array.dtype.kind in "ui") != (
        array.dtype == np.uint16 or type_name in ("i32", "i64")
    ):
        raise FileError(
            f"tensor {label} has dtype {array.dtype}: weights are float32, float16 or bfloat16 "
            f"bits in uint16"
        )
    rows = array.reshape(-1, array.shape[-1])
    step = max(1, _CHUNK_VALUES // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        part = rows[start : start + step]
        yield np.ascontiguousarray(_encode_rows(part, type_name, label)).data.cast("B")
        release(part)


def _encode_rows(rows: Array, type_name: str, label: str) -> Array:
    if type_name in ("i32", "i64"):
        return rows.astype("<i4" if type_name == "i32" else "<i8")
    if not np.isfinite(values := to_float32(rows)).all():
        raise FileError(
            f"tensor {label} holds NaN or infinite values and cannot be used: copy or train it "
            "again"
        )
    if type_name == "f32":
        return values.astype("<f4", copy=False)
    if type_name == "bf16":
        # Bits that are bfloat16 already pass through, so conversions are exact.
        bits = rows if rows.dtype == np.uint16 else bf16_from_float32(values)
        if not np.isfinite(float32_from_bf16(bits)).all():
            raise FileError(f"tensor {label} has values too large for bfloat16: use f32")
        return bits.astype("<u2", copy=False)
    if type_name in ("f16", "q8_0"):
        with np.errstate(over="ignore"):
            encoded = values.astype("<f2") if type_name == "f16" else quantise_q8_0(values)
        largest = float(np.abs(values).max(initial=0.0))
        if largest > (65504.0 if type_name == "f16" else 65504.0 * 127):
            raise FileError(
                f"tensor {label} has a value of {largest:.6g}, too large for {type_name}: use bf16"
            )
        return encoded
    raise FileError(f"cannot write tensors of type {type_name}: choose f32, f16, bf16 or q8_0")


def quantise_q8_0(values: Floats) -> Bytes:
    """float32 (rows, n) -> Q8_0 bytes (rows, n / 32 * 34), rounding as ggml's reference does."""
    blocks = values.reshape(-1, Q8_BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    # Scales this small become 0 as float16 anyway, and their inverse would overflow.
    scale[scale < _LEAST_SCALE] = 0
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    scaled = blocks * inverse
    # roundf: halves away from zero, unlike numpy's halves to even.
    whole = np.trunc(scaled)
    whole += np.sign(scaled) * (np.abs(scaled - whole) >= np.float32(0.5))
    out = np.empty((blocks.shape[0], 34), dtype=np.uint8)
    out[:, :2] = scale.astype("<f2").view(np.uint8)
    out[:, 2:] = whole.astype(np.int8).view(np.uint8)
    return out.reshape(values.shape[0], -1)


def decode_rows(raw: Bytes, type_name: str, label: str) -> Floats:
    """Stored rows (rows, row bytes) of any ggml weight type -> float32 (rows, row length).

    f32, f16, bf16, i32, f64 and q8_0 are converted here; for the other quantised types the `gguf`
    package does it. Raises FileError for a type it does not know.
    """
    out: Floats | None = None
    step = max(1, 4 * _CHUNK_VALUES // max(1, raw.shape[1]))
    for start in range(0, raw.shape[0], step):
        part = _decode_chunk(np.ascontiguousarray(raw[start : start + step]), type_name, label)
        if out is None:
            out = np.empty((raw.shape[0], part.shape[1]), dtype=np.float32)
        out[start : start + step] = part
    return np.empty((0, 0), dtype=np.float32) if out is None else out


def _decode_chunk(raw: Bytes, type_name: str, label: str) -> Array:
    if type_name in ("f32", "f16", "i32", "f64"):
        kind = {"f32": "<f4", "f16": "<f2", "i32": "<i4", "f64": "<f8"}[type_name]
        return raw.view(kind)
    if type_name == "bf16":
        return float32_from_bf16(raw.view("<u2"))
    if type_name == "q8_0":
        blocks = raw.reshape(-1, 34)
        scale = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
        return (scale * blocks[:, 2:].view(np.int8)).reshape(raw.shape[0], -1)
    # Imported late: it costs about half a second, and only quantised targets need it.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values: Array = dequantize(raw, GGMLQuantizationType[type_name.upper()])
    except (KeyError, NotImplementedError) as error:
        raise FileError(
            f"tensor {label} has type {type_name}, which cannot be turned into float32 here: "
            f"use a file that stores it in another type"
        ) from error
    return values
