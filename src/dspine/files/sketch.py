"""A few rows of a target's weights: is this the same file, another quantisation, other weights?

A drafter file carries such a sketch of the target that it was trained for. The rows are copied as
they are stored, so the same file is told by comparing bytes; only where they differ are both sides
decoded and their distance compared with what the rounding of both types explains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from dspine.errors import FileError
from dspine.files.dtypes import WEIGHT_TYPES, Floats, decode_rows
from dspine.files.gguf_file import GgufFile, StoredTensor, split_files
from dspine.files.schema import Sketch
from dspine.ggml.types import type_by_name

ROWS = 4
"""Rows of a matrix, evenly spread."""
VALUES = 256
"""Values of each, from its beginning: a whole number of blocks of every type."""
VECTOR_VALUES = 1024
"""Values of a vector, from its beginning."""

EMBEDDING = "token_embd.weight"
_PARTS: tuple[tuple[str, ...], ...] = (
    ("attn_norm",),
    ("ffn_norm", "post_attention_norm", "attn_norm_2"),
    ("attn_q", "attn_qkv", "attn_q_b", "ssm_in", "time_mix_key"),
    ("attn_v", "attn_kv_b", "attn_v_b", "attn_gate", "ssm_out", "time_mix_value"),
    ("ffn_down", "ffn_down_exps", "channel_mix_value"),
)
"""What is taken of a layer: of each group the first tensor that it has."""

ROUNDING: Mapping[str, float] = {
    "f32": 0.0,
    "f16": 0.0003,
    "bf16": 0.0017,
    "q8_0": 0.006,
    "q6_k": 0.019,
    "q5_k": 0.039,
    "q5_1": 0.042,
    "q5_0": 0.048,
    "q4_k": 0.078,
    "q4_1": 0.086,
    "q4_0": 0.097,
    "iq4_nl": 0.082,
    "iq4_xs": 0.083,
    "mxfp4": 0.12,
    "nvfp4": 0.095,
    "q3_k": 0.164,
    "iq3_s": 0.146,
    "iq3_xxs": 0.19,
    "q2_k": 0.32,
    "iq2_s": 0.27,
    "iq2_xs": 0.315,
    "iq2_xxs": 0.365,
    "iq1_s": 0.52,
    "iq1_m": 0.475,
    "tq1_0": 0.83,
    "tq2_0": 0.83,
}
"""Distance of rounded weights from their originals over the originals' size (root mean squares),
between that of normal and of t-distributed values with 5 degrees of freedom; weights of trained
networks lie within 15 % of it (benchmarks/fingerprint.py)."""
MARGIN = 1.4
"""How much further than rounding another quantisation of the same weights may be: importance
matrices round some values worse."""
SAME_TYPE_MARGIN = 1.0
"""The same where both sides have one type: such files differ by their importance matrices alone,
which move the same rounding, and at most 0.85 of it was seen."""
VECTOR_TOLERANCE = 1e-4
"""Vectors are stored as float32 in every quantisation."""
UNRELATED = 1.0
"""From this median distance on it is another model: unrelated weights have 1.4."""


class Likeness(Enum):
    """What two targets of the same shape have to do with each other."""

    SAME = "the same weights"
    QUANTISED = "as far apart as two quantisations"
    CHANGED = "further apart than two quantisations"
    OTHER = "another model"


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a target's weights are from the recorded ones."""

    likeness: Likeness
    distance: float
    """Of the matrices, relative to their size: the largest."""
    types: tuple[str, str]
    """Type of most of the compared matrices: recorded, found."""


def read_sketch(gguf: GgufFile, layers: int) -> Sketch | None:
    """The sketch of a target with that many layers; None where it has none of the tensors.

    Reads about 30 pieces of at most 1 KiB; of a split model the headers of all parts.
    """
    parts = [gguf, *(GgufFile(path) for path in split_files(gguf.path)[1:])]
    where = {name: part for part in parts for name in part.header.tensors}
    names = [EMBEDDING] if EMBEDDING in where else []
    for layer in sorted({0, layers // 2, layers - 1}):
        for group in _PARTS:
            found = (f"blk.{layer}.{part}.weight" for part in group)
            names += [name for name in found if name in where][:1]
    tensors = [where[name].tensor(name) for name in names]
    pieces = [(t, *_piece(t)) for t in tensors if t.type.name in WEIGHT_TYPES]
    if not pieces:
        return None
    return Sketch(
        names=tuple(tensor.name for tensor, _, _ in pieces),
        types=tuple(tensor.type.name for tensor, _, _ in pieces),
        sizes=tuple(size for _, size, _ in pieces),
        data=b"".join(raw for _, _, raw in pieces),
    )


def compare(recorded: Sketch, found: Sketch) -> Difference | None:
    """How two targets' weights differ; None where their sketches have nothing to compare."""
    if recorded.names != found.names or recorded.sizes != found.sizes:
        return None
    if recorded == found:
        return Difference(Likeness.SAME, 0.0, ("", ""))
    distances: list[float] = []
    pairs: list[tuple[str, str]] = []
    is_changed = False
    for number, name in enumerate(recorded.names):
        types = recorded.types[number], found.types[number]
        try:
            distance = _distance(_values(recorded, number), _values(found, number))
        except FileError:
            continue  # a type that only the library decodes
        if name.endswith(("norm.weight", "norm_2.weight")):
            is_changed |= distance > VECTOR_TOLERANCE
            continue
        explained = math.hypot(*(ROUNDING.get(kind, 1.0) for kind in types))
        margin = SAME_TYPE_MARGIN if types[0] == types[1] else MARGIN
        is_changed |= distance > margin * explained
        distances.append(distance)
        pairs.append(types)
    if not distances:
        return None
    likeness = Likeness.CHANGED if is_changed else Likeness.QUANTISED
    if float(np.median(distances)) > UNRELATED:
        likeness = Likeness.OTHER
    elif not is_changed and max(distances) == 0.0:
        likeness = Likeness.SAME
    return Difference(likeness, max(distances), max(set(pairs), key=pairs.count))


def check_sketch(sketch: Sketch) -> str | None:
    """What is wrong with a sketch read from a file, or None."""
    if not len(sketch.names) == len(sketch.types) == len(sketch.sizes) > 0:
        return "as many names, types and sizes, one at least"
    for kind, size in zip(sketch.types, sketch.sizes, strict=True):
        if kind not in WEIGHT_TYPES or size < 1 or size % type_by_name(kind).block:
            return "types of weights and whole blocks of them"
    if sum(sketch.lengths()) != len(sketch.data):
        return f"{sum(sketch.lengths())} bytes"
    return None


def _piece(tensor: StoredTensor) -> tuple[int, bytes]:
    """Number of values, and their bytes as they are stored."""
    rows = tensor.raw_rows()
    if len(rows) == 1:
        size = min(tensor.ne[0], VECTOR_VALUES)
        return size, rows[0, : tensor.type.row_bytes(size)].tobytes()
    size = min(tensor.ne[0], VALUES)
    chosen = [(2 * i + 1) * len(rows) // (2 * ROWS) for i in range(ROWS)]
    width = tensor.type.row_bytes(size)
    return ROWS * size, b"".join(rows[row, :width].tobytes() for row in chosen)


def _values(sketch: Sketch, number: int) -> Floats:
    """One piece as float32; FileError for a type that cannot be decoded here."""
    raw = np.frombuffer(sketch.piece(number), np.uint8).reshape(1, -1)
    return decode_rows(raw, sketch.types[number], sketch.names[number]).reshape(-1)


def _distance(a: Floats, b: Floats) -> float:
    largest = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
    return float(np.linalg.norm(a - b)) / largest if largest > 0 else 0.0
