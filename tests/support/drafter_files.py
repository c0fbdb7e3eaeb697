"""Small drafters with made-up weights, and GGUF bytes written field by field."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.files.schema import (
    DFlash2Config,
    DFlashConfig,
    DrafterConfig,
    DSpineConfig,
    Pair,
    Sketch,
    TrainingRecord,
    tensor_specs,
)

_BACKBONE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "target_hidden_size": 64,
    "block_size": 5,
    "taps": (1, 4),
    "mask_token_id": 159,
    "windows": (None, 24),
    "causal": (False, False),
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-6,
    "max_positions": 2048,
}
SMALL = DSpineConfig(
    **{**_BACKBONE, "causal": (True, True)}, transfer_rank=32, message_size=20, top_k=4
)
"""message_size 20 is not a multiple of 32, so Q8_0 has to fall back for the write matrices."""
SMALL_DFLASH = DFlashConfig(**_BACKBONE)
SMALL_DFLASH2 = DFlash2Config(
    **_BACKBONE, conv_kernel_size=3, conv_group_size=16, selector_rank=32, top_k=6
)

PAIR = Pair(
    name="A target",
    architecture="llama",
    hidden_size=64,
    num_layers=8,
    vocab_size=160,
    vocab_hash="ab" * 32,
    fingerprint="cd" * 32,
    thinking=True,
    sketch=Sketch(
        names=("token_embd.weight", "blk.0.attn_norm.weight"),
        types=("q8_0", "f32"),
        sizes=(64, 3),
        data=bytes(range(80)),
    ),
)
RECORD = TrainingRecord((0.75, 0.5, 0.25, 0.125), {"command": "fit", "answers": 12, "curve": [1.5]})


def weights(
    config: DrafterConfig = SMALL, dtype: str = "float32", seed: int = 3
) -> dict[str, npt.NDArray[np.generic]]:
    """Normal random numbers for every tensor; `dtype` "bfloat16" gives uint16 bits."""
    rng = np.random.default_rng(seed)
    made: dict[str, npt.NDArray[np.generic]] = {}
    for spec in tensor_specs(config):
        values = rng.standard_normal(spec.shape).astype(np.float32)
        if dtype == "bfloat16":
            # Truncation, so that this does not lean on the conversion under test.
            made[spec.torch_name] = (values.view(np.uint32) >> 16).astype(np.uint16)
        else:
            made[spec.torch_name] = values.astype(dtype)
    return made


def with_reduced_head(config: DSpineConfig = SMALL, size: int = 48) -> DSpineConfig:
    """The same drafter choosing among `size` tokens only."""
    return replace(config, draft_vocab_size=size)


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair_u32(key: str, value: int) -> bytes:
    """A key with an unsigned 32-bit number (type 4)."""
    return text(key) + struct.pack("<II", 4, value)


def pair_text(key: str, value: str | bytes) -> bytes:
    """A key with a text (type 8)."""
    return text(key) + struct.pack("<I", 8) + text(value)


def tensor_entry(name: str | bytes, ne: tuple[int, ...], kind: int, offset: int) -> bytes:
    """One entry of the tensor list."""
    return text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


def gguf_bytes(
    pairs: list[bytes],
    entries: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file; `counts` (tensors, pairs) may lie."""
    n_tensors, n_pairs = counts if counts is not None else (len(entries), len(pairs))
    header = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_pairs)
    header += b"".join(pairs) + b"".join(entries)
    return header + bytes(-len(header) % alignment) + data
