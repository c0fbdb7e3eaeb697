"""DFlash and DFlash2 run by llama.cpp itself: its `dflash` architecture, called as its own
speculative loop does, for a comparison with our graphs on the same file.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dspine.files.drafter_file import read_drafter
from dspine.files.schema import DFlash2Config
from dspine.llama.context import Context

FloatArray = npt.NDArray[np.float32]
_SET_NEXTN = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
_GET_NEXTN = "_Z30llama_get_embeddings_nextn_ithP13llama_contexti"


@dataclass(frozen=True, slots=True)
class Block:
    """One block; rows are slots 1 ... width - 1."""

    hidden: FloatArray
    logits: FloatArray
    tokens: list[int]
    walked: list[FloatArray]
    """DFlash2: the row of scores of each step of the walk."""


class LlamaDFlash:
    """A drafter file in a context of llama.cpp whose `ctx_other` is the target's."""

    def __init__(self, path: Path, target: Context, *, n_ctx: int = 1024) -> None:
        self._file = read_drafter(path)
        self._target = target
        api: Any = target.model.handle.native.api
        self._api = api
        lib = ctypes.CDLL(api._lib._name)
        self._set_nextn, self._get_nextn = lib[_SET_NEXTN], lib[_GET_NEXTN]
        self._set_nextn.argtypes = (ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool)
        self._set_nextn.restype = None
        self._get_nextn.argtypes = (ctypes.c_void_p, ctypes.c_int32)
        self._get_nextn.restype = ctypes.POINTER(ctypes.c_float)
        self._model = api.llama_model_load_from_file(
            str(path).encode(), api.llama_model_default_params()
        )
        assert self._model, f"llama.cpp does not load {path}"
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = params.type_v = api.GGML_TYPE_F32
        params.embeddings = True
        params.pooling_type = api.LLAMA_POOLING_TYPE_NONE
        params.swa_full = True
        params.ctx_other = target._pointer()
        self._context = api.llama_init_from_model(self._model, params)
        assert self._context, f"llama.cpp makes no context for {path}"
        causal = self._file.config.causal
        assert len(set(causal)) == 1, "llama.cpp has one flag for all layers"
        api.llama_set_causal_attn(self._context, causal[0])
        self._set_nextn(self._context, isinstance(self._file.config, DFlash2Config), False)
        self._position = 0

    def add_context(self, features: FloatArray) -> None:
        """Inject the K/V of confirmed tokens at the next positions."""
        count, width = features.shape
        # Four positions a row, where the file asks for those of M-RoPE.
        batch = self._api.llama_batch_init(4 * count, width, 1)
        ctypes.memmove(batch.embd, np.ascontiguousarray(features).ctypes.data, features.nbytes)
        self._decode(batch, count)
        self._position += count

    def draft(self, anchor: int, width: int) -> Block:
        """The block after the context; its own K/V are forgotten again."""
        api, c = self._api, self._file.config
        batch = api.llama_batch_init(width, 0, 1)
        for slot in range(width):
            batch.token[slot] = anchor if slot == 0 else c.mask_token_id
        self._decode(batch, width)
        rows = range(1, width)
        hidden = [self._row(api.llama_get_embeddings_ith, i, c.hidden_size) for i in rows]
        logits = [self._row(api.llama_get_logits_ith, i, c.vocab_size) for i in rows]
        tokens = [int(row.argmax()) for row in logits]
        walked: list[FloatArray] = []
        if isinstance(c, DFlash2Config):
            tokens, walked = self._walk(width, c.top_k, c.hidden_size)
        memory = api.llama_get_memory(self._context)
        assert api.llama_memory_seq_rm(memory, 0, self._position, -1)
        return Block(np.array(hidden), np.array(logits), tokens, walked)

    def _walk(self, width: int, k: int, size: int) -> tuple[list[int], list[FloatArray]]:
        """llama.cpp leaves ids and scores of a slot in a row; its program walks on the CPU."""
        tokens, walked, before = list[int](), list[FloatArray](), 0
        for slot in range(1, width):
            packed = self._row(self._get_nextn, slot, size)
            row = packed[k : k + k * k].reshape(k, k)[before]
            before = int(row.argmax())
            walked.append(row)
            tokens.append(int(packed[before]))
        return tokens, walked

    def _row(self, get: Any, row: int, size: int) -> FloatArray:
        pointer = get(self._context, row)
        assert pointer
        return np.ctypeslib.as_array(pointer, shape=(size,)).copy()

    def _decode(self, batch: Any, count: int) -> None:
        batch.n_tokens = count
        for row in range(count):
            for part in range(4 if batch.embd else 1):
                batch.pos[part * count + row] = self._position + row
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = 1
        code = self._api.llama_decode(self._context, batch)
        self._api.llama_batch_free(batch)
        assert code == 0, code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)
