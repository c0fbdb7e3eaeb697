"""Finds the llama.cpp library, loads it once per process and describes it."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine.errors import LibraryError
from dspine.ggml import library as ggml_library
from dspine.kernels.status import NOT_LOADED, Status, enable
from dspine.llama.log import capture
from dspine.llama.native import Native, bind, library_file, shared_library_name

INSTALL = "pip install llama-cpp-python==0.3.36"
TESTED = "0c1e570"
"""Commit of llama.cpp, shortened, that llama-cpp-python 0.3.36 holds and dspine was tested with."""
_PATH_VARIABLES = ("DSPINE_LIBRARY", "LLAMA_CPP_LIB_PATH")
_DEVICE_KINDS = {0: "cpu", 1: "gpu", 2: "integrated gpu", 3: "accelerator"}


@dataclass(frozen=True, slots=True)
class Device:
    """A device that the library can compute on; sizes in bytes, 0 when it does not say."""

    name: str
    description: str
    kind: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded llama.cpp library, for `dspine doctor` and error messages."""

    path: Path
    """Folder of the shared libraries."""
    file: Path
    """The llama library itself."""
    version: str
    """Version of the Python package llama-cpp-python whose structures are used."""
    llama_version: str
    commit: str | None
    ggml_version: str
    system_info: str
    features: tuple[str, ...]
    """CPU features that this build uses, e.g. AVX2."""
    devices: tuple[Device, ...]
    has_tap_symbols: bool
    has_tensor_symbol: bool
    kernels: Status = NOT_LOADED
    """What computes on the CPU."""

    @property
    def notice(self) -> str | None:
        """A sentence where the library says that it is another llama.cpp than the tested one."""
        if self.commit is None or self.commit.startswith(TESTED):
            return None
        return (
            f"the library in {self.path} is llama.cpp {self.commit}, and dspine was tested with "
            f"{TESTED} alone: it may work, but where it fails or texts look wrong, use the one of "
            f"llama-cpp-python 0.3.36"
        )


_loaded: tuple[Library, Native] | None = None


def find_library(path: Path | None = None) -> Library:
    """Load the llama.cpp library (first call) and describe it.

    Order: `path`, then the environment variables DSPINE_LIBRARY and LLAMA_CPP_LIB_PATH, then the
    installed llama-cpp-python package. `path` is a folder of shared libraries, or the llama
    library in it. Raises LibraryError when there is none, when it lacks a function that is
    needed, or when this process has already loaded another one.
    """
    global _loaded
    wanted = _requested_folder(path)
    if _loaded is not None:
        library = _loaded[0]
        if wanted is not None and wanted.resolve() != library.path.resolve():
            raise LibraryError(
                f"this process already uses the llama.cpp library in {library.path}, so "
                f"{wanted} cannot be loaded beside it: start a new process for it"
            )
        return library
    api, folder = _import(wanted)
    capture.install(api)
    native = bind(api, folder)
    api.llama_backend_init()
    ggml_library.load(folder)
    kernels = enable(folder)  # before the first model: ggml copies its list of buffer types then
    _loaded = (_describe(native, folder, kernels), native)
    return _loaded[0]


def native_functions() -> Native:
    """The functions of the library, loading it when nothing has yet."""
    if _loaded is None:
        find_library()
    assert _loaded is not None
    return _loaded[1]


def _requested_folder(path: Path | None) -> Path | None:
    """The folder that the caller or the environment names, or None for the installed package."""
    origin = "the library path"
    if path is None:
        for variable in _PATH_VARIABLES:
            value = os.environ.get(variable)
            if value:
                path, origin = Path(value).expanduser(), variable
                break
        else:
            return None
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise LibraryError(
            f"{origin} names {path}, which does not exist: name the folder of a llama.cpp build"
        )
    if library_file(folder, "llama") is None:
        raise LibraryError(
            f"{origin} names {folder}, which has no {shared_library_name('llama')}: name the "
            f"folder of a llama.cpp build"
        )
    return folder


def _import(wanted: Path | None) -> tuple[Any, Path]:
    """Import llama-cpp-python's low-level module on the wanted folder; returns both."""
    before = os.environ.get("LLAMA_CPP_LIB_PATH")
    if wanted is not None:
        os.environ["LLAMA_CPP_LIB_PATH"] = str(wanted)
    try:
        api = importlib.import_module("llama_cpp.llama_cpp")
    except ModuleNotFoundError as error:
        name = (error.name or "llama_cpp").partition(".")[0]
        raise LibraryError(f"the Python package {name} is missing: run {INSTALL}") from error
    except AttributeError as error:
        symbol = re.search(r"undefined symbol: (\w+)", str(error))
        raise LibraryError(
            f"the llama.cpp library in {wanted or 'the installed package'} has no function "
            f"{symbol.group(1) if symbol else error}: it is another version than "
            f"llama-cpp-python 0.3.36 expects"
        ) from error
    except (OSError, RuntimeError) as error:
        raise LibraryError(
            f"the llama.cpp library cannot be loaded ({error}): build it again with {INSTALL} "
            f"--force-reinstall --no-cache-dir"
        ) from error
    finally:
        if wanted is not None:
            if before is None:
                del os.environ["LLAMA_CPP_LIB_PATH"]
            else:
                os.environ["LLAMA_CPP_LIB_PATH"] = before
    folder = Path(api._base_path)
    if wanted is not None and folder.resolve() != wanted.resolve():
        raise LibraryError(
            f"llama-cpp-python was imported earlier with the library in {folder}, so {wanted} "
            f"cannot be used: set DSPINE_LIBRARY before Python starts"
        )
    return api, folder


def _describe(native: Native, folder: Path, kernels: Status) -> Library:
    info = _text(native.api.llama_print_system_info())
    ggml = ggml_library.functions()
    commit = _text(ggml.ggml_commit())
    file = library_file(folder, "llama")
    assert file is not None
    return Library(
        path=folder,
        file=file,
        version=_package_version(),
        llama_version=_text(native.api.llama_version()),
        commit=None if commit in ("", "unknown") else commit,
        ggml_version=_text(ggml.ggml_version()),
        system_info=info,
        features=cpu_features(info),
        devices=_devices(),
        has_tap_symbols=native.set_tap is not None,
        has_tensor_symbol=native.get_tensor is not None,
        kernels=kernels,
    )


def cpu_features(system_info: str) -> tuple[str, ...]:
    """The features that `llama_print_system_info` reports as present (`NAME = 1`)."""
    return tuple(name for name, value in re.findall(r"(\w+) = (\d+)", system_info) if value == "1")


def _package_version() -> str:
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        module = sys.modules.get("llama_cpp")
        return str(getattr(module, "__version__", "unknown"))


def _devices() -> tuple[Device, ...]:
    ggml = ggml_library.functions()
    found = []
    for index in range(ggml.ggml_backend_dev_count()):
        device = ggml.ggml_backend_dev_get(index)
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        found.append(
            Device(
                name=_text(ggml.ggml_backend_dev_name(device)),
                description=_text(ggml.ggml_backend_dev_description(device)),
                kind=_DEVICE_KINDS.get(ggml.ggml_backend_dev_type(device), "other"),
                free_bytes=free.value,
                total_bytes=total.value,
            )
        )
    return tuple(found)


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", "replace").strip()
