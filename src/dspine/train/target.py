"""What training needs of the target itself: embedding, head, norms and layers, dequantised."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspine.errors import FileError, UsageError
from dspine.files.gguf_file import dequantised_tensor, find_tensor, read_header
from dspine.files.pairing import describe_target
from dspine.files.schema import (
    DFlash2Config,
    DFlashConfig,
    DrafterConfig,
    DSpineConfig,
    Pair,
    default_taps,
)

KINDS = ("dspine", "dflash", "dflash2")
"""The kinds of drafter that can be trained, by the names that `--kind` takes."""


@dataclass(frozen=True, slots=True)
class Target:
    """A target's file, read for training. Tensors are float32 in PyTorch order."""

    path: Path
    pair: Pair
    embedding: Tensor
    """(V, H)."""
    head: Tensor
    """(V, H); the embedding itself when the target ties them."""
    rms_norm_eps: float
    rope_theta: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int

    @classmethod
    def read(cls, path: Path) -> Target:
        """Read the parts every run needs; layers are read on demand by `tensor`."""
        pair = describe_target(path)
        header = read_header(path)
        arch = header.architecture

        def number(key: str, default: float | None = None) -> float:
            value = header.metadata.get(f"{arch}.{key}", default)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise FileError(
                    f"{path} has no number {arch}.{key}: name the drafter's geometry yourself"
                )
            return value

        heads = int(number("attention.head_count"))
        embedding = torch.from_numpy(dequantised_tensor(path, "token_embd.weight").copy())
        head = embedding
        if find_tensor(path, "output.weight") is not None:
            head = torch.from_numpy(dequantised_tensor(path, "output.weight").copy())
        return cls(
            path=path,
            pair=pair,
            embedding=embedding,
            head=head,
            rms_norm_eps=float(number("attention.layer_norm_rms_epsilon", 1e-6)),
            rope_theta=float(number("rope.freq_base", 10000.0)),
            num_heads=heads,
            num_kv_heads=int(number("attention.head_count_kv", heads)),
            head_dim=int(number("attention.key_length", pair.hidden_size // heads)),
            intermediate_size=int(number("feed_forward_length")),
        )

    def tensor(self, name: str) -> Tensor | None:
        """A tensor by its GGUF name as float32, or None when the target has none of that name."""
        if find_tensor(self.path, name) is None:
            return None
        return torch.from_numpy(dequantised_tensor(self.path, name).copy())

    def drafter_config(
        self,
        *,
        kind: str = "dspine",
        num_layers: int = 3,
        block_size: int = 8,
        taps: tuple[int, ...] | None = None,
        transfer_rank: int = 192,
        message_size: int = 128,
        top_k: int = 16,
        conv_kernel_size: int = 2,
        conv_group_size: int = 16,
        selector_rank: int = 64,
        window: int | None = 512,
        mask_token_id: int = 16,
        causal: bool = False,
        intermediate_size: int | None = None,
        draft_vocab_size: int | None = None,
        max_positions: int = 8192,
    ) -> DrafterConfig:
        """A drafter of this target's own shape: heads, hidden size, rotary base, norm epsilon.

        `kind` is dspine, dflash or dflash2; what another kind needs is not looked at. `causal`
        only matters to the latter two, DSpine always is.
        """
        if taps is None:
            taps = default_taps(self.pair.num_layers, 5)
        backbone: dict[str, Any] = {
            "hidden_size": self.pair.hidden_size,
            "intermediate_size": intermediate_size or self.intermediate_size,
            "num_layers": num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.pair.vocab_size,
            "target_hidden_size": self.pair.hidden_size,
            "block_size": block_size,
            "taps": taps,
            "mask_token_id": mask_token_id,
            "windows": (window,) * num_layers,
            "causal": (causal or kind == "dspine",) * num_layers,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "max_positions": max_positions,
            "draft_vocab_size": draft_vocab_size,
        }
        if kind == "dspine":
            return DSpineConfig(
                **backbone, transfer_rank=transfer_rank, message_size=message_size, top_k=top_k
            )
        if kind == "dflash2":
            return DFlash2Config(
                **backbone,
                conv_kernel_size=conv_kernel_size,
                conv_group_size=conv_group_size,
                selector_rank=selector_rank,
                top_k=top_k,
            )
        if kind == "dflash":
            return DFlashConfig(**backbone)
        raise UsageError(f"there is no kind of drafter {kind!r}: choose one of {', '.join(KINDS)}")
