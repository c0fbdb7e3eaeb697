"""Handles on ggml tensors: shape, type, where they live, and operators inside a graph."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from dspine.errors import ClosedError, LibraryError, UsageError
from dspine.ggml import kernels
from dspine.ggml.library import CTensor, functions
from dspine.ggml.types import TensorType, type_by_number

if TYPE_CHECKING:
    from dspine.ggml.graph import Graph

Shape = tuple[int, int, int, int]


class Owner(Protocol):
    """Whatever keeps a tensor's memory alive: a weight store, a graph or a target model."""

    @property
    def closed(self) -> bool:
        """True once the memory is gone."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor inside ggml. `ne` counts elements per dimension, the fastest first; `nb` is the
    byte step of each. Operators (`+`, `*`, and `weight @ x` for ggml's product) build nodes in
    the graph that one of the operands belongs to.
    """

    pointer: int = field(repr=False)
    type: TensorType
    ne: Shape
    nb: Shape = field(repr=False)
    name: str
    owner: Owner | None = field(repr=False, default=None)
    graph: Graph | None = field(repr=False, default=None)

    @classmethod
    def wrap(
        cls, pointer: int | None, owner: Owner | None = None, graph: Graph | None = None
    ) -> Tensor:
        """Read shape and type of an existing tensor; LibraryError for a null pointer."""
        if not pointer:
            raise LibraryError("ggml returned no tensor: it is out of memory")
        raw = CTensor.from_address(pointer)
        ne, nb = raw.ne, raw.nb
        return cls(
            pointer,
            type_by_number(raw.type),
            (ne[0], ne[1], ne[2], ne[3]),
            (nb[0], nb[1], nb[2], nb[3]),
            raw.name.decode("utf-8", "replace"),
            owner,
            graph,
        )

    @classmethod
    def foreign(cls, pointer: int, owner: Owner | None = None) -> Tensor:
        """A tensor that something else owns (the target's weights); never freed here.

        With an `owner`, use after it closed raises ClosedError instead of reading freed memory.
        """
        return cls.wrap(pointer, owner)

    @property
    def type_name(self) -> str:
        """Element type as ggml writes it, in lower case ("q8_0")."""
        return self.type.name

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.ne)

    @property
    def is_contiguous(self) -> bool:
        """Whether elements follow each other without gaps or permutation."""
        step = self.type.size
        for i, (count, found) in enumerate(zip(self.ne, self.nb, strict=True)):
            if count != 1 and found != step:
                return False
            step = step * count if i else step * (count // self.type.block)
        return True

    @property
    def has_contiguous_rows(self) -> bool:
        """Whether the elements of each row follow each other."""
        return self.nb[0] == self.type.size

    @property
    def byte_size(self) -> int:
        """Bytes from the first to the last element."""
        if self.type.is_quantised:
            row = self.ne[0] // self.type.block * self.type.size
        else:
            row = self.type.size + (self.ne[0] - 1) * self.nb[0]
        return row + sum((n - 1) * b for n, b in zip(self.ne[1:], self.nb[1:], strict=True))

    def check_open(self) -> None:
        """Raise ClosedError when the memory behind this tensor is gone."""
        if self.owner is not None and self.owner.closed:
            raise ClosedError(
                f"tensor {self.name!r} was used after its owner was closed: read it before"
            )

    @property
    def is_readable(self) -> bool:
        """Whether the bytes can be read back in the layout of the file.

        False for weights that the library has repacked for its own kernels; ours give them back.
        """
        self.check_open()
        lib = functions()
        buffer = CTensor.from_address(self.pointer).buffer
        if not buffer:
            return False
        kind = lib.ggml_backend_buffer_get_type(buffer)
        ours = kernels.installed()
        if lib.ggml_backend_buft_is_host(kind) or (ours is not None and kind == ours.buffer_type):
            return True
        device = lib.ggml_backend_buft_get_device(kind)
        return bool(device) and lib.ggml_backend_dev_buffer_type(device) == kind

    @property
    def buffer_name(self) -> str:
        """Name of the kind of memory it lies in ("CPU", "CPU_REPACK", "CUDA0", "none")."""
        self.check_open()
        buffer = CTensor.from_address(self.pointer).buffer
        if not buffer:
            return "none"
        lib = functions()
        name: bytes = lib.ggml_backend_buft_name(lib.ggml_backend_buffer_get_type(buffer))
        return name.decode()

    def read_rows(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        """Raw bytes of `count` rows of a contiguous matrix, shape (count, bytes of a row)."""
        if not 0 <= first <= first + count <= self.ne[1] * self.ne[2] * self.ne[3]:
            raise UsageError(
                f"rows {first} to {first + count} are outside of {self.ne}: choose them among those"
            )
        if not self.is_contiguous:
            raise UsageError(f"tensor {self.name!r} is a permuted view: its rows cannot be read")
        if not self.is_readable:
            raise UsageError(
                f"tensor {self.name!r} lies in {self.buffer_name} memory in a layout that cannot "
                "be read back: read it from the model's file"
            )
        row = self.type.row_bytes(self.ne[0])
        out = np.empty((count, row), dtype=np.uint8)
        if count:
            functions().ggml_backend_tensor_get(
                self.pointer, out.ctypes.data, first * row, count * row
            )
        return out

    def __add__(self, other: Tensor) -> Tensor:
        return self._graph_with(other).add(self, other)

    def __sub__(self, other: Tensor) -> Tensor:
        return self._graph_with(other).sub(self, other)

    def __mul__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, Tensor):
            return self._graph_with(other).mul(self, other)
        return self._graph_with(self).scale(self, other)

    def __matmul__(self, other: Tensor) -> Tensor:
        """`weight @ x`: ggml's product, rows of both share `ne[0]`; see Graph.matmul."""
        return self._graph_with(other).matmul(self, other)

    def _graph_with(self, other: Tensor) -> Graph:
        graph = self.graph or other.graph
        if graph is None:
            raise UsageError(
                f"{self.name!r} and {other.name!r} belong to no graph: one of them must come from "
                "a graph"
            )
        return graph
