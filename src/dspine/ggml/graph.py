"""A ggml graph: built once, allocated once, computed many times with changed inputs."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dspine.errors import CapacityError, ClosedError, LibraryError, UsageError
from dspine.ggml.device import Backend
from dspine.ggml.library import CTensor, InitParams, functions
from dspine.ggml.operations import Operations
from dspine.ggml.tensor import Owner, Tensor
from dspine.ggml.types import type_by_name

_DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
}


@dataclass(frozen=True, slots=True)
class Bound:
    """The values of one input or result, in `array` of shape reversed(ne), for graphs that run
    often: on the CPU this is the tensor's own memory, elsewhere `push` and `pull` copy it.
    """

    array: npt.NDArray[Any]
    push: Callable[[], None]
    """After writing to an input, before `compute`."""
    pull: Callable[[], None]
    """After `compute`, before reading a result, which the next run writes over."""


class Graph(Operations):
    """Build with the operations, mark results with `output`, then `allocate`, `set`, `compute`,
    `get`. Shapes of numpy arrays are the reverse of `ne`.
    """

    def __init__(self, backend: Backend, max_nodes: int = 512) -> None:
        lib = functions()
        self.backend = backend
        size = max_nodes * lib.ggml_tensor_overhead() + lib.ggml_graph_overhead_custom(
            max_nodes, False
        )
        context = lib.ggml_init(InitParams(size, None, True))
        if not context:
            raise CapacityError(
                f"{size} bytes for a graph of {max_nodes} nodes are not available: free memory or "
                "make a smaller graph"
            )
        self._context_pointer = context
        self._room = max_nodes
        self._owners: dict[int, Owner] = {}
        self._inputs: list[Tensor] = []
        self._unset: set[int] = set()
        self._free_context = weakref.finalize(self, lib.ggml_free, context)
        self._graph: int = lib.ggml_new_graph_custom(context, max_nodes, False)
        allocator = lib.ggml_gallocr_new(backend.buffer_type)
        self._allocator: int = allocator
        self._free_allocator = weakref.finalize(self, lib.ggml_gallocr_free, allocator)
        self._compute = lib.ggml_backend_graph_compute
        self._tensor_set = lib.ggml_backend_tensor_set
        self._tensor_get = lib.ggml_backend_tensor_get
        self._allocated = False

    @property
    def closed(self) -> bool:
        """True after close()."""
        return not self._free_context.alive

    def input(self, name: str, type_name: str, ne: Sequence[int]) -> Tensor:
        """A tensor to be filled with `set` before the first compute."""
        self._check_building()
        if not 1 <= len(ne) <= 4 or any(n < 1 for n in ne):
            raise UsageError(f"input {name!r} has shape {tuple(ne)}: it must be positive")
        kind = type_by_name(type_name)
        kind.row_bytes(ne[0])
        lib = functions()
        dims = np.array(ne, dtype=np.int64)
        pointer = lib.ggml_new_tensor(self._open_context(), kind.number, len(ne), dims.ctypes.data)
        lib.ggml_set_name(pointer, name.encode()[:63])
        lib.ggml_set_input(pointer)
        # Else its memory would be reused once it was read, and the next compute see other data.
        lib.ggml_set_output(pointer)
        tensor = Tensor.wrap(pointer, self, self)
        self._inputs.append(tensor)
        self._unset.add(pointer)
        return tensor

    def output(self, tensor: Tensor, name: str) -> Tensor:
        """Keep the result of `tensor` for `get`, under `name`."""
        self._check_building()
        if tensor.owner is not self:
            raise UsageError(
                f"output {name!r} is not a node of this graph: give one that this graph made"
            )
        lib = functions()
        lib.ggml_set_name(tensor.pointer, name.encode()[:63])
        lib.ggml_set_output(tensor.pointer)
        return self.expand(Tensor.wrap(tensor.pointer, self, self))

    def expand(self, tensor: Tensor) -> Tensor:
        """Add everything that `tensor` depends on. Nodes run in the order they were expanded, so
        a write into a cache must be expanded before what reads the cache is.
        """
        self._check_building()
        functions().ggml_build_forward_expand(self._graph, tensor.pointer)
        return tensor

    def allocate(self) -> None:
        """Reserve memory for inputs and results; raises LibraryError for operations the device
        cannot run, CapacityError when memory is short.
        """
        self._check_building()
        lib = functions()
        self._check_supported()
        for tensor in self._inputs:
            # Inputs nobody uses would stay without memory and make `set` fail.
            lib.ggml_build_forward_expand(self._graph, tensor.pointer)
        if not lib.ggml_gallocr_alloc_graph(self._allocator, self._graph):
            raise CapacityError(
                f"the graph does not fit on {self.backend.device.name}: free memory there, or "
                "draft with shorter blocks"
            )
        self._allocated = True

    def set(self, tensor: Tensor, values: npt.NDArray[Any]) -> None:
        """Fill an input with an array of its type and size; it keeps its values until set again."""
        self._check_ready(tensor)
        if (
            values.dtype != _DTYPES.get(tensor.type.name)
            or values.size != tensor.size
            or not values.flags.c_contiguous
        ):
            raise UsageError(
                f"input {tensor.name!r} takes {tensor.size} contiguous {tensor.type.name} values, "
                f"not {values.dtype} of shape {values.shape}: convert them first"
            )
        self._unset.discard(tensor.pointer)
        self._tensor_set(tensor.pointer, values.ctypes.data, 0, values.nbytes)

    def bind(self, tensor: Tensor) -> Bound:
        """A lasting array for an input, zero at first, or a result; valid until `close`."""
        self._check_ready(tensor)
        dtype = _readable(tensor)
        self._unset.discard(tensor.pointer)
        raw, shape = CTensor.from_address(tensor.pointer), tensor.ne[::-1]
        lib = functions()
        if lib.ggml_backend_buft_is_host(lib.ggml_backend_buffer_get_type(raw.buffer)):
            memory: Any = (ctypes.c_char * (tensor.size * dtype.itemsize)).from_address(raw.data)
            array = np.frombuffer(memory, dtype).reshape(shape)
            array.fill(0)
            return Bound(array, _nothing, _nothing)
        array = np.zeros(shape, dtype)
        address, count = array.ctypes.data, array.nbytes
        bound = Bound(
            array,
            partial(self._tensor_set, tensor.pointer, address, 0, count),
            partial(self._tensor_get, tensor.pointer, address, 0, count),
        )
        bound.push()
        return bound

    def compute(self) -> None:
        """Run the graph; ClosedError when weights it reads are gone."""
        if not self._allocated:
            raise UsageError("the graph was computed before allocate(): call allocate() first")
        self._check_open()
        if self._unset:
            names = [t.name for t in self._inputs if t.pointer in self._unset]
            raise UsageError(
                f"the graph was computed before its inputs {names} were set: set them first"
            )
        for owner in self._owners.values():
            if owner.closed:
                raise ClosedError(
                    "a graph was computed after the weights it reads were closed: keep them open "
                    "as long as the graph"
                )
        status = self._compute(self.backend.handle, self._graph)
        if status != 0:
            raise LibraryError(
                f"ggml could not compute the graph (status {status}): free memory, or choose "
                "another device for the drafter"
            )

    def get(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Copy of a result as an array of shape reversed(ne), trailing ones dropped."""
        self._check_ready(tensor)
        dtype = _readable(tensor)
        shape = list(tensor.ne)
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        out = np.empty(shape[::-1], dtype=dtype)
        self._tensor_get(tensor.pointer, out.ctypes.data, 0, out.nbytes)
        return out

    def close(self) -> None:
        """Free the graph's own memory (weights stay)."""
        self._free_allocator()
        self._free_context()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _adopt(self, pointer: int | None, sources: Sequence[Tensor]) -> Tensor:
        for source in sources:
            if source.owner is not None and source.owner is not self:
                self._owners[id(source.owner)] = source.owner
        return Tensor.wrap(pointer, self, self)

    def _check_open(self) -> None:
        if not self._free_context.alive:
            raise ClosedError("the graph was used after it was closed: build it again")

    def _check_building(self) -> None:
        self._check_open()
        if self._allocated:
            raise UsageError("the graph is already allocated: build a new one to change it")

    def _check_ready(self, tensor: Tensor) -> None:
        self._check_open()
        if not self._allocated:
            raise UsageError(
                f"{tensor.name!r} has no memory before allocate(): call allocate() first"
            )
        if tensor.owner is not self:
            raise UsageError(
                f"{tensor.name!r} is not a node of this graph: give one that this graph made"
            )

    def _check_supported(self) -> None:
        lib = functions()
        for i in range(lib.ggml_graph_n_nodes(self._graph)):
            node = lib.ggml_graph_node(self._graph, i)
            if not lib.ggml_backend_supports_op(self.backend.handle, node):
                raise LibraryError(
                    f"{self.backend.device.name} cannot run {lib.ggml_op_desc(node).decode()}: "
                    f"choose another device for the drafter"
                )


def _readable(tensor: Tensor) -> np.dtype[Any]:
    dtype = _DTYPES.get(tensor.type.name)
    if dtype is None or not tensor.is_contiguous:
        raise UsageError(
            f"{tensor.name!r} ({tensor.type.name} {tensor.ne}) cannot be read: copy it with "
            "`cont` to f32 or i32 first"
        )
    return dtype


def _nothing() -> None:
    """The array is the tensor's memory."""
