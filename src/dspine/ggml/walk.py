"""The best path through a block's table in one native call, where the CPU kernels run."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import numpy.typing as npt

from dspine.ggml.kernels import quick_function

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class NativeWalk:
    """The walk over arrays that are written anew for each block; shapes as in `Chain`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        candidates: npt.NDArray[np.int32],
        first_row: npt.NDArray[np.float32],
        table: npt.NDArray[np.float32],
    ) -> None:
        """All arrays contiguous; `library` has the CPU kernels."""
        slots, k = candidates.shape
        # Held, so that the addresses stay those of arrays.
        self._inputs = candidates, first_row, table
        self._outputs = np.zeros(slots, np.int32), np.zeros(slots, np.float64)
        tokens, scores = self._outputs
        addresses = [array.ctypes.data for array in (*self._inputs, *self._outputs)]
        self._arguments = (*addresses[:3], slots, k, *addresses[3:])
        self._tokens, self._scores = tokens.data.cast("B"), scores.data.cast("B")
        self._ids, self._numbers = struct.Struct(f"{slots}i"), struct.Struct(f"{slots}d")
        self._call = quick_function(
            library, "dspine_chain_walk", [*[_POINTER] * 3, _INT, _INT, *[_POINTER] * 2]
        )

    def best(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Tokens and their scores; FloatingPointError for scores that are not numbers."""
        if not self._call(*self._arguments):
            raise FloatingPointError("the drafter's scores are not numbers")
        return self._ids.unpack(self._tokens), self._numbers.unpack(self._scores)
