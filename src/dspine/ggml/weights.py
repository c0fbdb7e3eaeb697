"""Named tensors of any ggml type in one buffer of a backend: weights, caches, tables."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.errors import CapacityError, ClosedError, UsageError
from dspine.ggml import kernels
from dspine.ggml.device import Backend
from dspine.ggml.library import InitParams, functions
from dspine.ggml.tensor import Tensor
from dspine.ggml.types import TensorType, type_by_name

_USAGE_WEIGHTS = 1
_NUMPY_TYPES = {
    np.dtype(np.float32): "f32",
    np.dtype(np.float16): "f16",
    np.dtype(np.int32): "i32",
    np.dtype(np.int64): "i64",
}


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor in host memory: raw bytes in ggml's layout of `type`, `ne` in ggml order."""

    type: TensorType
    ne: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        rows = 1
        for n in self.ne[1:]:
            rows *= n
        expected = rows * self.type.row_bytes(self.ne[0])
        if self.data.size != expected:
            raise UsageError(
                f"a {self.type.name} tensor of shape {self.ne} takes {expected} bytes, "
                f"{self.data.size} were given"
            )

    @classmethod
    def from_numpy(cls, array: npt.NDArray[Any]) -> HostTensor:
        """Float32, float16, int32 or int64 array; the last axis becomes `ne[0]`."""
        name = _NUMPY_TYPES.get(array.dtype)
        if name is None:
            raise UsageError(f"arrays of {array.dtype} have no ggml type; use float32 or float16")
        flat = np.ascontiguousarray(array)
        ne = flat.shape[::-1] or (1,)
        return cls(type_by_name(name), ne, flat.reshape(-1).view(np.uint8))

    @classmethod
    def quantised(cls, array: npt.NDArray[np.float32], type_name: str) -> HostTensor:
        """`array` stored as `type_name`; the last axis becomes `ne[0]`."""
        data = quantise(array, type_name)
        return cls(type_by_name(type_name), array.shape[::-1], data.reshape(-1))


def quantise(array: npt.NDArray[np.float32], type_name: str) -> npt.NDArray[np.uint8]:
    """Rows of float32 values as raw bytes of `type_name`: (..., n) -> (rows, bytes of a row)."""
    lib = functions()
    kind = type_by_name(type_name)
    if kind.number not in _QUANTISABLE or lib.ggml_quantize_requires_imatrix(kind.number):
        raise UsageError(f"{kind.name} cannot be made here; use f16, bf16, q8_0, q4_0 or q4_k")
    source = np.ascontiguousarray(array, dtype=np.float32)
    length = source.shape[-1]
    rows = source.size // length
    out = np.empty((rows, kind.row_bytes(length)), dtype=np.uint8)
    lib.ggml_quantize_chunk(kind.number, source.ctypes.data, out.ctypes.data, 0, rows, length, None)
    return out


_QUANTISABLE = frozenset(
    type_by_name(name).number
    for name in (
        *("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"),
        *("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"),
    )
)


class WeightStore:
    """Declare tensors, `allocate()` once, then write them; frees its buffer on close.

    `buffer_type` is another kind of memory that the backend can use, for this package and the
    kernels' own tests: `kernels.installed().buffer_type` holds packed matrices.
    """

    def __init__(
        self, backend: Backend, capacity: int = 256, *, buffer_type: int | None = None
    ) -> None:
        lib = functions()
        self.backend = backend
        self._packed: WeightStore | None = None
        self._buffer_type = backend.buffer_type if buffer_type is None else buffer_type
        self._capacity = capacity
        size = capacity * lib.ggml_tensor_overhead()
        context = lib.ggml_init(InitParams(size, None, True))
        if not context:
            raise CapacityError(
                f"{size} bytes for {capacity} tensor headers are not available: free memory"
            )
        self._context: int = context
        self._free_context = weakref.finalize(self, lib.ggml_free, context)
        self._buffer: int | None = None
        self._free_buffer: Callable[[], Any] | None = None
        self._tensors: dict[str, Tensor] = {}

    @property
    def closed(self) -> bool:
        """True after close()."""
        return not self._free_context.alive

    def declare(
        self, name: str, type_name: str, ne: tuple[int, ...], *, only_product: bool = False
    ) -> Tensor:
        """Add a tensor of shape `ne` (ggml order, 1 to 4 dimensions); usable after allocate().

        `only_product` says that graphs use it as the weight of matmul, itself or as a range of
        its rows, and for nothing else: then it may be packed for the CPU kernels.
        """
        self._check_open()
        if only_product and self._buffer is None and name not in self._tensors:
            packed = self._store_for_products(type_name, ne)
            if packed is not None:
                self._tensors[name] = packed.declare(name, type_name, ne)
                return self._tensors[name]
        if self._buffer is not None:
            raise UsageError(
                f"{name!r} was declared after the store was allocated: declare it before"
            )
        if name in self._tensors:
            raise UsageError(f"{name!r} was declared twice: give it another name")
        if len(self._tensors) >= self._capacity:
            raise UsageError(
                f"the store was made for {self._capacity} tensors, {name!r} is more: raise its "
                "capacity"
            )
        if not 1 <= len(ne) <= 4 or any(n < 1 for n in ne):
            raise UsageError(f"{name!r} has shape {ne}: 1 to 4 positive dimensions are needed")
        kind = type_by_name(type_name)
        kind.row_bytes(ne[0])
        lib = functions()
        dims = np.array(ne, dtype=np.int64)
        pointer = lib.ggml_new_tensor(self._context, kind.number, len(ne), dims.ctypes.data)
        lib.ggml_set_name(pointer, name.encode()[:63])
        tensor = Tensor.wrap(pointer, owner=self)
        self._tensors[name] = tensor
        return tensor

    def allocate(self) -> None:
        """Reserve the memory of everything declared; CapacityError when it does not fit."""
        self._check_open()
        if self._packed is not None:
            self._packed.allocate()
        if self._buffer is not None or all(t.owner is not self for t in self._tensors.values()):
            return
        lib = functions()
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(self._context, self._buffer_type)
        if not buffer:
            need = sum(t.byte_size for t in self._tensors.values())
            raise CapacityError(
                f"{need / 2**20:.1f} MiB of tensors do not fit on {self.backend.device.name}: "
                "free memory there, or use a smaller drafter file (`dspine quantize`)"
            )
        lib.ggml_backend_buffer_set_usage(buffer, _USAGE_WEIGHTS)
        self._buffer = buffer
        self._free_buffer = weakref.finalize(self, lib.ggml_backend_buffer_free, buffer)

    def write(self, name: str, data: npt.NDArray[Any], first_row: int = 0) -> None:
        """Copy raw bytes (or an array of the matching type) into whole rows from `first_row` on."""
        self._check_open()
        tensor = self[name]
        if self._packed is not None and tensor.owner is self._packed:
            self._packed.write(name, data, first_row)
            return
        if self._buffer is None:
            raise UsageError(f"{name!r} was written before allocate(): call allocate() first")
        flat = np.ascontiguousarray(data)
        offset = first_row * tensor.nb[1]
        if offset < 0 or flat.nbytes % tensor.nb[1] or offset + flat.nbytes > tensor.byte_size:
            raise UsageError(
                f"{flat.nbytes} bytes at row {first_row} do not fit {name!r}, which has "
                f"{tensor.byte_size} bytes in rows of {tensor.nb[1]}: write whole rows within it"
            )
        if flat.nbytes:
            functions().ggml_backend_tensor_set(
                tensor.pointer, flat.ctypes.data, offset, flat.nbytes
            )

    def clear(self) -> None:
        """Set every byte to zero."""
        self._check_open()
        if self._buffer is not None:
            functions().ggml_backend_buffer_clear(self._buffer, 0)
        if self._packed is not None:
            self._packed.clear()

    def __getitem__(self, name: str) -> Tensor:
        self._check_open()
        if name not in self._tensors:
            raise UsageError(f"the store has no tensor {name!r}: declare it first")
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def byte_size(self) -> int:
        """Bytes of the buffer, 0 before allocate()."""
        self._check_open()
        size = 0 if self._packed is None else self._packed.byte_size
        if self._buffer is not None:
            size += functions().ggml_backend_buffer_get_size(self._buffer)
        return size

    def close(self) -> None:
        """Free buffer and headers; tensors of this store raise ClosedError from now on."""
        if self._packed is not None:
            self._packed.close()
        if self._free_buffer is not None:
            self._free_buffer()
        self._free_context()

    def _store_for_products(self, type_name: str, ne: tuple[int, ...]) -> WeightStore | None:
        """The part of this store with packed matrices, where the CPU kernels take this one."""
        plug_in = kernels.installed()
        if plug_in is None or self.backend.device.kind != "cpu" or not plug_in.takes(type_name, ne):
            return None
        if self._packed is None:
            self._packed = WeightStore(
                self.backend, self._capacity, buffer_type=plug_in.buffer_type
            )
        return self._packed

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("the weight store was used after it was closed: make a new one")
