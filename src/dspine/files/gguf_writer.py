"""Writing GGUF files (version 3) in one pass, tensor by tensor, without holding them in memory."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dspine.errors import FileError
from dspine.files.atomic import atomic_write
from dspine.files.gguf_file import DEFAULT_ALIGNMENT, MAGIC
from dspine.ggml.types import TensorType

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes of tensor data written, bytes in total)."""

WritableValue: TypeAlias = bool | str | np.generic | npt.NDArray[Any] | Sequence[str]
"""Numbers come as numpy scalars or arrays, because GGUF stores their exact width."""

_CODES: Mapping[str, int] = {
    "u1": 0,
    "i1": 1,
    "u2": 2,
    "i2": 3,
    "u4": 4,
    "i4": 5,
    "f4": 6,
    "b1": 7,
    "u8": 10,
    "i8": 11,
    "f8": 12,
}
_STRING, _ARRAY, _BOOL = 8, 9, 7


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor whose bytes are made only when it is their turn."""

    name: str
    type: TensorType
    ne: tuple[int, ...]
    """ggml order: row length first."""
    chunks: Callable[[], Iterable[memoryview]]

    @property
    def n_bytes(self) -> int:
        """Bytes of the stored data."""
        return self.type.row_bytes(self.ne[0]) * math.prod(self.ne[1:])


def write_gguf(
    path: Path,
    metadata: Mapping[str, WritableValue],
    tensors: Sequence[TensorToWrite],
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a GGUF through a temporary file, so that `path` never shows half a file.

    Raises FileError when `path` exists (without `overwrite`), cannot be written, or the disk is
    full.
    """
    parts = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [_text(key), _value(value)]
    offset = 0
    for tensor in tensors:
        parts.append(_text(tensor.name))
        parts.append(struct.pack(f"<I{len(tensor.ne)}Q", len(tensor.ne), *tensor.ne))
        parts.append(struct.pack("<IQ", tensor.type.number, offset))
        offset += _padded(tensor.n_bytes)
    header = b"".join(parts)
    total = sum(t.n_bytes for t in tensors)
    done = 0
    with atomic_write(path, overwrite=overwrite) as stream:
        stream.write(header + bytes(_padded(len(header)) - len(header)))
        for tensor in tensors:
            before = done
            for chunk in tensor.chunks():
                stream.write(chunk)
                done += chunk.nbytes
                if progress is not None:
                    progress(done, total)
            if done - before != tensor.n_bytes:
                raise FileError(
                    f"tensor {tensor.name} gave {done - before} bytes, its shape needs "
                    f"{tensor.n_bytes}: nothing was written"
                )
            stream.write(bytes(_padded(tensor.n_bytes) - tensor.n_bytes))


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: WritableValue) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, np.generic | np.ndarray):
        array = np.asarray(value)
        little = array.astype(array.dtype.newbyteorder("<"))
        code = _CODES[f"{array.dtype.kind}{array.dtype.itemsize}"]
        if array.ndim == 0:
            return struct.pack("<I", code) + little.tobytes()
        return struct.pack("<IIQ", _ARRAY, code, array.size) + little.tobytes()
    return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
