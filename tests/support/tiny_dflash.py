"""Tiny DFlash and DFlash2 drafters with random weights, beside their NumPy oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.drafters.dflash import DFlashDrafter
from dspine.drafters.dflash2 import DFlash2Drafter
from dspine.files.schema import DFlash2Config, DFlashConfig, tensor_specs
from dspine.ggml import HostTensor
from tests.support.numpy_dflash import NumpyDFlash, random_tensors

FloatArray = npt.NDArray[np.float32]


def tiny_config(kind: str, **changes: Any) -> DFlashConfig | DFlash2Config:
    """2 layers; every size differs, so that none is mistaken for another."""
    base: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 80,
        "target_hidden_size": 96,
        "block_size": 6,
        "taps": (1, 3, 4),
        "mask_token_id": 7,
        "windows": (None, 10),
        "causal": (False, False),
        "rope_theta": 1000.0,
    }
    if kind == "DFlash":
        return DFlashConfig(**(base | changes))
    own = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 32, "top_k": 5}
    return DFlash2Config(**(base | own | changes))


@dataclass
class TinyDFlash:
    """Random weights of a drafter, and of the two tables of the target or its own."""

    config: DFlashConfig | DFlash2Config
    seed: int = 0
    tied: bool = True
    own_head: bool = False
    tensors: dict[str, FloatArray] = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        c = self.config
        self.tensors = random_tensors(c, self.random)
        self.draft_vocab: npt.NDArray[np.int32] | None = None
        if c.draft_vocab_size is not None:
            chosen = self.random.permutation(c.vocab_size)[: c.draft_vocab_size]
            self.draft_vocab = chosen.astype(np.int32)
        shape = (c.vocab_size, c.hidden_size)
        self.embedding = self.random.standard_normal(shape).astype(np.float32)
        self.head = self.embedding
        if not self.tied:
            self.head = self.random.standard_normal(shape).astype(np.float32)

    def features(self, count: int) -> FloatArray:
        shape = (count, self.config.feature_size)
        return self.random.standard_normal(shape).astype(np.float32)

    def oracle(self) -> NumpyDFlash:
        head = self.head if self.draft_vocab is None else self.head[self.draft_vocab]
        return NumpyDFlash(self.config, self.tensors, self.embedding, head, self.draft_vocab)

    def drafter(
        self, *, type_name: str = "f32", target_type: str = "f32"
    ) -> DFlashDrafter | DFlash2Drafter:
        stored = {
            s.gguf_name: HostTensor.quantised(self.tensors[s.gguf_name], type_name)
            if s.is_matrix
            else self.tensors[s.gguf_name]
            for s in tensor_specs(self.config)
        }
        embedding = HostTensor.quantised(self.embedding, target_type)
        head = embedding if self.tied else HostTensor.quantised(self.head, target_type)
        if self.own_head and self.draft_vocab is not None:
            head = HostTensor.quantised(self.head[self.draft_vocab], target_type)
        options: dict[str, Any] = {
            "embedding": embedding,
            "head": head,
            "n_ctx": 128,
            "draft_vocab": self.draft_vocab,
            "reduced_head": self.own_head,
            "cache_type": "f32",
        }
        if isinstance(self.config, DFlash2Config):
            return DFlash2Drafter(self.config, stored, **options)
        return DFlashDrafter(self.config, stored, **options)
