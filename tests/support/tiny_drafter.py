"""Tiny DSpine drafters with random weights, on the CPU device, beside their NumPy oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.drafters.dspine import DSpineDrafter
from dspine.files.schema import DSpineConfig, tensor_specs
from dspine.ggml import HostTensor
from tests.support.numpy_dspine import NumpyDSpine, random_tensors

FloatArray = npt.NDArray[np.float32]


def tiny_config(windows: tuple[int | None, ...] = (None, None), **changes: Any) -> DSpineConfig:
    """2 layers unless `windows` says otherwise; every size differs, so that none is mistaken."""
    base: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": len(windows),
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 80,
        "target_hidden_size": 48,
        "block_size": 6,
        "taps": (1, 3),
        "mask_token_id": 7,
        "windows": windows,
        "causal": (True,) * len(windows),
        "transfer_rank": 32,
        "message_size": 32,
        "top_k": 5,
        "rope_theta": 1000.0,
    }
    return DSpineConfig(**(base | changes))


@dataclass
class TinyPair:
    """Random weights of a drafter and of the two target tensors it reads."""

    config: DSpineConfig
    seed: int = 0
    tied: bool = True
    tensors: dict[str, FloatArray] = field(init=False)
    draft_vocab: npt.NDArray[np.int32] | None = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        c = self.config
        self.tensors = random_tensors(c, self.random)
        self.draft_vocab = None
        if c.draft_vocab_size is not None:
            chosen = self.random.permutation(c.vocab_size)[: c.draft_vocab_size]
            self.draft_vocab = chosen.astype(np.int32)

    @cached_property
    def embedding(self) -> FloatArray:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return np.random.default_rng(self.seed + 1000).standard_normal(shape).astype(np.float32)

    @cached_property
    def head(self) -> FloatArray:
        if self.tied:
            return self.embedding
        rows = np.random.default_rng(self.seed + 2000).standard_normal(self.embedding.shape)
        return rows.astype(np.float32)

    def features(self, count: int) -> FloatArray:
        shape = (count, self.config.feature_size)
        return self.random.standard_normal(shape).astype(np.float32)

    def oracle(self) -> NumpyDSpine:
        return NumpyDSpine(self.config, self.tensors, self.embedding, self.head, self.draft_vocab)

    def stored(self, type_name: str) -> Mapping[str, FloatArray | HostTensor]:
        """The drafter's tensors with matrices as `type_name`."""
        specs = tensor_specs(self.config)
        return {
            s.gguf_name: HostTensor.quantised(self.tensors[s.gguf_name], type_name)
            if s.is_matrix
            else self.tensors[s.gguf_name]
            for s in specs
        }

    def drafter(
        self,
        *,
        n_ctx: int = 128,
        type_name: str = "f32",
        target_type: str = "f32",
        cache_type: str = "f32",
        n_threads: int = 1,
    ) -> DSpineDrafter:
        embedding = HostTensor.quantised(self.embedding, target_type)
        head = embedding if self.tied else HostTensor.quantised(self.head, target_type)
        return DSpineDrafter(
            self.config,
            self.stored(type_name),
            embedding=embedding,
            head=head,
            n_ctx=n_ctx,
            n_threads=n_threads,
            draft_vocab=self.draft_vocab,
            cache_type=cache_type,
        )
