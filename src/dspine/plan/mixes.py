"""Which type llama.cpp's quantiser gives to each tensor of a target, for its usual mixes.

The rules are those of `llama_tensor_get_type_impl` in llama.cpp's llama-quant.cpp, for dense models
and without an importance matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dspine.errors import UsageError
from dspine.ggml.types import type_by_name

Shape = tuple[str, tuple[int, ...]]

_USUAL: Mapping[str, str] = {
    "q2_k": "q2_k",
    "q3_k_s": "q3_k",
    "q3_k_m": "q3_k",
    "q3_k_l": "q3_k",
    "iq4_xs": "iq4_xs",
    "iq4_nl": "iq4_nl",
    "q4_0": "q4_0",
    "q4_1": "q4_1",
    "q4_k_s": "q4_k",
    "q4_k_m": "q4_k",
    "q5_0": "q5_0",
    "q5_1": "q5_1",
    "q5_k_s": "q5_k",
    "q5_k_m": "q5_k",
    "q6_k": "q6_k",
    "q8_0": "q8_0",
    "f16": "f16",
    "bf16": "bf16",
    "f32": "f32",
}
QUANTS = tuple(_USUAL)
"""The mixes that can be named, the smallest first."""

_FALLBACK: Mapping[str, str] = {
    "q2_k": "q4_0",
    "q3_k": "q4_0",
    "iq4_xs": "iq4_nl",
    "q4_k": "q5_0",
    "q5_k": "q5_1",
    "q6_k": "q8_0",
}
"""For rows that are no multiple of 256."""
_FLOATS = ("f32", "f16", "bf16")
_KEPT = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d", "shortconv.conv")


def mixed_types(
    shapes: Sequence[Shape], quant: str, *, gqa: int, tied: bool | None = None
) -> list[str]:
    """The type of each of `shapes` (name and shape of the tensors, in layer order).

    `gqa` is the number of query heads of a key/value head; `tied` whether the embedding is the head
    (None: when there is no output.weight). UsageError for an unknown mix.
    """
    usual = _USUAL.get(quant.lower())
    if usual is None:
        raise UsageError(
            f"--quant is {quant!r}: choose one of {', '.join(name.upper() for name in QUANTS)}"
        )
    if tied is None:
        tied = all(name != "output.weight" for name, _ in shapes)
    values = [name for name, _ in shapes if name.endswith(("attn_v.weight", "attn_qkv.weight"))]
    downs = [name for name, _ in shapes if name.endswith("ffn_down.weight")]
    value_of = {name: index for index, name in enumerate(values)}
    down_of = {name: index for index, name in enumerate(downs)}
    found = []
    for name, ne in shapes:
        if not is_quantised(name, ne):
            found.append("f32")
            continue
        kind = usual
        if usual in _FLOATS:
            found.append(kind)
            continue
        if name == "output.weight" or (tied and name == "token_embd.weight"):
            kind = "q8_0" if usual == "q8_0" or ne[0] % type_by_name(usual).block else "q6_k"
        elif name in value_of:
            kind = _of_values(quant.lower(), usual, value_of[name], len(values), gqa)
        elif name in down_of:
            kind = _of_downs(quant.lower(), usual, down_of[name], len(downs))
        elif name.endswith("attn_output.weight"):
            kind = {"q2_k": "q3_k", "q3_k_m": "q4_k", "q3_k_l": "q5_k"}.get(quant.lower(), usual)
        found.append(_fitting(kind, ne[0]))
    return found


def is_quantised(name: str, ne: Sequence[int]) -> bool:
    """Whether the quantiser touches a tensor: matrices, but no routers and convolutions."""
    return len(ne) >= 2 and name.endswith("weight") and not any(part in name for part in _KEPT)


def more_bits(index: int, count: int) -> bool:
    """llama.cpp's `use_more_bits`: the first and last eighth, and every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


def _of_values(quant: str, usual: str, index: int, count: int, gqa: int) -> str:
    match quant:
        case "q2_k":
            return "q4_k" if gqa >= 4 else "q3_k"
        case "q3_k_m":
            return "q5_k" if index < 2 else "q4_k"
        case "q3_k_l":
            return "q5_k"
        case "iq4_nl" | "iq4_xs":
            return "q5_k" if gqa >= 4 else usual
        case "q4_k_m" | "q5_k_m":
            return "q6_k" if more_bits(index, count) else usual
        case "q4_k_s":
            return "q5_k" if index < 4 else usual
    return usual


def _of_downs(quant: str, usual: str, index: int, count: int) -> str:
    match quant:
        case "q2_k":
            return "q3_k"
        case "q3_k_m":
            return "q5_k" if index < count // 16 else "q4_k"
        case "q3_k_l":
            return "q5_k"
        case "q4_k_m" | "q5_k_m":
            return "q6_k" if more_bits(index, count) else usual
        case "q4_k_s" | "iq4_nl" | "iq4_xs":
            return "q5_k" if index < count // 8 else usual
    return usual


def _fitting(kind: str, row: int) -> str:
    if row % type_by_name(kind).block:
        kind = _FALLBACK.get(kind, kind)
    return "f16" if row % type_by_name(kind).block else kind
