"""What a checkpoint's config.json says of the layers: positions, windows and attention sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspine.errors import FileError
from dspine.files.json_values import number, refuse_unknown, whole

FULL, SLIDING = "full_attention", "sliding_attention"
PARTIAL_ROTARY = "partial_rotary_factor"
SINKS = "attention_sink_bias"
FORMS = (PARTIAL_ROTARY, SINKS, "use_swa", "swa_window_size")
"""Further keys that may stand at the top or in `dflash_config`."""
_ROPE_TABLES = ("rope_parameters", "rope_scaling")
_ROPE_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", PARTIAL_ROTARY, "mrope_section", "mrope_interleaved"}
)
"""What a table of rotary positions may say; the sections of M-RoPE mean nothing for text."""


def rope_theta(values: Mapping[str, Any]) -> float:
    """The rotary base from wherever this config keeps it; scaling of any kind is refused."""
    found: dict[str, float] = {}
    if values.get("rope_theta") is not None:
        found["rope_theta"] = number("rope_theta", values["rope_theta"])
    for place in _ROPE_TABLES:
        table = values.get(place)
        if table is None:
            continue
        if not isinstance(table, dict):
            raise FileError(f"{place} is {table!r}, expected a table or null")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            raise FileError(
                f"{place} asks for rotary scaling {kind!r}, which is not supported: run it in "
                "SGLang or vLLM, dspine does not scale positions"
            )
        refuse_unknown(place, table, _ROPE_KEYS)
        if table.get("rope_theta") is not None:
            found[f"{place}.rope_theta"] = number(f"{place}.rope_theta", table["rope_theta"])
    if not found:
        raise FileError(
            "rope_theta is missing (also in rope_parameters and rope_scaling): the rotary base "
            "must be stated, take it from the target's config.json"
        )
    if len(set(found.values())) > 1:
        raise FileError(
            f"the rotary base is stated differently in two places: {found}; keep the right one"
        )
    return next(iter(found.values()))


def rotary_size(
    values: Mapping[str, Any], dflash: Mapping[str, Any], head_dim: object
) -> int | None:
    """How many numbers of a head turn with the position, None for all of them."""
    below = [values.get(place) for place in _ROPE_TABLES]
    tables = [values, dflash, *(table for table in below if isinstance(table, dict))]
    found = [table.get(PARTIAL_ROTARY) for table in tables]
    stated = {number(PARTIAL_ROTARY, factor) for factor in found if factor is not None}
    if len(stated) > 1:
        raise FileError(
            f"{PARTIAL_ROTARY} is stated twice and differently: {sorted(stated)}; keep the right "
            "one"
        )
    factor = next(iter(stated), 1.0)
    if not 0 < factor <= 1:
        raise FileError(
            f"{PARTIAL_ROTARY} is {factor}, expected a part of the head, above 0 up to 1"
        )
    size = whole("head_dim", head_dim)
    # A factor that was a quotient may have lost its last bit.
    return None if factor == 1 else int(size * factor + 1e-6)


def sink_layers(
    values: Mapping[str, Any], dflash: Mapping[str, Any], found: tuple[int, ...]
) -> tuple[int, ...]:
    """Layers with attention sinks: those that have the tensor, where the configuration agrees."""
    flags = [table[SINKS] for table in (values, dflash) if table.get(SINKS) is not None]
    if any(flag not in (True, False) for flag in flags) or len(set(flags)) > 1:
        raise FileError(f"{SINKS} is {flags[-1]!r}, expected true or false, once")
    if flags and flags[0] != bool(found):
        tensors = f"{len(found)} layers have their tensor"
        raise FileError(
            f"{SINKS} is {flags[0]!r}, but {tensors}: the folder is incomplete, copy or download "
            "it again"
        )
    return found


def windows(
    values: Mapping[str, Any], dflash: Mapping[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    """The window of each layer, None for full attention."""
    if any(table.get("use_swa") not in (None, False) for table in (values, dflash)):
        # Every layer has the window, whatever layer_types says.
        sizes = [table.get("swa_window_size") for table in (dflash, values)]
        size = next((s for s in (*sizes, values.get("sliding_window")) if s is not None), None)
        if size is None or whole("swa_window_size", size) < 1:
            raise FileError(f"use_swa is set and swa_window_size is {size!r}: a window is needed")
        return (size,) * num_layers
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
    size = whole("sliding_window", window)
    if size < 1:
        raise FileError(f"sliding_window is {size}, expected at least 1")
    return tuple(size if kind == SLIDING else None for kind in kinds)
