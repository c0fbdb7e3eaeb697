"""Reading the outputs of chosen target layers after a decode, in one of two ways.

The library exports the *input* of every layer (input of layer i + 1 = output of layer i) for all
rows of the last decode. Builds or architectures without that are read through the evaluation
callback and the tensor name `l_out-<i>`, at the price of a call per graph node.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dspine.errors import LibraryError, UsageError
from dspine.ggml import kernels
from dspine.ggml import library as ggml_library
from dspine.llama.checks import require_count
from dspine.llama.native import Native
from dspine.llama.results import tap_copy

Rows = npt.NDArray[np.float32]

PUBLISHING_ARCHITECTURES = frozenset(
    {
        "bailingmoe3",
        "deepseek4",
        "gemma4",
        "gpt-oss",
        "hunyuan_vl",
        "lfm2",
        "llama",
        "mimo2",
        "minimax-01",
        "minimax-m2",
        "muse-glimmer",
        "nanbeige",
        "nemotron_h",
        "qwen3",
        "qwen35",
        "qwen35moe",
        "qwen3moe",
        "qwen3next",
        "qwen4exp",
    }
)
"""Graphs that publish their layer inputs; asking another one aborts the process."""


class TapReader(Protocol):
    """Where a context gets its taps from."""

    def begin(self) -> None:
        """A decode is about to run."""

    def rows(self, index: int, count: int) -> Rows:
        """The first `count` rows of tap number `index` (count, hidden) of the last decode."""

    def copy(self, first: int, count: int, out: RowBuffer, place: int) -> None:
        """Rows first ... first + count - 1 to row `place` of `out` and those after it, each with
        its taps in turn.
        """


class RowBuffer:
    """Room for `count` rows of `width` numbers that is written again and again."""

    def __init__(self, count: int, width: int) -> None:
        self.count, self.width = count, width
        self.rows: Rows = np.empty((count, width), np.float32)
        self.row_bytes = 4 * width
        self.bytes = self.rows.data.cast("B") if self.rows.size else memoryview(b"")
        self.address: int = self.rows.ctypes.data


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """UsageError unless every tap is a readable layer and none is named twice."""
    for tap in taps:
        require_count("tap", tap, 0)
        if tap + 1 >= num_layers:
            raise UsageError(
                f"the output of layer {tap} cannot be read: of the {num_layers} layers of this "
                f"target only 0 to {num_layers - 2} can be tapped: choose one of these, or the "
                "drafter that belongs to this target"
            )
    if len(set(taps)) != len(taps):
        raise UsageError(f"taps {list(taps)} name a layer twice: name each layer once")


class LayerInputTaps:
    """Taps through the library's own buffers: one memory copy per tap, nothing per node."""

    def __init__(
        self, native: Native, context: int, taps: Sequence[int], hidden_size: int, capacity: int
    ) -> None:
        assert native.set_tap is not None
        assert native.get_tap is not None
        self._read = native.get_tap
        self._context = context
        self._row_bytes = 4 * hidden_size
        self._views = [LastingView(capacity, hidden_size) for _ in taps]
        self._layers = [tap + 1 for tap in taps]
        plug_in = kernels.installed()
        self._copy: Callable[[int, int, int], int] | None = None
        if plug_in is not None:
            self._copy = tap_copy(
                plug_in.library, context, native.get_tap, self._layers, self._row_bytes
            )
        for layer in self._layers:
            native.set_tap(context, layer, True)

    def begin(self) -> None:
        """Nothing to prepare: the library overwrites its buffers."""

    def rows(self, index: int, count: int) -> Rows:
        return self._views[index].at(self._address(self._layers[index]))[:count]

    def copy(self, first: int, count: int, out: RowBuffer, place: int) -> None:
        begin = place * out.row_bytes
        if self._copy is not None:
            done = self._copy(first, count, out.address + begin)
            if done < len(self._layers):
                raise self._no_buffer(self._layers[done])
            return
        size = self._row_bytes
        for layer, view in zip(self._layers, self._views, strict=True):
            _copy_rows(
                view.bytes_at(self._address(layer)),
                first,
                count,
                size,
                out.bytes,
                begin,
                out.row_bytes,
            )
            begin += size

    def _address(self, layer: int) -> int:
        address = self._read(self._context, layer)
        if not address:
            raise self._no_buffer(layer)
        return address

    @staticmethod
    def _no_buffer(layer: int) -> LibraryError:
        return LibraryError(
            f"the library gave no buffer for tap {layer - 1}: decode rows before they are read, "
            "or answer without a drafter (--proposer ngram)"
        )


class CallbackTaps:
    """Taps through the evaluation callback; works on every build, slower.

    Make it before the context (`callback` goes into the context's parameters) and keep it as
    long as the context lives.
    """

    def __init__(
        self, native: Native, taps: Sequence[int], hidden_size: int, capacity: int
    ) -> None:
        self._taps = tuple(taps)
        self._names = {f"l_out-{tap}".encode(): index for index, tap in enumerate(taps)}
        self._buffers = [np.empty((capacity, hidden_size), dtype=np.float32) for _ in taps]
        self._filled = [0] * len(self._taps)
        self._hidden_size = hidden_size
        self._failure: str | None = None
        self._get = ggml_library.functions().ggml_backend_tensor_get
        self.callback: Any = native.api.ggml_backend_sched_eval_callback(self._on_node)

    def begin(self) -> None:
        self._filled = [0] * len(self._taps)
        self._failure = None

    def rows(self, index: int, count: int) -> Rows:
        if self._failure is not None:
            raise LibraryError(self._failure)
        if self._filled[index] < count:
            raise UsageError(
                f"layer {self._taps[index]} of this target does not show its output "
                f"({self._filled[index]} of {count} rows appeared as l_out-{self._taps[index]}): "
                "its architecture cannot be tapped, answer without a drafter (--proposer ngram)"
            )
        return self._buffers[index][:count]

    def copy(self, first: int, count: int, out: RowBuffer, place: int) -> None:
        for index in range(len(self._taps)):
            rows = self.rows(index, first + count).data.cast("B")
            size = 4 * self._hidden_size
            begin = place * out.row_bytes + index * size
            _copy_rows(rows, first, count, size, out.bytes, begin, out.row_bytes)

    def _on_node(self, pointer: int, ask: bool, _user: object) -> bool:
        # ctypes swallows exceptions here, so a problem is kept and raised when rows are read.
        tensor = ggml_library.CTensor.from_address(pointer)
        index = self._names.get(tensor.name)
        if index is None:
            return not ask
        if ask:
            return True
        width, rows = int(tensor.ne[0]), int(tensor.ne[1])
        first = self._filled[index]
        buffer = self._buffers[index]
        if width != self._hidden_size or tensor.type != 0 or first + rows > len(buffer):
            self._failure = (
                f"layer {self._taps[index]} gave {rows} rows of {width} values where rows of "
                f"{self._hidden_size} 32-bit values were expected: it cannot be tapped"
            )
            return True
        self._get(pointer, buffer[first].ctypes.data, 0, rows * width * 4)
        self._filled[index] = first + rows
        return True


def _copy_rows(
    rows: memoryview, first: int, count: int, size: int, out: memoryview, place: int, step: int
) -> None:
    """Rows of one tap, `size` bytes each, to `place` and every `step` bytes after it."""
    # Through memoryviews: for a few rows NumPy calls take longer than the copying.
    for start in range(first * size, (first + count) * size, size):
        out[place : place + size] = rows[start : start + size]
        place += step


def float_view(address: int, *shape: int) -> Rows:
    """float32 array over native memory, without a copy."""
    return np.frombuffer(_memory(address, 4 * math.prod(shape)), np.float32).reshape(shape)


class LastingView:
    """Views on values that the library writes anew at each decode, mostly to the same place."""

    def __init__(self, *shape: int) -> None:
        """`shape` as large as it can be; only what was written may be read."""
        self._shape = shape
        self._address = 0
        self._view: Rows = np.empty(0, np.float32)
        self._bytes = memoryview(b"")

    def at(self, address: int) -> Rows:
        """The values from `address` on, in their shape."""
        if address != self._address:
            self._look(address)
        return self._view

    def bytes_at(self, address: int) -> memoryview:
        """The same as plain bytes."""
        if address != self._address:
            self._look(address)
        return self._bytes

    def _look(self, address: int) -> None:
        self._view = float_view(address, *self._shape)
        self._bytes = memoryview(_memory(address, 4 * math.prod(self._shape))).cast("B")
        self._address = address


def _memory(address: int, size: int) -> Any:
    # As bytes: NumPy would parse the format of an array of floats each time.
    return (ctypes.c_char * size).from_address(address)
