"""Devices that ggml can compute on, and a backend (an execution stream) on one of them."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from dspine.errors import ClosedError, LibraryError, UsageError
from dspine.ggml.library import CTensor, functions
from dspine.ggml.tensor import Tensor

_KINDS = ("cpu", "gpu", "integrated gpu", "accelerator", "meta")
_SET_THREADS = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the library. `kind` is "cpu", "gpu", "integrated gpu" or "accelerator"."""

    handle: int = field(repr=False)
    name: str
    description: str
    kind: str

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes now."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        functions().ggml_backend_dev_memory(self.handle, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


def devices() -> tuple[Device, ...]:
    """Every device, in the library's order."""
    lib = functions()
    found = []
    for i in range(lib.ggml_backend_dev_count()):
        handle = lib.ggml_backend_dev_get(i)
        number = lib.ggml_backend_dev_type(handle)
        found.append(
            Device(
                handle,
                lib.ggml_backend_dev_name(handle).decode(),
                lib.ggml_backend_dev_description(handle).decode(),
                _KINDS[number] if 0 <= number < len(_KINDS) else "unknown",
            )
        )
    return tuple(found)


def default_device() -> Device:
    """The CPU: small drafters beside a CPU target belong there."""
    for device in devices():
        if device.kind == "cpu":
            return device
    raise LibraryError("the ggml library has no CPU device: use a build with the CPU backend")


class Backend:
    """Runs graphs on one device. Close it after everything that was made with it."""

    def __init__(self, device: Device | None = None, n_threads: int = 1) -> None:
        self.device = device or default_device()
        lib = functions()
        handle = lib.ggml_backend_dev_init(self.device.handle, None)
        if not handle:
            raise LibraryError(
                f"device {self.device.name} cannot be started: choose another one, or look at the "
                "library with `dspine doctor`"
            )
        self._handle: int = handle
        self._free = weakref.finalize(self, lib.ggml_backend_free, handle)
        address = lib.ggml_backend_reg_get_proc_address(
            lib.ggml_backend_dev_backend_reg(self.device.handle), b"ggml_backend_set_n_threads"
        )
        self._set_threads = _SET_THREADS(address) if address else None
        self.n_threads = 0
        self.set_threads(n_threads)

    @property
    def closed(self) -> bool:
        """True after close()."""
        return not self._free.alive

    @property
    def handle(self) -> int:
        """The library's pointer, for this package only."""
        if not self._free.alive:
            raise ClosedError("the ggml backend was used after it was closed: make a new one")
        return self._handle

    @property
    def buffer_type(self) -> int:
        """The memory that this backend's own tensors lie in, for this package only."""
        kind: int = functions().ggml_backend_get_default_buffer_type(self.handle)
        return kind

    def set_threads(self, n_threads: int) -> None:
        """Number of CPU threads for the next graphs; devices without threads ignore it."""
        if n_threads < 1:
            raise UsageError(f"n_threads is {n_threads}: at least 1 thread is needed")
        handle = self.handle
        if self._set_threads is not None:
            self._set_threads(handle, n_threads)
        self.n_threads = n_threads

    def can_use(self, tensor: Tensor) -> bool:
        """Whether graphs of this backend can read `tensor` where it lies."""
        tensor.check_open()
        lib = functions()
        buffer = CTensor.from_address(tensor.pointer).buffer
        if not buffer:
            return False
        kind = lib.ggml_backend_buffer_get_type(buffer)
        return bool(lib.ggml_backend_supports_buft(self.handle, kind))

    def close(self) -> None:
        """Free the backend; harmless when repeated."""
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
