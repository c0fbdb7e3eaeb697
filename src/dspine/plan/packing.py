"""Bytes of weights in CPU memory, where dspine's kernels or ggml's repacking lay them out anew.

This is the only place outside of `native` that knows those layouts' sizes; a test compares it with
the compiled kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dspine.ggml.types import type_by_name
from dspine.plan.geometry import Weight

PANEL = 16
"""Outputs that are packed together; the last panel of a matrix is filled up."""

_UNITS: Mapping[str, tuple[int, int]] = {
    "q4_0": (32, 288),
    "q4_1": (32, 320),
    "q5_0": (32, 352),
    "q8_0": (32, 544),
    "q4_k": (256, 2368),
    "q5_k": (256, 2880),
    "q6_k": (256, 3360),
    "f16": (1, 32),
    "bf16": (1, 32),
}
"""Inputs of a unit and its bytes for a panel, as the kernels for AVX2 have them."""

_REPACKED = ("q4_0", "q4_k", "iq4_nl")
"""Types that ggml repacks on x86 CPUs with AVX2; the copies are as large as the originals."""
_TILED = ("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_xs", "f16")
"""Types that ggml copies for AMX, where the number of outputs is a multiple of _TILED_OUTPUTS."""
_TILED_OUTPUTS = 64
_TILED_MORE: Mapping[str, int] = {"q8_0": 4, "q4_k": 4, "q5_k": 4, "iq4_xs": 2}
"""Bytes that a block grows by in such a copy."""

Kernels = Literal["dspine", "ggml", "ggml-amx"]
"""Which kernels compute on the CPU; ggml's are others where the processor has AMX."""


@dataclass(frozen=True, slots=True)
class HostWeights:
    """Weights in main memory: `packed` by dspine's kernels, `copied` by ggml, `plain` as stored."""

    packed: int
    copied: int
    plain: int

    @property
    def n_bytes(self) -> int:
        return self.packed + self.copied + self.plain


def stock_kernels(flags: frozenset[str]) -> Kernels:
    """Which of ggml's kernels compute on a processor with these features, by Linux's names."""
    return "ggml-amx" if flags >= {"amx_int8", "avx512_vnni"} else "ggml"


def packed_bytes(type_name: str, ne: tuple[int, ...]) -> int | None:
    """Bytes of a matrix packed for the kernels, None where they leave it as it is."""
    unit = _UNITS.get(type_name)
    if unit is None or len(ne) != 2 or ne[0] % unit[0]:
        return None
    return math.ceil(ne[1] / PANEL) * (ne[0] // unit[0]) * unit[1]


def host_weights(weights: Iterable[Weight], kernels: Kernels, *, tied_head: bool) -> HostWeights:
    """Memory of target weights that stay with the CPU.

    dspine's kernels look the rows of the embedding up in its packed form, so that a head which is
    the embedding (`tied_head`) is there once. With ggml's the file is mapped, and a repacked matrix
    lies beside its original.
    """
    packed = copied = plain = 0
    for weight in weights:
        looked_up = weight.name == "token_embd.weight"
        size = None
        if kernels == "dspine" and (looked_up or is_product(weight)):
            size = packed_bytes(weight.type_name, weight.ne)
        if size is not None:
            packed += size
            continue
        plain += weight.n_bytes
        if tied_head or not looked_up:
            copied += copied_bytes(weight, kernels)
    return HostWeights(packed, copied, plain)


def copied_bytes(weight: Weight, kernels: Kernels) -> int:
    """Bytes of ggml's own copy of a matrix; its rows cannot be read there."""
    tiled = kernels == "ggml-amx" and weight.type_name in _TILED and len(weight.ne) == 2
    if tiled and weight.ne[1] % _TILED_OUTPUTS == 0:
        blocks = weight.n_bytes // type_by_name(weight.type_name).size
        return weight.n_bytes + blocks * _TILED_MORE.get(weight.type_name, 0)
    return weight.n_bytes if kernels != "dspine" and weight.type_name in _REPACKED else 0


def is_product(weight: Weight) -> bool:
    """Whether a matrix is only multiplied by; embeddings and convolutions are read otherwise."""
    return (
        len(weight.ne) == 2
        and weight.name != "token_embd.weight"
        and "conv1d" not in weight.name
        and not weight.name.startswith("transfer_codes")
        and type_by_name(weight.type_name).name != "f32"
    )
