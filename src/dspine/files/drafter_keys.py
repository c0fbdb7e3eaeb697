"""The metadata keys of a drafter GGUF: from configuration to keys and, strictly, back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspine.errors import FileError
from dspine.files import dflash_keys
from dspine.files.gguf_file import GgufHeader
from dspine.files.gguf_writer import WritableValue
from dspine.files.schema import (
    ARCHITECTURE,
    DFLASH_ARCHITECTURE,
    DrafterConfig,
    DSpineConfig,
    Pair,
    TrainingRecord,
)
from dspine.files.typed_keys import (
    Keys,
    checked_curve,
    float32,
    provenance_json,
    read_provenance,
    read_target_keys,
    target_values,
    uint32,
)

_PREFIX = f"{ARCHITECTURE}."
_COUNTS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "target_hidden_size": "target.embedding_length",
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "transfer_rank": "transfer_rank",
    "message_size": "message_size",
    "top_k": "top_k",
    "max_positions": "context_length",
}
"""Whole numbers: field of DSpineConfig -> key without the architecture."""
_REQUIRED_FOR = {
    "attention.causal": "whether each layer's attention inside the block is causal",
    "attention.sliding_window": "the window of each layer (0 for none)",
}


def to_metadata(
    config: DrafterConfig, pair: Pair | None, record: TrainingRecord, target: Path | None = None
) -> dict[str, WritableValue]:
    """All keys of a drafter file of its kind. Raises FileError when the record cannot be stored.

    `pair` may be None for DFlash kinds. `target` is the target's GGUF, whose tokenizer goes into
    their files.
    """
    if not isinstance(config, DSpineConfig):
        return dflash_keys.to_metadata(config, pair, record, target)
    if pair is None:
        raise FileError("a DSpine file must say which target it is for: give the pair")
    values: dict[str, WritableValue] = {
        key: uint32(field, getattr(config, field)) for field, key in _COUNTS.items()
    }
    values |= {
        "attention.value_length": uint32("head_dim", config.head_dim),
        "attention.layer_norm_rms_epsilon": float32("rms_norm_eps", config.rms_norm_eps),
        "rope.freq_base": float32("rope_theta", config.rope_theta),
        # As in llama.cpp's files for this family: the input of layer i + 1 is read.
        "target_layers": np.array([uint32("taps", t + 1) for t in config.taps]),
        "attention.causal": np.array(config.causal, dtype=np.bool_),
        "attention.sliding_window": np.array([uint32("windows", w or 0) for w in config.windows]),
        "target.vocab_size": uint32("the target's vocab_size", pair.vocab_size),
        **target_values(pair),
        "acceptance_curve": np.array(checked_curve(config, record), dtype=np.float32),
        "training": provenance_json(record),
    }
    metadata: dict[str, WritableValue] = {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.quantization_version": np.uint32(2),
    }
    return metadata | {_PREFIX + key: value for key, value in values.items()}


def from_metadata(
    path: Path, header: GgufHeader, draft_vocab_size: int | None
) -> tuple[DrafterConfig, Pair | None, TrainingRecord]:
    """Read every key strictly: missing, mistyped and unknown keys raise FileError."""
    if header.architecture == DFLASH_ARCHITECTURE:
        return dflash_keys.from_metadata(path, header, draft_vocab_size)
    keys = Keys(path, header.metadata, _PREFIX, _REQUIRED_FOR)
    counts: dict[str, Any] = {field: keys.count(key) for field, key in _COUNTS.items()}
    if (value_length := keys.count("attention.value_length")) != counts["head_dim"]:
        raise keys.wrong("attention.value_length", f"{counts['head_dim']}", value_length)
    taps = keys.counts("target_layers")
    if 0 in taps:
        raise keys.wrong("target_layers", "numbers from 1 (layer id + 1)", list(taps))
    causal = keys.booleans("attention.causal")
    windows = keys.counts("attention.sliding_window")
    pair = read_target_keys(
        keys,
        hidden_size=counts["target_hidden_size"],
        vocab_size=keys.count("target.vocab_size"),
    )
    eps = keys.number("attention.layer_norm_rms_epsilon")
    theta = keys.number("rope.freq_base")
    curve = keys.numbers("acceptance_curve")
    provenance = read_provenance(keys)
    keys.refuse_unknown()
    try:
        config = DSpineConfig(
            **counts,
            taps=tuple(t - 1 for t in taps),
            windows=tuple(w or None for w in windows),
            causal=causal,
            rope_theta=theta,
            rms_norm_eps=eps,
            draft_vocab_size=draft_vocab_size,
        )
        record = TrainingRecord(curve, provenance)
        checked_curve(config, record)
    except FileError as error:
        raise FileError(f"{path}: {error}") from error
    return config, pair, record
