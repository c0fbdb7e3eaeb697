"""`config.json` of a checkpoint folder (SpecForge's layout), by kind: both ways, strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspine.errors import FileError
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
FULL, SLIDING = "full_attention", "sliding_attention"
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
    "use_swa": False,
    "swa_window_size": None,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "projector_type": None,
    "draft_vocab_size": None,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "has_embed_tokens": False,
    "has_lm_head": False,
    "has_own_lm_head": False,
}
"""Keys of relatives of DFlash that may stand anywhere as long as they ask for nothing."""
_RUN_BY: Mapping[str, str] = {"projector_type": "SGLang"}
"""Who runs what such a key asks for, where it is not llama.cpp."""
_SCALES: Mapping[str, str] = {
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "logit_softcap": "final_logit_softcapping",
}
"""Field of DrafterConfig -> key, at the top or in `dflash_config`."""
_RELATIVES: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("DSparkDraftModel", "Qwen3DSparkModel", "DSparkSpeculator", "Gemma4DSparkModel"),
        ("a DSpark drafter", "llama.cpp, vLLM and SGLang"),
    ),
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
            f"say one only"
        )
    if len(set(config.causal)) > 1:
        raise FileError(
            "some layers are causal inside the block and some are not: a checkpoint's config.json "
            "can say one for all only"
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
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    return values


def from_json(
    label: str, values: Mapping[str, Any], draft_vocab_size: int | None = None
) -> DrafterConfig:
    """Read config.json. `label` names the file in errors.

    Anything that would change the arithmetic and is missing, unknown or contradictory raises
    FileError: architecture, sizes, rotary base, causality, windows, unknown keys.
    """
    try:
        return _from_json(values, draft_vocab_size)
    except FileError as error:
        raise FileError(f"{label}: {error}") from error


def _from_json(values: Mapping[str, Any], draft_vocab_size: int | None) -> DrafterConfig:
    kind = _kind(values)
    dflash = _table(values, "dflash_config")
    _refuse_requests("", values)
    _refuse_requests("dflash_config.", dflash)
    outer = _OUTER_KEYS | set(_COUNTS.values()) | set(_NEUTRAL) | set(_SCALES.values())
    if kind is DSpineConfig:
        outer |= {"dspine_config"}
    _refuse_unknown("it", values, outer)
    own = set(_DFLASH2_KEYS.values()) if kind is DFlash2Config else set()
    own |= set(_SCALES.values()) | set(_NEUTRAL)
    _refuse_unknown("dflash_config", dflash, _DFLASH_KEYS | own)
    if dflash.get("attention_mode", "gqa") != "gqa":
        raise FileError(
            f"dflash_config.attention_mode is {dflash['attention_mode']!r}, expected 'gqa'"
        )
    counts = {field: _required(values, key) for field, key in _COUNTS.items()}
    num_layers = layer_count(values)
    backbone = {
        **counts,
        "target_hidden_size": values.get("target_hidden_size", counts["hidden_size"]),
        "block_size": _either("block_size", values, dflash),
        "mask_token_id": _whole("mask_token_id", _either("mask_token_id", values, dflash)),
        "taps": _taps(values, dflash, num_layers),
        "windows": _windows(values, num_layers),
        "causal": (_causal(kind, values, dflash),) * num_layers,
        "rope_theta": _rope_theta(values),
        "rms_norm_eps": _number("rms_norm_eps", _required(values, "rms_norm_eps")),
        "draft_vocab_size": draft_vocab_size,
        **_scales(values, dflash),
    }
    if kind is DSpineConfig:
        sizes = _table(values, "dspine_config", required=False)
        _refuse_unknown("dspine_config", sizes, _TRAINING_KEYS | set(_DEFAULTS))
        return kind(**backbone, **{key: sizes.get(key, value) for key, value in _DEFAULTS.items()})
    if kind is DFlash2Config:
        return kind(
            **backbone, **{field: _required(dflash, key) for field, key in _DFLASH2_KEYS.items()}
        )
    return kind(**backbone)


def _scales(values: Mapping[str, Any], dflash: Mapping[str, Any]) -> dict[str, float]:
    """Scales of embedding and logits, where they are stated."""
    found = {}
    for field, key in _SCALES.items():
        if any(table.get(key) not in (None, 0) for table in (values, dflash)):
            found[field] = _number(key, _either(key, values, dflash))
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
        raise FileError(f"causality inside the block is stated twice and differently: {stated}")
    return next(iter(stated.values()), kind is DSpineConfig)


def _refuse_requests(where: str, table: Mapping[str, Any]) -> None:
    """Stop at keys of relatives that ask for arithmetic which this dspine does not have."""
    for key, neutral in _NEUTRAL.items():
        value = table.get(key)
        if value is not None and value != neutral:
            raise FileError(
                f"{where}{key} is {value!r}, which dspine does not run: "
                f"{_RUN_BY.get(key, 'llama.cpp')} can"
            )


def layer_count(values: Mapping[str, Any]) -> int:
    """`num_hidden_layers`, checked before lists of that length are made."""
    count = _whole("num_hidden_layers", _required(values, "num_hidden_layers"))
    if not 1 <= count <= _MAX_LAYERS:
        raise FileError(f"num_hidden_layers is {count}, expected 1 to {_MAX_LAYERS}")
    return count


def architecture_name(config: DrafterConfig) -> str:
    """What `architectures` says of a drafter."""
    return next(name for name, kind in ARCHITECTURES.items() if kind is type(config))


def _kind(values: Mapping[str, Any]) -> type[DrafterConfig]:
    names = values.get("architectures")
    known = names[0] if isinstance(names, list) and len(names) == 1 else None
    if isinstance(known, str) and known in _RELATIVES:
        what, who = _RELATIVES[known]
        raise FileError(f"this is {what} ({known}), which dspine does not run: {who} can")
    if not isinstance(known, str) or known not in ARCHITECTURES:
        raise FileError(
            f"architectures is {names!r}, expected one of {', '.join(ARCHITECTURES)}: this is no "
            f"DSpine, DFlash or DFlash2 drafter"
        )
    for key, expected in (("attention_bias", False), ("hidden_act", "silu")):
        if values.get(key, expected) != expected:
            raise FileError(
                f"{key} is {values[key]!r}, expected {expected!r}, which is what dspine runs; "
                f"llama.cpp runs some others"
            )
    return ARCHITECTURES[known]


def _rope_theta(values: Mapping[str, Any]) -> float:
    """The rotary base from wherever this config keeps it; scaling of any kind is refused."""
    found: dict[str, float] = {}
    if values.get("rope_theta") is not None:
        found["rope_theta"] = _number("rope_theta", values["rope_theta"])
    for place in ("rope_parameters", "rope_scaling"):
        table = values.get(place)
        if table is None:
            continue
        if not isinstance(table, dict):
            raise FileError(f"{place} is {table!r}, expected a table or null")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            raise FileError(f"{place} asks for rotary scaling {kind!r}, which is not supported")
        if table.get("rope_theta") is not None:
            found[f"{place}.rope_theta"] = _number(f"{place}.rope_theta", table["rope_theta"])
    if not found:
        raise FileError(
            "rope_theta is missing (also in rope_parameters and rope_scaling): the rotary base "
            "must be stated"
        )
    if len(set(found.values())) > 1:
        raise FileError(f"the rotary base is stated differently in two places: {found}")
    return next(iter(found.values()))


def _windows(values: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer, None for full attention."""
    window, use = values.get("sliding_window"), values.get("use_sliding_window")
    if use not in (None, True, False):
        raise FileError(f"use_sliding_window is {use!r}, expected true or false")
    kinds = values.get("layer_types")
    if kinds is None:
        if use is not False:
            raise FileError(
                "layer_types is missing: every layer must say full_attention or sliding_attention"
            )
        return (None,) * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise FileError(f"layer_types is {kinds!r}, expected one entry for each of {num_layers}")
    unknown = [kind for kind in kinds if kind not in (FULL, SLIDING)]
    if unknown:
        raise FileError(f"layer_types has {unknown[0]!r}, expected {FULL} or {SLIDING}")
    if SLIDING not in kinds:
        return (None,) * num_layers
    if use is False or window is None:
        raise FileError(
            f"layer_types has {SLIDING} but sliding_window is {window!r} and use_sliding_window "
            f"is {use!r}: a window is needed"
        )
    size = _whole("sliding_window", window)
    if size < 1:
        raise FileError(f"sliding_window is {size}, expected at least 1")
    return tuple(size if kind == SLIDING else None for kind in kinds)


def _taps(values: Mapping[str, Any], dflash: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    ids = dflash.get("target_layer_ids")
    if ids is None:
        target_layers = _whole("num_target_layers", _required(values, "num_target_layers"))
        if target_layers < 4:
            raise FileError("dflash_config.target_layer_ids is missing: it must name the taps")
        return default_taps(target_layers, layers)
    if not isinstance(ids, list):
        raise FileError(f"dflash_config.target_layer_ids is {ids!r}, expected a list")
    return tuple(_whole("dflash_config.target_layer_ids", i) for i in ids)


def _either(key: str, values: Mapping[str, Any], dflash: Mapping[str, Any]) -> Any:
    """A key that may stand at the top or in dflash_config; both must agree."""
    stated = [table[key] for table in (values, dflash) if table.get(key) is not None]
    if not stated:
        raise FileError(f"{key} is missing, at the top level and in dflash_config")
    if any(value != stated[0] for value in stated):
        raise FileError(f"{key} is stated twice and differently: {stated[0]!r} and {stated[1]!r}")
    return stated[0]


def _required(values: Mapping[str, Any], key: str) -> Any:
    if values.get(key) is None:
        raise FileError(f"{key} is missing: the configuration is incomplete")
    return values[key]


def _table(values: Mapping[str, Any], key: str, *, required: bool = True) -> Mapping[str, Any]:
    table = values.get(key)
    if table is None and not required:
        return {}
    if not isinstance(table, dict):
        raise FileError(f"{key} is {table!r}, expected a table: this is no complete drafter")
    return table


def _refuse_unknown(name: str, table: Mapping[str, Any], known: set[str] | frozenset[str]) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise FileError(
            f"{name} has keys that this dspine does not know: {', '.join(unknown[:5])}; running "
            f"without them would be wrong"
        )


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FileError(f"{name} is {value!r}, expected a whole number")
    return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FileError(f"{name} is {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError as error:
        raise FileError(f"{name} is too large for a number") from error
