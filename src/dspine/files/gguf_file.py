"""Reading GGUF files: a header reader that survives damage, and mapped tensor data.

Layout (little endian): magic, version, tensor count, pair count, the key/value pairs, the
tensor list, padding, tensor data. Every count and length is checked against the bytes that are
left before anything is allocated, so a damaged file ends in one FileError.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dspine.errors import FileError
from dspine.files.dtypes import Bytes, Floats, decode_rows
from dspine.files.mapped import map_file, shown
from dspine.files.split import split_names
from dspine.ggml.types import TensorType, all_types

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4
_MAX_NAME = 63
_MAX_KEY = 65535
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_TYPES = {t.number: t for t in all_types()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_LEAST_PAIR = 8 + 1 + 4 + 1
_LEAST_TENSOR = 8 + 1 + 4 + 4 + 8

MetadataValue: TypeAlias = bool | int | float | str | tuple[str, ...] | npt.NDArray[Any]
"""A scalar, an array of numbers or booleans (numpy), or an array of strings (tuple)."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies in its file. `ne` is in ggml order: the row length first."""

    name: str
    type: TensorType
    ne: tuple[int, ...]
    offset: int
    """Absolute, in bytes from the start of the file."""
    n_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """PyTorch order: (out, in) for a matrix."""
        return tuple(reversed(self.ne))

    @property
    def n_elements(self) -> int:
        """Number of values."""
        return math.prod(self.ne)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything a GGUF says before its tensor data."""

    path: Path
    version: int
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorInfo]
    alignment: int
    data_offset: int
    size_bytes: int

    @property
    def architecture(self) -> str:
        """`general.architecture`, or an empty string when the file does not say."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as stored: raw bytes mapped from the file, with type and shape.

    `raw` is read-only and keeps the file mapped as long as it is referenced.
    """

    name: str
    type: TensorType
    ne: tuple[int, ...]
    raw: Bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """PyTorch order: (out, in) for a matrix."""
        return tuple(reversed(self.ne))

    def raw_rows(self) -> Bytes:
        """The bytes as (rows, bytes of one row); a vector is one row."""
        width = self.type.row_bytes(self.ne[0])
        return self.raw.reshape(math.prod(self.ne[1:]), width)

    def as_float32(self, rows: npt.NDArray[np.integer[Any]] | slice | None = None) -> Floats:
        """The values as float32 in PyTorch order.

        With `rows` (of a matrix) only those rows are converted, in that order, and the result
        is (number of rows, row length).
        """
        if rows is None:
            return decode_rows(self.raw_rows(), self.type.name, self.name).reshape(self.shape)
        return decode_rows(self.raw_rows()[rows], self.type.name, self.name)


class GgufFile:
    """A mapped GGUF: its header and, by name, its tensors without copying."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        self.header = _read(path, self._map)

    def tensor(self, name: str) -> StoredTensor:
        """The tensor of that name; FileError when the file does not have it."""
        info = self.header.tensors.get(name)
        if info is None:
            raise FileError(
                f"{self.path} has no tensor {name}: it is not the file needed here, name the "
                "model's complete file"
            )
        raw = np.frombuffer(self._map, dtype=np.uint8, count=info.n_bytes, offset=info.offset)
        return StoredTensor(info.name, info.type, info.ne, raw)

    def __iter__(self) -> Iterator[StoredTensor]:
        for name in self.header.tensors:
            yield self.tensor(name)


def is_gguf(path: Path) -> bool:
    """Whether the file starts like a GGUF; False when it cannot be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> GgufHeader:
    """Read and check a GGUF's header; raises FileError for any damage."""
    return _read(path, map_file(path))


def open_tensors(path: Path) -> GgufFile:
    """Map a GGUF for reading its tensors; raises FileError for any damage."""
    return GgufFile(path)


def find_tensor(path: Path, name: str) -> StoredTensor | None:
    """A tensor of a GGUF or of the part that holds it when the model is split into files;
    None when no part has it."""
    for part in split_files(path):
        gguf = GgufFile(part)
        if name in gguf.header.tensors:
            return gguf.tensor(name)
    return None


def raw_tensor(path: Path, name: str) -> StoredTensor:
    """One tensor's raw bytes, ggml type and shape from any GGUF (split models too)."""
    tensor = find_tensor(path, name)
    if tensor is None:
        raise FileError(
            f"{path} has no tensor {name}: it is not the file needed here, name the model's "
            "complete file"
        )
    return tensor


def dequantised_tensor(path: Path, name: str) -> Floats:
    """One tensor of any GGUF as float32, (out, in) for a matrix."""
    return raw_tensor(path, name).as_float32()


def split_files(path: Path) -> tuple[Path, ...]:
    """The files of a model that was split (`name-00001-of-00003.gguf`), else the file itself.

    The given file comes first. Raises FileError when a part is missing.
    """
    names = split_names(path.name)
    others = [path.with_name(n) for n in names if n != path.name]
    missing = next((p for p in others if not p.exists()), None)
    if missing is not None:
        raise FileError(f"{missing} is missing: {path} is one of {len(names)} parts of one model")
    return (path, *others)


def _read(path: Path, data: mmap.mmap) -> GgufHeader:
    return _HeaderReader(path, data).read()


class _HeaderReader:
    """A cursor over the header in which no read can pass the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def read(self) -> GgufHeader:
        if self._data[: len(MAGIC)] != MAGIC:
            begins = bytes(self._data[: len(MAGIC)]).hex(" ") or "nothing"
            raise FileError(
                f"{self._path} is not a GGUF file (it begins with {begins}, not with "
                f"{MAGIC.hex(' ')}): choose a .gguf file"
            )
        self._at = len(MAGIC)
        version = self._u32()
        if version not in VERSIONS:
            raise FileError(self._version_problem(version))
        n_tensors = self._count("tensors", _LEAST_TENSOR)
        n_pairs = self._count("metadata keys", _LEAST_PAIR)
        metadata: dict[str, MetadataValue] = {}
        for _ in range(n_pairs):
            key = self._name("metadata key", _MAX_KEY)
            if key in metadata:
                raise self._damaged(f"metadata key {key} appears twice")
            metadata[key] = self._value(key, self._u32())
        alignment = self._alignment(metadata)
        infos = [self._tensor_info() for _ in range(n_tensors)]
        data_offset = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in infos:
            if info.name in tensors:
                raise self._damaged(f"tensor {info.name} appears twice")
            tensors[info.name] = self._placed(info, data_offset, alignment)
        self._refuse_overlap(tensors)
        return GgufHeader(
            self._path,
            version,
            MappingProxyType(metadata),
            MappingProxyType(tensors),
            alignment,
            data_offset,
            self._size,
        )

    def _damaged(self, what: str) -> FileError:
        return FileError(
            f"{self._path} is damaged: {shown(what)} (near byte {min(self._at, self._size)} of "
            f"{self._size}); copy or download it again"
        )

    def _version_problem(self, version: int) -> str:
        if version & 0xFFFF == 0 and version:
            return f"{self._path} is a big-endian GGUF: convert it for little-endian machines"
        if version == 1:
            return f"{self._path} is GGUF version 1, which is outdated: convert the model again"
        return (
            f"{self._path} says GGUF version {version}, known are {VERSIONS[0]} and "
            f"{VERSIONS[1]}: the file is damaged or needs a newer dspine"
        )

    def _need(self, n_bytes: int, what: str) -> int:
        """Reserve bytes at the cursor; returns where they start."""
        start = self._at
        if n_bytes > self._size - start:
            raise self._damaged(f"it ends inside {what}")
        self._at = start + n_bytes
        return start

    def _u32(self) -> int:
        return int(_U32.unpack_from(self._data, self._need(4, "its header"))[0])

    def _u64(self) -> int:
        return int(_U64.unpack_from(self._data, self._need(8, "its header"))[0])

    def _count(self, what: str, least_bytes: int) -> int:
        count = self._u64()
        if count > (self._size - self._at) // least_bytes:
            raise self._damaged(f"it claims {count} {what}, more than the file can hold")
        return count

    def _text(self, what: str) -> bytes:
        length = self._u64()
        start = self._need(length, f"{what} of {length} bytes")
        return self._data[start : start + length]

    def _name(self, what: str, longest: int) -> str:
        raw = self._text(f"a {what}")
        if not 0 < len(raw) <= longest:
            raise self._damaged(f"a {what} is {len(raw)} bytes long, allowed are 1 to {longest}")
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"a {what} is not valid UTF-8") from error
        if not name.isprintable():
            raise self._damaged(f"a {what} has control characters")
        return name

    def _value(self, key: str, kind: int) -> MetadataValue:
        if kind == _STRING:
            try:
                return self._text(f"the text of {key}").decode("utf-8")
            except UnicodeDecodeError as error:
                raise self._damaged(f"the text of {key} is not valid UTF-8") from error
        if kind == _ARRAY:
            return self._array(key, self._u32())
        value: bool | int | float = self._numbers(key, kind, 1)[0].item()
        return value

    def _array(self, key: str, kind: int) -> MetadataValue:
        count = self._u64()
        if kind == _STRING:
            return self._strings(key, count)
        if kind == _ARRAY:
            raise self._damaged(f"{key} is an array of arrays, which GGUF readers do not accept")
        return self._numbers(key, kind, count)

    def _numbers(self, key: str, kind: int, count: int) -> npt.NDArray[Any]:
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            raise self._damaged(f"{key} has the unknown value type {kind}")
        start = self._need(count * dtype.itemsize, f"{count} values of {key}")
        if kind == _BOOL:
            raw = np.frombuffer(self._data, dtype=np.uint8, count=count, offset=start)
            if raw.max(initial=0) > 1:
                raise self._damaged(f"{key} is neither true nor false")
        # A copy, so that small values do not keep the whole file mapped.
        return np.frombuffer(self._data, dtype=dtype, count=count, offset=start).copy()

    def _strings(self, key: str, count: int) -> tuple[str, ...]:
        if count > (self._size - self._at) // 8:
            raise self._damaged(f"{key} claims {count} texts, more than the file can hold")
        data, end, at, unpack = self._data, self._size, self._at, _U64.unpack_from
        texts: list[str] = []
        for _ in range(count):
            start = at + 8
            if start > end:
                raise self._damaged(f"it ends inside {key}")
            at = start + unpack(data, at)[0]
            if at > end:
                raise self._damaged(f"it ends inside a text of {key}")
            # Single tokens need not be valid UTF-8; surrogates keep their bytes.
            texts.append(data[start:at].decode("utf-8", "surrogateescape"))
        self._at = at
        return tuple(texts)

    def _alignment(self, metadata: Mapping[str, MetadataValue]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not 0 < value <= _MAX_ALIGNMENT
            or value & (value - 1)
        ):
            raise self._damaged("general.alignment is not a power of two")
        return value

    def _tensor_info(self) -> TensorInfo:
        """One entry of the tensor list, its offset still relative to the data."""
        name = self._name("tensor name", _MAX_NAME)
        n_dims = self._u32()
        if n_dims > _MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {n_dims} dimensions, allowed are 4")
        ne = tuple(self._u64() for _ in range(n_dims)) or (1,)
        if 0 in ne:
            raise self._damaged(f"tensor {name} has no values")
        type_id, offset = self._u32(), self._u64()
        kind = _TYPES.get(type_id)
        if kind is None:
            raise self._damaged(f"tensor {name} has the unknown type {type_id}")
        if ne[0] % kind.block:
            raise self._damaged(
                f"tensor {name} has rows of {ne[0]} values, not a multiple of {kind.name}'s "
                f"{kind.block}"
            )
        n_bytes = kind.row_bytes(ne[0]) * math.prod(ne[1:])
        return TensorInfo(name, kind, ne, offset, n_bytes)

    def _placed(self, info: TensorInfo, data_offset: int, alignment: int) -> TensorInfo:
        if info.offset % alignment:
            raise self._damaged(f"tensor {info.name} is not aligned to {alignment} bytes")
        if data_offset + info.offset + info.n_bytes > self._size:
            raise self._damaged(
                f"tensor {info.name} with {info.n_bytes} bytes lies outside the file, which is "
                f"cut off or incomplete"
            )
        return TensorInfo(info.name, info.type, info.ne, data_offset + info.offset, info.n_bytes)

    def _refuse_overlap(self, tensors: Mapping[str, TensorInfo]) -> None:
        end, before = 0, ""
        for info in sorted(tensors.values(), key=lambda t: (t.offset, t.n_bytes)):
            if info.offset < end:
                raise self._damaged(f"tensors {before} and {info.name} overlap")
            end, before = info.offset + info.n_bytes, info.name
