"""Plugs the compiled CPU kernels into the loaded ggml library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.errors import LibraryError
from dspine.ggml.library import functions
from dspine.ggml.types import type_by_name

_VOID, _INT = ctypes.c_void_p, ctypes.c_int
_PRODUCTS, _ATTENTION = 1, 2
_OPERATIONS = 100
"""ggml 0.25 has more operations than this; all that are looked for come before."""
_VERSION = "0.25."
_SYMBOLS = (
    "_Z39ggml_backend_cpu_get_extra_buffer_typesv",
    "ggml_backend_buffer_init",
    "ggml_barrier",
    "ggml_get_type_traits",
)


FAMILIES: Mapping[str, str] = {
    "amx": "AMX-INT8",
    "avx512": "AVX512-VNNI",
    "avxvnni": "AVX-VNNI",
    "avx2": "AVX2",
}
"""Keys of the kernel families and how people call their instructions, the newest first."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """`heads` query heads, `shared` of them to a key/value head, of `width` elements; `rows`
    queries, of which the last sees all `keys`.
    """

    heads: int
    shared: int
    rows: int
    keys: int
    width: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of this process. `family` is the kind of processor they were written for."""

    family: str
    buffer_type: int
    library: ctypes.CDLL

    def takes(self, type_name: str, ne: tuple[int, ...]) -> bool:
        """Whether a weight matrix of this type and shape is packed for them."""
        return len(ne) == 2 and bool(
            self.library.dspine_kernels_take_weight(type_by_name(type_name).number, ne[0])
        )

    @contextmanager
    def expecting(self, file_bytes: Mapping[int, int]) -> Iterator[None]:
        """While a model is loaded whose matrices take so many bytes in the file, by ggml number of
        their type: memory for them is fetched from the system meanwhile, on another core.
        """
        packed = self.library.dspine_kernels_packed_bytes
        self.library.dspine_kernels_expect(sum(packed(*item) for item in file_bytes.items()))
        try:
            yield
        finally:
            self.library.dspine_kernels_expect(0)

    def take_attention(self, on: bool) -> None:
        """Compute attention from the next graph on, or leave it to ggml; for comparisons."""
        self.library.dspine_kernels_take_attention(int(on))

    def take_top_k(self, on: bool) -> None:
        """Choose largest values from the next graph on, or leave it to ggml; for comparisons."""
        self.library.dspine_kernels_take_top_k(int(on))


_installed: list[Kernels] = []
"""At most one: the library keeps pointers into the kernels until the process ends."""


def installed() -> Kernels | None:
    """The kernels of this process, or None where ggml computes everything."""
    return _installed[0] if _installed else None


def quick_function(
    library: ctypes.CDLL, name: str, arguments: Sequence[Any], result: type | None = _INT
) -> Callable[..., int]:
    """A function of the kernels that gives its result within microseconds: called without giving
    up Python's lock.
    """
    return ctypes.PYFUNCTYPE(result, *arguments)((name, library))


@cache
def integers(count: int) -> Struct:
    """So many 32-bit integers in a row: one object for all calls of a step, as it stays cached."""
    return Struct(f"{count}i")


def fits(ggml_version: str) -> bool:
    """Whether the kernels were written for this version of ggml."""
    return ggml_version.startswith(_VERSION)


def families(path: Path) -> list[str]:
    """Keys of the families in `path` that this processor can run, the newest first."""
    kernels = _open(path)
    found: list[str] = []
    while (key := kernels.dspine_kernels_family(len(found))) is not None:
        found.append(key.decode())
    return found


def trial(
    path: Path, family: str, type_name: str, ne: tuple[int, int], rows: int, repeats: int
) -> tuple[float, npt.NDArray[np.float32]]:
    """A product of a family on fixed arbitrary numbers, without plugging it in: best seconds of
    one thread, and the result (rows, outputs). LibraryError where the family cannot compute it.
    """
    result = np.empty((rows, ne[1]), dtype=np.float32)
    seconds = _open(path).dspine_kernels_trial(
        family.encode(), type_by_name(type_name).number, *ne, rows, repeats, result.ctypes.data
    )
    if seconds < 0:
        raise LibraryError(f"the {family} kernels have no {type_name} product of {ne} here")
    return seconds, result


def attention_trial(
    path: Path, family: str, cache: str, shape: AttentionShape, repeats: int
) -> tuple[float, npt.NDArray[np.float32]]:
    """An attention of a family over a `cache` of this type, as `trial`: the result is (rows,
    heads, width).
    """
    result = np.empty((shape.rows, shape.heads, shape.width), dtype=np.float32)
    seconds = _open(path).dspine_kernels_trial_attention(
        family.encode(),
        type_by_name(cache).number,
        *(shape.heads, shape.shared, shape.rows, shape.keys, shape.width),
        *(repeats, result.ctypes.data),
    )
    if seconds < 0:
        raise LibraryError(f"the {family} kernels have no attention of {shape} over {cache} here")
    return seconds, result


def install(path: Path, family: str | None = None, *, attention: bool = True) -> Kernels:
    """Register the kernels in `path`, those of `family` (else of the newest that runs here); must
    come before the first model is loaded.

    LibraryError when the library is another version, lacks a symbol, or has no kernels for this
    processor. Nothing is changed then.
    """
    if _installed:
        return _installed[0]
    lib = functions()
    version = lib.ggml_version().decode()
    if not fits(version):
        raise LibraryError(f"the CPU kernels are for ggml {_VERSION}x, this library is {version}")
    stock = _stock(lib.folder)
    operations = _operations(stock)
    kernels = _open(path)
    family = choose(families(path), family)
    handle = kernels.dspine_kernels_install(
        family.encode(),
        *(_address(stock, name) for name in _SYMBOLS),
        _cpu_device(),
        operations["MUL_MAT"],
        operations["FLASH_ATTN_EXT"],
        operations["GET_ROWS"],
        operations["TOP_K"],
        _PRODUCTS | (_ATTENTION if attention else 0),
    )
    if not handle:
        raise LibraryError("the CPU kernels refused this processor")
    _installed.append(Kernels(FAMILIES[family], handle, kernels))
    return _installed[0]


def choose(here: Sequence[str], wanted: str | None = None) -> str:
    """`wanted`, else the first of the families `here`; LibraryError where there is no such."""
    if not here:
        raise LibraryError("there are no CPU kernels for this processor (they need AVX2 and FMA)")
    if wanted is not None and wanted not in here:
        raise LibraryError(
            f"this processor, or the compiler that built them, has no {FAMILIES[wanted]} for the "
            f"CPU kernels: use {', '.join(here)}"
        )
    return wanted or here[0]


def repacked_buffer_type(name: str = "_Z35ggml_backend_cpu_repack_buffer_typev") -> int | None:
    """Memory in which ggml itself repacks weights, for comparisons; None where there is none.
    `name` is the library's function for it.
    """
    stock = _stock(functions().folder)
    try:
        address = _address(stock, name)
    except LibraryError:
        return None
    found: int | None = ctypes.CFUNCTYPE(_VOID)(address)()
    return found


def _open(path: Path) -> ctypes.CDLL:
    try:
        kernels = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"the CPU kernels {path} cannot be loaded: {error}") from error
    kernels.dspine_kernels_family.restype = ctypes.c_char_p
    kernels.dspine_kernels_install.restype = _VOID
    kernels.dspine_kernels_family.argtypes = [_INT]
    kernels.dspine_kernels_install.argtypes = [ctypes.c_char_p] + [_VOID] * 5 + [_INT] * 5
    kernels.dspine_kernels_take_attention.restype = None
    kernels.dspine_kernels_take_attention.argtypes = [_INT]
    kernels.dspine_kernels_take_top_k.restype = None
    kernels.dspine_kernels_take_top_k.argtypes = [_INT]
    kernels.dspine_kernels_take_weight.restype = _INT
    kernels.dspine_kernels_take_weight.argtypes = [_INT, ctypes.c_int64]
    kernels.dspine_kernels_packed_bytes.restype = ctypes.c_size_t
    kernels.dspine_kernels_packed_bytes.argtypes = [_INT, ctypes.c_size_t]
    kernels.dspine_kernels_expect.restype = None
    kernels.dspine_kernels_expect.argtypes = [ctypes.c_size_t]
    kernels.dspine_kernels_trial.restype = ctypes.c_double
    kernels.dspine_kernels_trial.argtypes = [
        *(ctypes.c_char_p, _INT),
        *[ctypes.c_int64] * 3,
        *(_INT, _VOID),
    ]
    kernels.dspine_kernels_trial_attention.restype = ctypes.c_double
    kernels.dspine_kernels_trial_attention.argtypes = [
        *(ctypes.c_char_p, _INT),
        *[ctypes.c_int64] * 5,
        *(_INT, _VOID),
    ]
    return kernels


def _stock(folder: Path) -> ctypes.CDLL:
    # Already loaded: a lookup in it also searches the ggml libraries it depends on.
    return ctypes.CDLL(str(folder / "libllama.so"))


def _address(stock: ctypes.CDLL, name: str) -> int:
    try:
        address = ctypes.cast(getattr(stock, name), _VOID).value
    except AttributeError as error:
        raise LibraryError(
            f"this llama.cpp library has no {name}, which the CPU kernels need"
        ) from error
    if address is None:
        raise LibraryError(f"this llama.cpp library has {name}, but without an address")
    return address


def _operations(stock: ctypes.CDLL) -> dict[str, int]:
    """Numbers of the operations that the kernels take over, by name."""
    _address(stock, "ggml_op_name")
    name_of = ctypes.CFUNCTYPE(ctypes.c_char_p, _INT)(("ggml_op_name", stock))
    names = [name_of(number) or b"" for number in range(_OPERATIONS)]
    wanted = ("MUL_MAT", "FLASH_ATTN_EXT", "GET_ROWS")
    missing = [name for name in wanted if name.encode() not in names]
    if missing:
        raise LibraryError(f"this ggml library has no operation {missing[0]}")
    found = {name: names.index(name.encode()) for name in wanted}
    # A library may do without it: the kernels then never take it over.
    return {**found, "TOP_K": names.index(b"TOP_K") if b"TOP_K" in names else -1}


def _cpu_device() -> int:
    lib = functions()
    for index in range(lib.ggml_backend_dev_count()):
        handle: int = lib.ggml_backend_dev_get(index)
        if lib.ggml_backend_dev_type(handle) == 0:
            return handle
    raise LibraryError("this ggml library has no CPU device")
