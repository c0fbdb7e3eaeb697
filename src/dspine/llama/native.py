"""The functions of the loaded library; the only place that knows symbols and C signatures."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine.errors import LibraryError

SET_TAP = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
GET_TAP = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
GET_TENSOR = "_ZNK11llama_model10get_tensorEPKc"

MANDATORY = (
    "llama_backend_init",
    "llama_batch_free",
    "llama_context_default_params",
    "llama_decode",
    "llama_free",
    "llama_get_embeddings_ith",
    "llama_get_logits_ith",
    "llama_get_memory",
    "llama_init_from_model",
    "llama_log_set",
    "llama_max_parallel_sequences",
    "llama_memory_clear",
    "llama_memory_seq_cp",
    "llama_memory_seq_pos_max",
    "llama_memory_seq_pos_min",
    "llama_memory_seq_rm",
    "llama_model_default_params",
    "llama_model_free",
    "llama_model_get_vocab",
    "llama_model_has_decoder",
    "llama_model_has_encoder",
    "llama_model_is_diffusion",
    "llama_model_is_hybrid",
    "llama_model_is_recurrent",
    "llama_model_load_from_file",
    "llama_model_meta_val_str",
    "llama_model_n_ctx_train",
    "llama_model_n_embd",
    "llama_model_n_embd_out",
    "llama_model_n_head",
    "llama_model_n_layer",
    "llama_model_n_params",
    "llama_model_n_swa",
    "llama_model_size",
    "llama_n_batch",
    "llama_n_ctx_seq",
    "llama_print_system_info",
    "llama_set_n_threads",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_get_size_ext",
    "llama_state_seq_set_data_ext",
    "llama_synchronize",
    "llama_token_to_piece",
    "llama_tokenize",
    "llama_version",
    "llama_vocab_bos",
    "llama_vocab_eos",
    "llama_vocab_get_text",
    "llama_vocab_is_eog",
    "llama_vocab_n_tokens",
    "llama_vocab_type",
)
"""Without one of these the library cannot serve; all are plain C names of llama.h."""


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded library: `api` is llama_cpp.llama_cpp, the rest are direct bindings.

    Pointers are plain integers here. `set_tap` and `get_tap` are None when this build does not
    export them; `get_tensor` likewise. What takes microseconds keeps Python's lock: giving it up
    would let another thread in between, for as long as that likes.
    """

    api: Any
    decode: Callable[..., int]
    synchronize: Callable[[int], None]
    logits_row: Callable[[int, int], int | None]
    hidden_row: Callable[[int, int], int | None]
    set_tap: Callable[[int, int, bool], None] | None
    get_tap: Callable[[int, int], int | None] | None
    get_tensor: Callable[[int, bytes], int | None] | None
    remove_positions: Callable[[int, int, int, int], bool]
    last_position: Callable[[int, int], int]
    is_end: Callable[[int, int], bool]
    piece: Callable[[int, int, int, int, int, bool], int]
    """The bytes of a token go to an address with so much room; minus their number if too little."""


def shared_library_name(stem: str) -> str:
    """File name of a shared library on this system, e.g. `libllama.so`."""
    if sys.platform == "win32":
        return f"{stem}.dll"
    return f"lib{stem}.dylib" if sys.platform == "darwin" else f"lib{stem}.so"


def library_file(folder: Path, stem: str) -> Path | None:
    """The library `stem` in `folder`, under any of the names that builds give it."""
    names = (shared_library_name(stem), f"lib{stem}.so", f"lib{stem}.dll")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def bind(api: Any, folder: Path) -> Native:
    """Check the symbols of the already imported low-level module and bind what it lacks."""
    lib = api._lib
    missing = missing_symbols(lib, MANDATORY)
    if missing:
        raise LibraryError(
            f"the llama.cpp library in {folder} has no function {missing[0]}: it is not the "
            f"version that this dspine expects; use the library of llama-cpp-python 0.3.36"
        )
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    taps = not missing_symbols(lib, (SET_TAP, GET_TAP))
    tensors = not missing_symbols(lib, (GET_TENSOR,))
    return Native(
        api=api,
        decode=_function(lib, "llama_decode", [pointer, api.llama_batch], number),
        synchronize=_function(lib, "llama_synchronize", [pointer], None),
        logits_row=_quick(lib, "llama_get_logits_ith", [pointer, number], pointer),
        hidden_row=_quick(lib, "llama_get_embeddings_ith", [pointer, number], pointer),
        set_tap=_function(lib, SET_TAP, [pointer, ctypes.c_uint32, ctypes.c_bool], None)
        if taps
        else None,
        get_tap=_quick(lib, GET_TAP, [pointer, ctypes.c_uint32], pointer) if taps else None,
        get_tensor=_function(lib, GET_TENSOR, [pointer, ctypes.c_char_p], pointer)
        if tensors
        else None,
        remove_positions=_quick(
            lib, "llama_memory_seq_rm", [pointer, number, number, number], ctypes.c_bool
        ),
        last_position=_quick(lib, "llama_memory_seq_pos_max", [pointer, number], number),
        is_end=_quick(lib, "llama_vocab_is_eog", [pointer, number], ctypes.c_bool),
        piece=_quick(
            lib,
            "llama_token_to_piece",
            [pointer, number, pointer, number, number, ctypes.c_bool],
            number,
        ),
    )


def missing_symbols(lib: Any, names: tuple[str, ...]) -> list[str]:
    """Which of `names` the library does not export."""
    return [name for name in names if not hasattr(lib, name)]


def library_function(native: Native, name: str, arguments: list[Any], result: Any) -> Any:
    """A function of the llama library or of the ggml libraries below it."""
    lib = native.api._lib
    if not hasattr(lib, name):
        raise LibraryError(
            f"the llama.cpp library has no function {name}: it is not the version that this "
            f"dspine expects; use the library of llama-cpp-python 0.3.36"
        )
    return _function(lib, name, arguments, result)


def _function(lib: Any, name: str, arguments: list[Any], result: Any) -> Any:
    # A prototype of its own: attributes of a CDLL are shared with llama-cpp-python, whose
    # signatures return typed pointers that cost a conversion on every call.
    return ctypes.CFUNCTYPE(result, *arguments)((name, lib))


def _quick(lib: Any, name: str, arguments: list[Any], result: Any) -> Any:
    """The same for what is quicker than letting other threads run."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, lib))
