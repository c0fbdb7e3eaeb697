"""The metadata of a DFlash or DFlash2 GGUF: llama.cpp's `dflash.*` keys, and ours beside them.

llama.cpp has no place for the pair, the training record and the acceptance curve, so these are
`dspine.*` keys, which it passes over. Files of others have none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspine.errors import FileError
from dspine.files.gguf_file import GgufHeader, read_header
from dspine.files.gguf_writer import WritableValue
from dspine.files.mapped import printable
from dspine.files.schema import (
    DFLASH_ARCHITECTURE,
    SINK_TENSORS,
    DFlash2Config,
    DFlashConfig,
    DrafterConfig,
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
    writable,
)

OURS = "dspine."
_PREFIX = f"{DFLASH_ARCHITECTURE}."
_TOKENIZER = "tokenizer.ggml."
_COUNTS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "block_size": "block_size",
    "max_positions": "context_length",
}
_DFLASH2_COUNTS: Mapping[str, str] = {
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "top_k": "selector_top_k",
}
_SCALES: Mapping[str, str] = {
    "embedding_scale": "embedding_scale",
    "logit_scale": "logit_scale",
    "logit_softcap": "final_logit_softcapping",
    "value_scale": "attention.value_scale",
}
"""Numbers that may be missing: field of DrafterConfig -> key. 0 is as if it were missing."""
_REQUIRED_FOR: Mapping[str, str] = {
    "block_size": "how many tokens a block has",
    "target_layers": "which of the target's layers are read",
    "attention.sliding_window_pattern": "which layers have the window",
}
_OTHER_KEYS: Mapping[str, tuple[str, str]] = {
    "hyper_connection.count": ("the DeepSeek-V4 form of DSpark", "llama.cpp"),
    "attention.scale": ("an attention scale of its own", "llama.cpp"),
}
_OTHER_TENSORS: Mapping[str, tuple[str, str]] = {
    "markov_w1": ("the Markov head of DSpark", "llama.cpp, vLLM and SGLang"),
    "conf_proj": ("the confidence head of DSpark", "llama.cpp, vLLM and SGLang"),
    "prefix_gru": ("the recurrent head of Domino", "SGLang"),
    "embed_proj": ("the recurrent head of Domino", "SGLang"),
    "post_attention_norm": ("a norm after attention", "llama.cpp"),
    "post_ffw_norm": ("a norm after the feed-forward part", "llama.cpp"),
    "layer_output_scale": ("scaled layer outputs", "llama.cpp"),
    "rope_freqs": ("rotary frequencies of its own", "llama.cpp"),
    "scale": ("weights with a separate scale", "llama.cpp"),
}
"""Part of a tensor's name -> what it means, and who runs it."""


def to_metadata(
    config: DrafterConfig,
    pair: Pair | None,
    record: TrainingRecord,
    target: Path | None = None,
) -> dict[str, WritableValue]:
    """All keys of a file. With the target's GGUF its tokenizer is copied, which llama.cpp needs
    to run the drafter; without it dspine alone can. Raises FileError for what has no key.
    """
    if config.target_hidden_size != config.hidden_size:
        raise FileError(
            f"the drafter's hidden_size {config.hidden_size} is not its target's "
            f"{config.target_hidden_size}: a {config.kind} file has one number for both, so keep "
            "the folder"
        )
    values: dict[str, WritableValue] = {
        key: uint32(field, getattr(config, field)) for field, key in _COUNTS.items()
    }
    values |= {
        "vocab_size": uint32("vocab_size", config.vocab_size),
        "attention.value_length": uint32("head_dim", config.head_dim),
        "attention.layer_norm_rms_epsilon": float32("rms_norm_eps", config.rms_norm_eps),
        "rope.freq_base": float32("rope_theta", config.rope_theta),
        # llama.cpp reads the input of layer i + 1.
        "target_layers": np.array([uint32("taps", t + 1) for t in config.taps]),
        # One flag for all layers; ours below says it for each.
        "attention.causal": all(config.causal),
    }
    values |= {_SCALES[field]: float32(field, value) for field, value in config.scales.items()}
    if config.rotary_size is not None:
        values["rope.dimension_count"] = uint32("rotary_size", config.rotary_size)
    windows = {w for w in config.windows if w is not None}
    if len(windows) > 1:
        raise FileError(
            f"the layers have windows of {sorted(windows)}: a {config.kind} file has one window "
            "for all layers that have any, so keep the folder"
        )
    if windows:
        values["attention.sliding_window"] = uint32("windows", windows.pop())
        pattern = [w is not None for w in config.windows]
        values["attention.sliding_window_pattern"] = np.array(pattern, dtype=np.bool_)
    if isinstance(config, DFlash2Config):
        values |= {
            key: uint32(field, getattr(config, field)) for field, key in _DFLASH2_COUNTS.items()
        }
    ours = _our_values(config, pair, record)
    return {
        "general.architecture": DFLASH_ARCHITECTURE,
        "general.type": "model",
        "general.quantization_version": np.uint32(2),
        **{_PREFIX + key: value for key, value in values.items()},
        **_tokenizer_keys(target),
        _TOKENIZER + "mask_token_id": uint32("mask_token_id", config.mask_token_id),
        **{OURS + key: value for key, value in ours.items()},
    }


def _our_values(
    config: DrafterConfig, pair: Pair | None, record: TrainingRecord
) -> dict[str, WritableValue]:
    """What only dspine writes and reads, under its own prefix."""
    values: dict[str, WritableValue] = {
        "attention.causal": np.array(config.causal, dtype=np.bool_),
        "acceptance_curve": np.array(checked_curve(config, record), dtype=np.float32),
        "training": provenance_json(record),
    }
    if pair is not None:
        values |= target_values(pair)
    return values


def from_metadata(
    path: Path, header: GgufHeader, draft_vocab_size: int | None
) -> tuple[DrafterConfig, Pair | None, TrainingRecord]:
    """Read the keys strictly; the pair is None in a file that does not say it.

    Raises FileError for missing, mistyped and unknown keys, and for drafters of this family
    that need more than DFlash and DFlash2 have.
    """
    refuse_others(path, header)
    keys = Keys(path, header.metadata, _PREFIX, _REQUIRED_FOR)
    counts = {field: keys.count(key) for field, key in _COUNTS.items()}
    # Before lists of that length are made.
    if (layers := counts["num_layers"]) > len(header.tensors):
        raise keys.wrong("block_count", f"at most {len(header.tensors)}, as tensors", layers)
    vocab_size = _vocab_size(path, header, keys)
    taps = keys.counts("target_layers")
    if not taps or 0 in taps:
        raise keys.wrong("target_layers", "numbers from 1 (layer id + 1)", list(taps))
    eps = keys.number("attention.layer_norm_rms_epsilon")
    theta = keys.number("rope.freq_base") if "rope.freq_base" in keys else 10000.0
    stated = {f: keys.number(k) for f, k in _SCALES.items() if k in keys}
    scales: dict[str, Any] = {field: value for field, value in stated.items() if value}
    rotary_size = _rotary_size(keys, counts["head_dim"])
    windows = _windows(keys, counts["num_layers"])
    is_second = "selector_hidden.weight" in header.tensors
    extra = {f: keys.count(k) for f, k in _DFLASH2_COUNTS.items()} if is_second else {}
    if not is_second and "selector_top_k" in keys:
        raise FileError(
            f"{path} has {_PREFIX}selector_top_k but no tensor selector_hidden.weight: the file "
            "does not fit its own description, convert it again"
        )
    causal, pair, record = _own_keys(path, header, keys, counts, vocab_size)
    keys.refuse_unknown()
    try:
        config = (DFlash2Config if is_second else DFlashConfig)(
            **counts,
            **extra,
            **scales,
            vocab_size=vocab_size,
            target_hidden_size=counts["hidden_size"],
            mask_token_id=Keys(path, header.metadata, _TOKENIZER).count("mask_token_id"),
            taps=tuple(t - 1 for t in taps),
            windows=windows,
            causal=causal,
            rope_theta=theta,
            rms_norm_eps=eps,
            draft_vocab_size=draft_vocab_size,
            rotary_size=rotary_size,
            sink_layers=_sink_layers(header, counts["num_layers"]),
        )
        checked_curve(config, record)
    except FileError as error:
        raise FileError(f"{path}: {error}") from error
    return config, pair, record


def refuse_others(path: Path, header: GgufHeader) -> None:
    """Raise FileError when the file holds another member of the family than these two."""
    found: tuple[str, str] | None = None
    for name in header.tensors:
        parts = name.replace("-", "_").split(".")
        known = next((p for p in parts if p in _OTHER_TENSORS), None)
        gru = next((w for w in ("prefix_gru", "embed_proj") if name.startswith(w)), None)
        if known or gru:
            found = _OTHER_TENSORS[known or gru or ""]
            break
    else:
        for key, what in _OTHER_KEYS.items():
            value = header.metadata.get(_PREFIX + key)
            if value is not None and value not in (0, False) and not _is_usual(header, key, value):
                found = what
                break
        else:
            activation = header.metadata.get(_PREFIX + "hidden_activation", "silu")
            if activation != "silu":
                found = f"the activation {printable(str(activation))}", "llama.cpp"
            elif header.metadata.get(_PREFIX + "sample_from_anchor") is True:
                found = "the block layout of DSpark", "llama.cpp, vLLM and SGLang"
    if found is not None:
        raise FileError(
            f"{path} is a drafter with {found[0]}, which dspine does not run: {found[1]} can"
        )


def _is_usual(header: GgufHeader, key: str, value: object) -> bool:
    """Whether a key says what holds without it."""
    head_dim = header.metadata.get(_PREFIX + "attention.key_length")
    if key != "attention.scale" or not isinstance(value, float) or not isinstance(head_dim, int):
        return False
    return head_dim > 0 and abs(value - head_dim**-0.5) < 1e-6


def _vocab_size(path: Path, header: GgufHeader, keys: Keys) -> int:
    tokens = header.metadata.get(_TOKENIZER + "tokens")
    if isinstance(tokens, tuple):
        if "vocab_size" in keys and keys.count("vocab_size") != len(tokens):
            raise keys.wrong("vocab_size", f"{len(tokens)} as tokens", keys.count("vocab_size"))
        return len(tokens)
    if "vocab_size" not in keys:
        raise FileError(
            f"{path} has neither {_TOKENIZER}tokens nor {_PREFIX}vocab_size, which must say how "
            f"many tokens there are: convert it again"
        )
    return keys.count("vocab_size")


def _rotary_size(keys: Keys, head_dim: int) -> int | None:
    """How many numbers of a head turn, None for all. Positions must be plain; the 4-part form of
    M-RoPE with everything in its first part is the same for text."""
    if (length := keys.count("attention.value_length")) != head_dim:
        raise keys.wrong("attention.value_length", f"{head_dim}", length)
    size = keys.count("rope.dimension_count") if "rope.dimension_count" in keys else head_dim
    if size > head_dim:
        raise keys.wrong("rope.dimension_count", f"at most {head_dim}, the whole head", size)
    if "rope.dimension_sections" in keys:
        sections = keys.counts("rope.dimension_sections")
        if sections[:1] not in ((head_dim // 2,), (size // 2,)) or any(sections[1:]):
            raise keys.wrong(
                "rope.dimension_sections", f"[{head_dim // 2}, 0, 0, 0]", list(sections)
            )
    if "rope.scaling.type" in keys and (kind := keys.text("rope.scaling.type")) != "none":
        raise keys.wrong("rope.scaling.type", "none: dspine does not scale positions", kind)
    if "attention.scale" in keys:
        keys.number("attention.scale")  # refuse_others has seen that it changes nothing
    for key in ("hyper_connection.count", "hidden_activation"):
        keys.ignore(key)
    for key in ("sample_from_anchor", "has_confidence_head"):
        keys.ignore(key)
    return None if size == head_dim else size


def _sink_layers(header: GgufHeader, num_layers: int) -> tuple[int, ...]:
    """Layers whose attention sinks the file brings."""
    name = f"blk.{{}}.{SINK_TENSORS.gguf_name}".format
    return tuple(i for i in range(num_layers) if name(i) in header.tensors)


def _windows(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    window = keys.count("attention.sliding_window") if "attention.sliding_window" in keys else 0
    if not window:
        keys.ignore("attention.sliding_window_pattern")
        return (None,) * num_layers
    pattern = keys.booleans("attention.sliding_window_pattern")
    return tuple(window if is_windowed else None for is_windowed in pattern)


def _own_keys(
    path: Path, header: GgufHeader, keys: Keys, counts: Mapping[str, int], vocab_size: int
) -> tuple[tuple[bool, ...], Pair | None, TrainingRecord]:
    """Causality by layer, pair and record: from our keys, where the file has them."""
    own = Keys(path, header.metadata, OURS)
    causal = (keys.boolean("attention.causal") if "attention.causal" in keys else False,) * counts[
        "num_layers"
    ]
    if "attention.causal" in own:
        causal = own.booleans("attention.causal")
    pair = None
    if any(key.startswith(OURS + "target.") for key in header.metadata):
        pair = read_target_keys(own, hidden_size=counts["hidden_size"], vocab_size=vocab_size)
    curve = own.numbers("acceptance_curve") if "acceptance_curve" in own else ()
    provenance = read_provenance(own) if "training" in own else {}
    own.refuse_unknown()
    return causal, pair, TrainingRecord(curve, provenance)


def _tokenizer_keys(target: Path | None) -> dict[str, WritableValue]:
    if target is None:
        return {_TOKENIZER + "model": "no_vocab"}
    header = read_header(target)
    copied = {
        key: writable(value) for key, value in header.metadata.items() if key.startswith(_TOKENIZER)
    }
    if not isinstance(copied.get(_TOKENIZER + "model"), str):
        raise FileError(f"{target} has no tokenizer: name the target's own file")
    return copied
