"""The facts of a GGUF header that must be known before the library may load the file."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dspine.llama.library import native_functions
from dspine.llama.native import library_function

MOST_LAYERS = 512
"""Array sizes compiled into llama.cpp; more layers end the process."""


class _Init(ctypes.Structure):
    """struct gguf_init_params."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]


@dataclass(frozen=True, slots=True)
class Header:
    """What the header says; `num_layers` is None when its key is missing or no number."""

    architecture: str
    num_layers: int | None
    tensor_types: tuple[int, ...]
    """ggml numbers of the types that occur, ascending."""
    matrix_bytes: Mapping[int, int]
    """Bytes in this file by such number, without the stacked matrices of experts; empty when it
    is too short for them."""
    has_trunk: bool = True
    """False where the file holds nothing but built-in next-token (MTP) layers."""


def read_header(path: Path) -> Header | None:
    """Header of a GGUF file through the library's own reader, or None when it refuses it."""
    facts = path.stat()
    return _read(path.resolve(), facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=8)
def _read(path: Path, file_size: int, _modified: int) -> Header | None:
    native, pointer = native_functions(), ctypes.c_void_p
    number, text, size = ctypes.c_int64, ctypes.c_char_p, ctypes.c_size_t
    init = library_function(native, "gguf_init_from_file", [text, _Init], pointer)
    close = library_function(native, "gguf_free", [pointer], None)
    count = library_function(native, "gguf_get_n_tensors", [pointer], number)
    tensor_type = library_function(native, "gguf_get_tensor_type", [pointer, number], ctypes.c_int)
    tensor_name = library_function(native, "gguf_get_tensor_name", [pointer, number], text)
    tensor_size = library_function(native, "gguf_get_tensor_size", [pointer, number], size)
    find = library_function(native, "gguf_find_key", [pointer, text], number)
    kind = library_function(native, "gguf_get_kv_type", [pointer, number], ctypes.c_int)
    string = library_function(native, "gguf_get_val_str", [pointer, number], text)
    unsigned = library_function(native, "gguf_get_val_u32", [pointer, number], ctypes.c_uint32)
    uint32, string_type = 4, 8
    header = init(str(path).encode(), _Init(True, None))
    if not header:
        return None
    try:
        matrix_bytes: dict[int, int] = defaultdict(int)
        begins = False
        for i in range(count(header)):
            name = tensor_name(header, i)
            begins = begins or name.startswith(b"blk.0.")
            stacked = b"_exps." in name
            matrix_bytes[tensor_type(header, i)] += 0 if stacked else tensor_size(header, i)
        types = tuple(sorted(matrix_bytes))
        if sum(matrix_bytes.values()) > file_size:
            matrix_bytes = {}  # cut off or damaged: the load says so
        key = find(header, b"general.architecture")
        named = key >= 0 and kind(header, key) == string_type
        architecture = string(header, key).decode("utf-8", "replace") if named else "unknown"
        layers, extra = (
            unsigned(header, key) if key >= 0 and kind(header, key) == uint32 else None
            for key in (
                find(header, f"{architecture}.{name}".encode())
                for name in ("block_count", "nextn_predict_layers")
            )
        )
        # A part of a split file may have no tensors at all.
        has_trunk = not extra or (layers != extra and (begins or not types))
        return Header(architecture, layers, types, matrix_bytes, has_trunk)
    finally:
        close(header)
