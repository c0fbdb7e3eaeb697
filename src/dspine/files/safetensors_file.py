"""Safetensors files with numpy: mapped reading, atomic writing.

Layout: header length (8 bytes, little endian), a JSON header with dtype, shape and byte range of
every tensor, then the data. bfloat16 is carried as its raw bits in uint16 arrays.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dspine.errors import FileError
from dspine.files.atomic import atomic_write
from dspine.files.dtypes import Array
from dspine.files.mapped import map_file, release, shown

_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype.newbyteorder("<"): name for name, dtype in _DTYPES.items() if name != "U16"}
_METADATA = "__metadata__"
_MAX_HEADER = 100_000_000
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """One tensor: its safetensors dtype name and its values (bfloat16 as uint16 bits)."""

    dtype: str
    data: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """PyTorch order."""
        return tuple(self.data.shape)


@dataclass(frozen=True, slots=True)
class TensorStream:
    """A tensor to write whose bytes are made only when it is their turn."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[memoryview]]

    @property
    def n_bytes(self) -> int:
        """Bytes of the stored data."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A mapped file: tensors in header order, and the text metadata."""

    path: Path
    tensors: Mapping[str, SafeTensor]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def arrays(self) -> dict[str, Array]:
        """The values alone, by name."""
        return {name: tensor.data for name, tensor in self.tensors.items()}


def read_safetensors(path: Path, *, private: bool = False) -> SafetensorsFile:
    """Map a safetensors file without copying; raises FileError for any damage.

    With `private` the arrays may be written to without changing the file.
    """
    data = map_file(path, private=private)
    if len(data) < 8:
        raise _damaged(path, f"it has only {len(data)} bytes")
    length = struct.unpack_from("<Q", data)[0]
    if not 2 <= length <= min(_MAX_HEADER, len(data) - 8):
        raise FileError(
            f"{path} is not a safetensors file, or is cut off: its header claims {length} bytes "
            f"of {len(data) - 8}; copy or download it again"
        )
    header = _parse(path, data[8 : 8 + length])
    start = 8 + length
    texts = header.pop(_METADATA, {})
    if not isinstance(texts, dict) or not all(isinstance(v, str) for v in texts.values()):
        raise _damaged(path, "its metadata is not a table of texts")
    tensors: dict[str, SafeTensor] = {}
    ranges: list[tuple[int, int]] = []
    for name, entry in header.items():
        dtype, shape, first, last = _entry(path, name, entry, len(data) - start)
        ranges.append((first, last))
        count = math.prod(shape)
        values = np.frombuffer(data, dtype=_DTYPES[dtype], count=count, offset=start + first)
        tensors[name] = SafeTensor(dtype, values.reshape(shape))
    end = 0
    for first, last in sorted(ranges):
        if first != end:
            raise _damaged(path, f"its tensors overlap or leave a gap near data byte {first}")
        end = last
    if end != len(data) - start:
        raise _damaged(path, f"its tensors end at data byte {end} of {len(data) - start}")
    return SafetensorsFile(path, tensors, texts)


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Array | SafeTensor | TensorStream],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a safetensors file atomically, tensors in the given order.

    uint16 arrays are stored as BF16 (wrap other 16-bit counts in `SafeTensor("U16", ...)`).
    `progress` gets (bytes of tensor data written, bytes in total).
    Raises FileError for unknown dtypes and when the file cannot be written.
    """
    header: dict[str, object] = {}
    if metadata:
        header[_METADATA] = dict(metadata)
    streams: list[TensorStream] = []
    offset = 0
    for name, tensor in tensors.items():
        stream = tensor if isinstance(tensor, TensorStream) else _stream(name, tensor)
        if name == _METADATA:
            raise FileError(
                f"no tensor can be called {name} in safetensors, which keeps that for texts: "
                "choose another name"
            )
        end = offset + stream.n_bytes
        header[name] = {
            "dtype": stream.dtype,
            "shape": list(stream.shape),
            "data_offsets": [offset, end],
        }
        streams.append(stream)
        offset = end
    raw = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # The data must start at a multiple of 8; readers accept trailing spaces in the header.
    raw += b" " * (-len(raw) % 8)
    total, done = offset, 0
    with atomic_write(path, overwrite=overwrite) as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for stream in streams:
            before = done
            for chunk in stream.chunks():
                file.write(chunk)
                done += chunk.nbytes
                if progress is not None:
                    progress(done, total)
            if done - before != stream.n_bytes:
                raise FileError(
                    f"a tensor of shape {stream.shape} gave {done - before} bytes: "
                    f"nothing was written"
                )


def _stream(name: str, tensor: Array | SafeTensor) -> TensorStream:
    entry = tensor if isinstance(tensor, SafeTensor) else _tagged(name, tensor)
    known = _DTYPES.get(entry.dtype)
    # None must not reach the comparison: numpy takes it for float64.
    if known is None or known != entry.data.dtype.newbyteorder("<"):
        raise FileError(
            f"tensor {name} cannot be stored as {entry.dtype} in safetensors: use BF16, F16 or F32"
        )
    return TensorStream(entry.dtype, entry.shape, partial(_pieces, entry.data))


def _pieces(array: Array) -> Iterator[memoryview]:
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
    step = max(1, _CHUNK // flat.itemsize)
    for first in range(0, flat.size, step):
        part = flat[first : first + step]
        yield part.view(np.uint8).data
        release(part)


def _tagged(name: str, array: Array) -> SafeTensor:
    dtype = _NAMES.get(array.dtype.newbyteorder("<"))
    if dtype is None:
        raise FileError(
            f"tensor {name} has dtype {array.dtype}, which safetensors cannot hold: use float32 "
            "or float16"
        )
    return SafeTensor(dtype, array)


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise _damaged(path, "a name appears twice in its header")
        return table

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "its header is not valid JSON") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not a table")
    return header


def _entry(path: Path, name: str, entry: object, room: int) -> tuple[str, list[int], int, int]:
    """Check one header entry; returns dtype, shape, and its byte range within the data."""
    if not isinstance(entry, dict):
        raise _damaged(path, f"tensor {shown(name)} is not described")
    dtype = entry.get("dtype")
    shape, offsets = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise FileError(
            f"{path}: tensor {shown(name)} has dtype {shown(repr(dtype))}, which is not "
            "supported: use a file with BF16, F16 or F32"
        )
    if shape is None or offsets is None or len(offsets) != 2:
        raise _damaged(
            path, f"the shape or place of tensor {shown(name)} is no list of whole numbers"
        )
    first, last = offsets
    if len(shape) > 8 or last - first != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise _damaged(path, f"tensor {shown(name)} has shape {shape[:9]} but {last - first} bytes")
    # numpy refuses sides whose product overflows even where another side is 0.
    if math.prod(n for n in shape if n) >= 1 << 60:
        raise _damaged(path, f"tensor {shown(name)} has sides that no file holds")
    if last > room:
        raise _damaged(path, f"tensor {shown(name)} lies outside the file, which is cut off")
    return dtype, shape, first, last


def _counts(value: object) -> list[int] | None:
    """The value if it is a list of whole numbers from 0, else None."""
    if isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value):
        return value
    return None


def _damaged(path: Path, what: str) -> FileError:
    return FileError(f"{path} is damaged: {shown(what)}; copy or download it again")
