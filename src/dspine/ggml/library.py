"""Loading libggml: the one place that opens the shared objects and declares their functions."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspine.errors import LibraryError

_VOID, _INT, _INT64, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
_FLOAT, _BOOL, _CHARS = ctypes.c_float, ctypes.c_bool, ctypes.c_char_p


class InitParams(ctypes.Structure):
    """struct ggml_init_params, passed by value to ggml_init."""

    _fields_ = [("mem_size", _SIZE), ("mem_buffer", _VOID), ("no_alloc", _BOOL)]


class CTensor(ctypes.Structure):
    """struct ggml_tensor as ggml 0.25 lays it out; `_check_layout` compares its size at load."""

    _fields_ = [
        ("type", _INT),
        ("buffer", _VOID),
        ("ne", _INT64 * 4),
        ("nb", _SIZE * 4),
        ("op", _INT),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", _VOID * 10),
        ("view_src", _VOID),
        ("view_offs", _SIZE),
        ("data", _VOID),
        ("name", ctypes.c_char * 64),
        ("extra", _VOID),
        ("padding", ctypes.c_char * 8),
    ]


_OBJECT_BYTES = 32
"""sizeof(struct ggml_object), the header ggml puts before each tensor of a context."""

_TERNARY: tuple[Any, list[Any]] = (_VOID, [_VOID] * 3)
_UNARY: tuple[Any, list[Any]] = (_VOID, [_VOID] * 2)
_ROPE: list[Any] = [_VOID] * 4 + [_INT] * 3 + [_FLOAT] * 6

# name -> (result, arguments). Pointers are plain integers on the Python side.
_DECLARED: dict[str, tuple[Any, list[Any]]] = {
    "ggml_version": (_CHARS, []),
    "ggml_commit": (_CHARS, []),
    "ggml_init": (_VOID, [InitParams]),
    "ggml_free": (None, [_VOID]),
    "ggml_tensor_overhead": (_SIZE, []),
    "ggml_graph_overhead_custom": (_SIZE, [_SIZE, _BOOL]),
    "ggml_new_graph_custom": (_VOID, [_VOID, _SIZE, _BOOL]),
    "ggml_build_forward_expand": (None, [_VOID, _VOID]),
    "ggml_graph_n_nodes": (_INT, [_VOID]),
    "ggml_graph_node": (_VOID, [_VOID, _INT]),
    "ggml_op_desc": (_CHARS, [_VOID]),
    "ggml_type_name": (_CHARS, [_INT]),
    "ggml_blck_size": (_INT64, [_INT]),
    "ggml_type_size": (_SIZE, [_INT]),
    "ggml_nbytes": (_SIZE, [_VOID]),
    "ggml_quantize_requires_imatrix": (_BOOL, [_INT]),
    "ggml_quantize_chunk": (_SIZE, [_INT, _VOID, _VOID, _INT64, _INT64, _INT64, _VOID]),
    "ggml_set_name": (_VOID, [_VOID, _CHARS]),
    "ggml_set_input": (None, [_VOID]),
    "ggml_set_output": (None, [_VOID]),
    "ggml_new_tensor": (_VOID, [_VOID, _INT, _INT, _VOID]),
    "ggml_mul_mat": _TERNARY,
    "ggml_add": _TERNARY,
    "ggml_sub": _TERNARY,
    "ggml_mul": _TERNARY,
    "ggml_get_rows": _TERNARY,
    "ggml_cpy": _TERNARY,
    "ggml_set_rows": (_VOID, [_VOID] * 4),
    "ggml_sqr": _UNARY,
    "ggml_sqrt": _UNARY,
    "ggml_mean": _UNARY,
    "ggml_silu": _UNARY,
    "ggml_sigmoid": _UNARY,
    "ggml_tanh": _UNARY,
    "ggml_cont": _UNARY,
    "ggml_transpose": _UNARY,
    "ggml_swiglu": _UNARY,
    "ggml_rms_norm": (_VOID, [_VOID, _VOID, _FLOAT]),
    "ggml_scale": (_VOID, [_VOID, _VOID, _FLOAT]),
    "ggml_top_k": (_VOID, [_VOID, _VOID, _INT]),
    "ggml_concat": (_VOID, [_VOID, _VOID, _VOID, _INT]),
    "ggml_flash_attn_ext": (_VOID, [_VOID] * 5 + [_FLOAT] * 3),
    "ggml_flash_attn_ext_add_sinks": (None, [_VOID, _VOID]),
    "ggml_rope_ext": (_VOID, _ROPE),
    "ggml_permute": (_VOID, [_VOID, _VOID, _INT, _INT, _INT, _INT]),
    "ggml_reshape_4d": (_VOID, [_VOID, _VOID] + [_INT64] * 4),
    "ggml_view_4d": (_VOID, [_VOID, _VOID] + [_INT64] * 4 + [_SIZE] * 4),
    "ggml_gallocr_new": (_VOID, [_VOID]),
    "ggml_gallocr_free": (None, [_VOID]),
    "ggml_gallocr_alloc_graph": (_BOOL, [_VOID, _VOID]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_VOID, [_VOID, _VOID]),
    "ggml_backend_buffer_free": (None, [_VOID]),
    "ggml_backend_buffer_clear": (None, [_VOID, ctypes.c_uint8]),
    "ggml_backend_buffer_get_size": (_SIZE, [_VOID]),
    "ggml_backend_buffer_get_type": (_VOID, [_VOID]),
    "ggml_backend_buffer_set_usage": (None, [_VOID, _INT]),
    "ggml_backend_buft_is_host": (_BOOL, [_VOID]),
    "ggml_backend_buft_name": (_CHARS, [_VOID]),
    "ggml_backend_buft_get_device": (_VOID, [_VOID]),
    "ggml_backend_tensor_set": (None, [_VOID, _VOID, _SIZE, _SIZE]),
    "ggml_backend_tensor_get": (None, [_VOID, _VOID, _SIZE, _SIZE]),
    "ggml_backend_free": (None, [_VOID]),
    "ggml_backend_graph_compute": (_INT, [_VOID, _VOID]),
    "ggml_backend_supports_op": (_BOOL, [_VOID, _VOID]),
    "ggml_backend_supports_buft": (_BOOL, [_VOID, _VOID]),
    "ggml_backend_get_default_buffer_type": (_VOID, [_VOID]),
    "ggml_backend_dev_name": (_CHARS, [_VOID]),
    "ggml_backend_dev_description": (_CHARS, [_VOID]),
    "ggml_backend_dev_memory": (None, [_VOID, _VOID, _VOID]),
    "ggml_backend_dev_type": (_INT, [_VOID]),
    "ggml_backend_dev_init": (_VOID, [_VOID, _CHARS]),
    "ggml_backend_dev_buffer_type": (_VOID, [_VOID]),
    "ggml_backend_dev_backend_reg": (_VOID, [_VOID]),
    "ggml_backend_reg_get_proc_address": (_VOID, [_VOID, _CHARS]),
    "ggml_backend_dev_count": (_SIZE, []),
    "ggml_backend_dev_get": (_VOID, [_SIZE]),
    "ggml_backend_load_all_from_path": (None, [_CHARS]),
}


class Functions:
    """Declared functions of the loaded library, as attributes named like in C."""

    def __init__(self, folder: Path, libraries: list[ctypes.CDLL]) -> None:
        self.folder = folder
        for name, (result, arguments) in _DECLARED.items():
            found = [lib for lib in libraries if hasattr(lib, name)]
            if not found:
                raise LibraryError(
                    f"the ggml library in {folder} has no function {name}: use the one of "
                    f"llama-cpp-python 0.3.36"
                )
            # A fresh function object: other users of the same CDLL keep their own declarations.
            function = ctypes.CFUNCTYPE(result, *arguments)((name, found[0]))
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # Only reached for names that were never declared: a mistake inside this package.
        raise AttributeError(f"ggml function {name} is not declared in dspine.ggml.library")


_current: list[Functions] = []
"""The loaded library: at most one per process."""


def load(folder: Path) -> None:
    """Open the ggml libraries in `folder`; a second call with the same folder does nothing.

    Raises LibraryError when a file or function is missing, when the tensor layout differs from
    the pinned version, or when another folder was loaded before (one process, one library).
    """
    global _functions
    folder = Path(folder)
    if _current:
        if _current[0].folder.resolve() != folder.resolve():
            raise LibraryError(
                f"ggml was already loaded from {_current[0].folder}; start a new process to use "
                f"{folder}"
            )
        return
    functions = Functions(folder, _open(folder))
    _check_layout(functions)
    if functions.ggml_backend_dev_count() == 0:
        # Builds with backends as plug-ins register nothing until they are told where to look.
        functions.ggml_backend_load_all_from_path(str(folder).encode())
    _current.append(functions)


def loaded() -> bool:
    """Whether `load` has succeeded in this process."""
    return bool(_current)


def functions() -> Functions:
    """The declared functions; LibraryError before `load`."""
    if not _current:
        raise LibraryError("the ggml library is not loaded: load a model first")
    return _current[0]


def version() -> str:
    """Version and commit of the loaded ggml, e.g. "0.25.3 (0c1e57098)"."""
    lib = functions()
    return f"{lib.ggml_version().decode()} ({lib.ggml_commit().decode()})"


def _open(folder: Path) -> list[ctypes.CDLL]:
    """Handles in which every ggml function can be found.

    On Linux and macOS that is libllama alone, the file llama_cpp opens: a lookup in it also
    searches the ggml libraries it depends on. Opening libggml.so by path could load a second
    copy beside libggml.so.0, with a second registry of devices.
    """
    names = {
        "darwin": ["libllama.dylib"],
        "win32": ["llama.dll", "ggml.dll", "ggml-base.dll"],
    }.get(sys.platform, ["libllama.so"])
    opened = []
    for path in (folder / name for name in names):
        if not path.exists():
            raise LibraryError(
                f"{path} does not exist: point LLAMA_CPP_LIB_PATH to a folder with llama.cpp's "
                f"libraries, or unset it"
            )
        try:
            opened.append(ctypes.CDLL(str(path)))
        except OSError as error:
            raise LibraryError(
                f"{path} cannot be loaded: {error}; build it again, or unset LLAMA_CPP_LIB_PATH"
            ) from error
    return opened


def _check_layout(lib: Functions) -> None:
    expected = _OBJECT_BYTES + ctypes.sizeof(CTensor)
    found = lib.ggml_tensor_overhead()
    if found != expected:
        raise LibraryError(
            f"the ggml library in {lib.folder} stores tensors in {found} bytes, dspine expects "
            f"{expected}: use the library of llama-cpp-python 0.3.36"
        )
