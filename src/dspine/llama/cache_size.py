"""Refuses caches that the library would abort on, or that do not fit into memory."""

from __future__ import annotations

from dspine.errors import CapacityError, UsageError
from dspine.llama.model import Model
from dspine.machine import available_bytes

CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
"""Cache type names and their ggml numbers."""

_BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34, "iq4_nl": 18}
_PLAIN_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
_BLOCK = 32


def check_cache(
    model: Model,
    n_ctx: int,
    n_sequences: int,
    type_k: str,
    type_v: str,
    flash_attention: bool,
    swa_full: bool = False,
) -> None:
    """UsageError for a cache type that cannot be used, CapacityError for a cache too large."""
    for name, value in (("cache_type_k", type_k), ("cache_type_v", type_v)):
        if value not in CACHE_TYPES:
            raise UsageError(f"{name} is {value!r}: choose one of {', '.join(CACHE_TYPES)}")
    if type_v in _BLOCK_BYTES and not flash_attention:
        raise UsageError(f"cache_type_v {type_v} needs flash attention: switch it on or use f16")
    head_k, head_v = head_sizes(model)
    for name, value, size in (("cache_type_k", type_k, head_k), ("cache_type_v", type_v, head_v)):
        if value in _BLOCK_BYTES and size % _BLOCK:
            raise UsageError(
                f"{name} {value} stores blocks of {_BLOCK} values, which do not divide this "
                f"target's head size of {size}: use f16"
            )
    if 0 < model.context_train < n_ctx:
        raise CapacityError(
            f"a context of {n_ctx} tokens is above the {model.context_train} that this target "
            f"was trained for: choose at most {model.context_train}"
        )
    if model.n_gpu_layers or (model.window and not swa_full):
        # On a device its own allocation fails with a reason. A windowed cache is smaller than
        # what is counted below, and the file does not always say by how much.
        return
    needed = n_ctx * n_sequences * bytes_per_position(model, type_k, type_v)
    free = available_bytes()
    if free is not None and needed > free:
        fitting = max(0, n_ctx * free // needed)
        raise CapacityError(
            f"a context of {n_ctx} tokens for {n_sequences} sequence(s) needs "
            f"{needed / 2**30:.1f} GiB of cache and {free / 2**30:.1f} GiB of memory are free: "
            f"choose at most {fitting} tokens"
        )


def head_sizes(model: Model) -> tuple[int, int]:
    """Sizes of one key head and of one value head."""
    default = model.hidden_size // max(1, model.num_heads)
    return (
        _number(model, "attention.key_length") or default,
        _number(model, "attention.value_length") or default,
    )


def bytes_per_position(model: Model, type_k: str, type_v: str) -> int:
    """Cache bytes of one position over all attention layers, from the file's metadata.

    0 when the head count differs between layers (the library does not give such lists away).
    """
    heads = _number(model, "attention.head_count_kv") or 0
    interval = _number(model, "full_attention_interval") or 1
    layers = model.num_layers // interval
    head_k, head_v = head_sizes(model)
    return layers * heads * (_value_bytes(head_k, type_k) + _value_bytes(head_v, type_v))


def free_state_bytes(model: Model) -> int | None:
    """Memory free for a copy of recurrent state where the target's layers lie, if known."""
    if not model.n_gpu_layers:
        return available_bytes()
    from dspine.ggml.device import devices

    free = [device.memory()[0] for device in devices() if device.kind != "cpu"]
    return sum(free) if free else available_bytes()


def _value_bytes(values: int, cache_type: str) -> int:
    if cache_type in _PLAIN_BYTES:
        return values * _PLAIN_BYTES[cache_type]
    return values // _BLOCK * _BLOCK_BYTES[cache_type]


def _number(model: Model, key: str) -> int | None:
    value = model.metadata(f"{model.architecture}.{key}")
    return int(value) if value is not None and value.isdigit() else None
