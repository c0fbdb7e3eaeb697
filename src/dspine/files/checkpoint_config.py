"""`config.json` of a checkpoint folder (SpecForge's layout), by kind: both ways, strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspine.errors import FileError
from dspine.files import checkpoint_layers as layers
from dspine.files.checkpoint_layers import FORMS, FULL, PARTIAL_ROTARY, SINKS, SLIDING
from dspine.files.json_values import either, number, refuse_unknown, required, subtable, whole
from dspine.files.schema import (
    DFlash2Config,
    DFlashConfig,
    DrafterConfig,
    DSpineConfig,
    default_taps,
)

ARCHITECTURE_NAME = "DSpineDraftModel"
ARCHITECTURES: Mapping[str, type[DrafterConfig]] = {
    ARCHITECTURE_NAME: DSpineConfig,
    "DFlashDraftModel": DFlashConfig,
    "DFlash2DraftModel": DFlash2Config,
}
"""Name in `architectures` -> kind."""
_MAX_LAYERS = 1024
_DEFAULTS = {"transfer_rank": 1024, "message_size": 512, "top_k": 16}
"""What SpecForge assumes when `dspine_config` leaves a size out."""
_TRAINING_KEYS = frozenset(
    {
        "ce_weight",
        "alignment_weight",
        "alignment_warmup_steps",
        "replacement_layers",
        "replacement_probability",
        "replacement_hold_ratio",
        "replacement_end_ratio",
        "candidate_mass_threshold",
    }
)
"""Allowed in `dspine_config` because they matter in training only."""
_DFLASH_KEYS = frozenset(
    {"mask_token_id", "target_layer_ids", "block_size", "causal", "attention_mode"}
)
_DFLASH2_KEYS: Mapping[str, str] = {
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "top_k": "selector_top_k",
}
"""Field of DFlash2Config -> key of `dflash_config`."""
_NEUTRAL: Mapping[str, object] = {
    "projector_type": None,
    "draft_vocab_size": None,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "mlp_bias": False,
    "has_embed_tokens": False,
    "has_lm_head": False,
    "has_own_lm_head": False,
}
"""Keys of relatives of DFlash that may stand anywhere as long as they ask for nothing."""
_RUN_BY: Mapping[str, str] = {
    "projector_type": "which dspine does not run: SGLang can",
    "mlp_bias": "which dspine does not run: vLLM and SGLang may",
}
_BY_GGUF = (
    "for which this layout has no place: make a GGUF of it with llama.cpp's convert_hf_to_gguf.py, "
    "which dspine runs"
)
"""What to do where such a key asks for something."""
_SCALES: Mapping[str, str] = {
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "logit_softcap": "final_logit_softcapping",
    "value_scale": "attention_value_scale",
}
"""Field of DrafterConfig -> key, at the top or in `dflash_config`."""
RELATIVES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            *("DSparkDraftModel", "Qwen3DSparkModel", "DSparkSpeculator", "Gemma4DSparkModel"),
            *("Lfm2DSparkDraftModel", "LingDSparkModel"),
        ),
        ("a DSpark drafter", "llama.cpp, vLLM and SGLang"),
    ),
    "DeepseekV4DSparkModel": ("a DSpark drafter in DeepSeek-V4's form", "llama.cpp"),
    "DominoDraftModel": ("a Domino drafter", "SGLang"),
    "LlamaForCausalLMEagle3": ("an EAGLE-3 drafter", "llama.cpp, vLLM and SGLang"),
}
"""Drafters of other kinds by their name in `architectures`: what they are, who runs them."""
_OUTER_KEYS = frozenset(
    {
        *("architectures", "model_type", "num_target_layers", "block_size", "is_causal"),
        *("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"),
        *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "target_hidden_size"),
        *("attention_bias", "attention_dropout", "hidden_act", "initializer_range"),
        *("tie_word_embeddings", "use_cache", "dtype", "torch_dtype", "transformers_version"),
        *("auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "_name_or_path"),
        *("mask_token_id", "dflash_config"),
        # What transformers writes beside them; nothing of it matters to a drafter's arithmetic.
        *("return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward"),
        *("is_encoder_decoder", "is_decoder", "add_cross_attention", "cross_attention_hidden_size"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "name_or_path"),
        *("task_specific_params", "tokenizer_class", "sep_token_id", "decoder_start_token_id"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
    }
)
"""What may stand at the top beside the counts."""
_COUNTS: Mapping[str, str] = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
"""Field of DrafterConfig -> key of config.json."""


def to_json(config: DrafterConfig, num_target_layers: int, dtype: str) -> dict[str, Any]:
    """The content of config.json. `dtype` is torch's name: bfloat16, float16 or float32.

    Raises FileError for windows or causality that differ between layers: the format can say one
    only.
    """
    windows = {w for w in config.windows if w is not None}
    if len(windows) > 1:
        raise FileError(
            f"the layers have different windows {sorted(windows)}: a checkpoint's config.json can "
            "say one only, so write a GGUF"
        )
    if len(set(config.causal)) > 1:
        raise FileError(
            "some layers are causal inside the block and some are not: a checkpoint's config.json "
            "can say one for all only, so write a GGUF"
        )
    values: dict[str, Any] = {
        "architectures": [architecture_name(config)],
        "model_type": "qwen3",
        **{key: getattr(config, field) for field, key in _COUNTS.items()},
        "num_target_layers": num_target_layers,
        "block_size": config.block_size,
        "is_causal": config.causal[0],
        "layer_types": [FULL if w is None else SLIDING for w in config.windows],
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows, default=None),
        "max_window_layers": 0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": dtype,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.taps),
        },
    }
    if isinstance(config, DSpineConfig):
        values["dspine_config"] = {key: getattr(config, key) for key in _DEFAULTS}
    elif isinstance(config, DFlash2Config):
        own = {key: getattr(config, field) for field, key in _DFLASH2_KEYS.items()}
        values["dflash_config"] |= own
    values["dflash_config"] |= {_SCALES[field]: value for field, value in config.scales.items()}
    if config.sink_layers:
        values["dflash_config"][SINKS] = True
    if config.rotary_size is not None:
        values[PARTIAL_ROTARY] = config.rotary_size / config.head_dim
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    return values


def from_json(
    label: str,
    values: Mapping[str, Any],
    draft_vocab_size: int | None = None,
    sink_layers: tuple[int, ...] = (),
) -> DrafterConfig:
    """Read config.json. `label` names the file in errors, `sink_layers` the layers that have a
    tensor of attention sinks.

    Anything that would change the arithmetic and is missing, unknown or contradictory raises
    FileError: architecture, sizes, rotary base, causality, windows, unknown keys.
    """
    try:
        return _from_json(values, draft_vocab_size, sink_layers)
    except FileError as error:
        raise FileError(f"{label}: {error}") from error


def _from_json(
    values: Mapping[str, Any], draft_vocab_size: int | None, sink_layers: tuple[int, ...]
) -> DrafterConfig:
    kind = _kind(values)
    dflash = subtable(values, "dflash_config")
    _refuse_requests("", values)
    _refuse_requests("dflash_config.", dflash)
    variants = {*_NEUTRAL, *_SCALES.values(), *FORMS}
    outer = _OUTER_KEYS | set(_COUNTS.values()) | variants
    if kind is DSpineConfig:
        outer |= {"dspine_config"}
    refuse_unknown("it", values, outer)
    own = set(_DFLASH2_KEYS.values()) if kind is DFlash2Config else set()
    refuse_unknown("dflash_config", dflash, _DFLASH_KEYS | own | variants)
    if dflash.get("attention_mode", "gqa") != "gqa":
        raise FileError(
            f"dflash_config.attention_mode is {dflash['attention_mode']!r}, expected 'gqa'"
        )
    counts = {field: required(values, key) for field, key in _COUNTS.items()}
    num_layers = layer_count(values)
    backbone = {
        **counts,
        "target_hidden_size": values.get("target_hidden_size", counts["hidden_size"]),
        "block_size": either("block_size", values, dflash),
        "mask_token_id": whole("mask_token_id", either("mask_token_id", values, dflash)),
        "taps": _taps(values, dflash, num_layers),
        "windows": layers.windows(values, dflash, num_layers),
        "causal": (_causal(kind, values, dflash),) * num_layers,
        "rope_theta": layers.rope_theta(values),
        "rms_norm_eps": number("rms_norm_eps", required(values, "rms_norm_eps")),
        "draft_vocab_size": draft_vocab_size,
        "rotary_size": layers.rotary_size(values, dflash, counts["head_dim"]),
        "sink_layers": layers.sink_layers(values, dflash, sink_layers),
        **_scales(values, dflash),
    }
    if kind is DSpineConfig:
        sizes = subtable(values, "dspine_config", required=False)
        refuse_unknown("dspine_config", sizes, _TRAINING_KEYS | set(_DEFAULTS))
        return kind(**backbone, **{key: sizes.get(key, value) for key, value in _DEFAULTS.items()})
    if kind is DFlash2Config:
        return kind(
            **backbone, **{field: required(dflash, key) for field, key in _DFLASH2_KEYS.items()}
        )
    return kind(**backbone)


def _scales(values: Mapping[str, Any], dflash: Mapping[str, Any]) -> dict[str, float]:
    """Scales of embedding and logits, where they are stated."""
    found = {}
    for field, key in _SCALES.items():
        if any(table.get(key) not in (None, 0) for table in (values, dflash)):
            found[field] = number(key, either(key, values, dflash))
    return found


def _causal(
    kind: type[DrafterConfig], values: Mapping[str, Any], dflash: Mapping[str, Any]
) -> bool:
    """Whether attention inside the block is causal.

    Without a flag DSpine's is and that of the others is not, as their authors run them; some
    engines take sliding layers without a flag as causal.
    """
    stated = {}
    for where, table, key in (("", values, "is_causal"), ("dflash_config.", dflash, "causal")):
        if table.get(key) is not None:
            stated[where + key] = table[key]
    for name, value in stated.items():
        if value is not True and (kind is DSpineConfig or value is not False):
            needs = "DSpine needs causal attention inside the block"
            raise FileError(
                f"{name} is {value!r}, expected true"
                + (f": {needs}" if kind is DSpineConfig else " or false")
            )
    if len(set(stated.values())) > 1:
        raise FileError(
            f"causality inside the block is stated twice and differently: {stated}; keep the "
            "right one"
        )
    return next(iter(stated.values()), kind is DSpineConfig)


def _refuse_requests(where: str, table: Mapping[str, Any]) -> None:
    """Stop at keys of relatives that ask for arithmetic which this dspine does not have."""
    for key, neutral in _NEUTRAL.items():
        value = table.get(key)
        if value is not None and value != neutral:
            raise FileError(f"{where}{key} is {value!r}, {_RUN_BY.get(key, _BY_GGUF)}")


def layer_count(values: Mapping[str, Any]) -> int:
    """`num_hidden_layers`, checked before lists of that length are made."""
    count = whole("num_hidden_layers", required(values, "num_hidden_layers"))
    if not 1 <= count <= _MAX_LAYERS:
        raise FileError(f"num_hidden_layers is {count}, expected 1 to {_MAX_LAYERS}")
    return count


def architecture_name(config: DrafterConfig) -> str:
    """What `architectures` says of a drafter."""
    return next(name for name, kind in ARCHITECTURES.items() if kind is type(config))


def _kind(values: Mapping[str, Any]) -> type[DrafterConfig]:
    names = values.get("architectures")
    known = names[0] if isinstance(names, list) and len(names) == 1 else None
    if isinstance(known, str) and known in RELATIVES:
        what, who = RELATIVES[known]
        raise FileError(f"this is {what} ({known}), which dspine does not run: {who} can")
    if not isinstance(known, str) or known not in ARCHITECTURES:
        raise FileError(
            f"architectures is {names!r}, expected one of {', '.join(ARCHITECTURES)}: this is no "
            "DSpine, DFlash or DFlash2 drafter, name another folder"
        )
    for key, expected, who in (
        ("attention_bias", False, "vLLM and SGLang may"),
        ("hidden_act", "silu", "llama.cpp runs gelu"),
    ):
        if values.get(key, expected) != expected:
            raise FileError(f"{key} is {values[key]!r}, dspine runs {expected!r} alone: {who}")
    return ARCHITECTURES[known]


def _taps(values: Mapping[str, Any], dflash: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    ids = dflash.get("target_layer_ids")
    if ids is None:
        target_layers = whole("num_target_layers", required(values, "num_target_layers"))
        if target_layers < 4:
            raise FileError("dflash_config.target_layer_ids is missing: it must name the taps")
        return default_taps(target_layers, layers)
    if not isinstance(ids, list):
        raise FileError(f"dflash_config.target_layer_ids is {ids!r}, expected a list")
    return tuple(whole("dflash_config.target_layer_ids", i) for i in ids)
