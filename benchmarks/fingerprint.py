"""Does a drafter notice that its target is another quantisation, a fine-tune or another model?

Compares sketches (dspine.files.sketch) of the default target with those of changed copies: its
weights in every pair of types, and with a low-rank change added as a merged adapter makes it. Then
decodes with some of these copies and the default drafter, to say what is left of its drafts:

    python benchmarks/fingerprint.py -t 1 --count 3 -n 64

Its weights are in Q4_1, so an original is made by adding noise within Q4_1's rounding.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import common
import numpy as np
import numpy.typing as npt
from runners import acceptance_of, fixed_drafts

from dspine.default_pair import choose_pair
from dspine.files.dtypes import decode_rows
from dspine.files.gguf_file import GgufFile, StoredTensor
from dspine.files.gguf_writer import TensorToWrite, write_gguf
from dspine.files.pairing import describe_target
from dspine.files.quantise import fitting_type
from dspine.files.schema import Sketch
from dspine.files.sketch import MARGIN, ROUNDING, compare
from dspine.files.typed_keys import writable
from dspine.ggml.library import functions
from dspine.ggml.types import type_by_name
from dspine.llama.library import find_library

Floats = npt.NDArray[np.float32]
TYPES = ("f16", "bf16", "q8_0", "q6_k", "q5_0", "q4_k", "q4_1", "q4_0", "iq4_nl", "q3_k", "q2_k")
CHANGES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Size of a merged change over that of the weights."""
RANK = 16
FILES: Mapping[str, tuple[str, float]] = {
    "as it is": ("", 0.0),
    "as Q8_0": ("q8_0", 0.0),
    "as Q5_0": ("q5_0", 0.0),
    "as Q4_0": ("q4_0", 0.0),
    "changed by 1 %": ("", 0.01),
    "changed by 3 %": ("", 0.03),
    "changed by 10 %": ("", 0.1),
    "changed by 30 %": ("", 0.3),
}
"""Copies to decode with: type of the matrices (as they are, if empty), and size of the change."""
DRAFTS = 4


def main() -> None:
    """Print what is told apart and what is left of the drafts; the last line is JSON."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.set_defaults(count=3, predict=64)
    parser.add_argument("--no-decoding", action="store_true", help="compare sketches only")
    arguments = parser.parse_args()
    model, drafter = choose_pair(arguments.model, arguments.model_draft)
    find_library()
    sketch = describe_target(model).sketch
    if sketch is None:
        raise SystemExit(f"{model} has no tensors to compare")
    quantisations = compare_types(sketch)
    rows = [
        (was, now, f"{r['ratio']:.2f}", f"{r['weighed']:.2f}", r["noticed"] or "never")
        for (was, now), r in quantisations.items()
    ]
    print(common.table(("was", "is", "of rounding", "weighed", "noticed from"), rows))
    document: dict[str, Any] = {
        "margin": MARGIN,
        "rank": RANK,
        "largest_ratio": max(r["ratio"] for r in quantisations.values()),
        "largest_ratio_weighed": max(r["weighed"] for r in quantisations.values()),
        "types": {f"{was} {now}": r for (was, now), r in quantisations.items()},
    }
    if not arguments.no_decoding:
        document["decoding"] = decode_copies(model, drafter, arguments)
        told = [(name, *r.values()) for name, r in document["decoding"].items()]
        print(common.table(("copy", "told as", "distance", "length", "rate"), told))
        document |= {"drafts": DRAFTS, "prompts": 3 * arguments.count}
    common.save("fingerprint", document, arguments.output)
    print(json.dumps(document))


def compare_types(sketch: Sketch) -> dict[tuple[str, str], dict[str, Any]]:
    """For each pair of types: the largest distance of unchanged weights over what rounding
    explains, the same with random importance of the columns, and from which size on a merged
    change is noticed.
    """
    random = np.random.default_rng(0)
    originals = [original(sketch, i, random) for i in range(len(sketch.names))]
    changes = [low_rank(values, random) for values in originals]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for was, now in product(TYPES, repeat=2):
        before = made(sketch, originals, was, None)
        ratios = [worst(before, made(sketch, originals, now, w)) for w in (None, random)]
        noticed = None
        for size in CHANGES:
            merged = [v + size * c for v, c in zip(originals, changes, strict=True)]
            difference = compare(before, made(sketch, merged, now, None))
            assert difference is not None
            if difference.likeness.name in ("CHANGED", "OTHER"):
                noticed = size
                break
        found[was, now] = {"ratio": ratios[0], "weighed": ratios[1], "noticed": noticed}
    return found


def original(sketch: Sketch, number: int, random: np.random.Generator) -> Floats:
    """Weights that the stored ones may have been rounded from."""
    kind = sketch.types[number]
    raw = np.frombuffer(sketch.piece(number), np.uint8).reshape(1, -1)
    values = decode_rows(raw, kind, sketch.names[number]).reshape(-1)
    spread = ROUNDING[kind] * math.sqrt(3) * float(np.sqrt(np.mean(values**2)))
    return (values + random.uniform(-spread, spread, values.shape)).astype(np.float32)


def low_rank(values: Floats, random: np.random.Generator) -> Floats:
    """A change of rank RANK, as large as the values; none of vectors, which no adapter changes."""
    if values.size % 256:
        return np.zeros_like(values)
    rows = values.reshape(-1, 256)
    change = random.standard_normal((len(rows), RANK)) @ random.standard_normal((RANK, 256))
    scale = float(np.linalg.norm(values) / np.linalg.norm(change))
    return np.asarray(change * scale, dtype=np.float32).reshape(-1)


def made(
    sketch: Sketch, values: list[Floats], kind: str, random: np.random.Generator | None
) -> Sketch:
    """The sketch of those weights with matrices in a type; with random importance of columns."""
    types = tuple(
        "f32" if name.endswith("norm.weight") else fitting_type(kind, size)
        for name, size in zip(sketch.names, sketch.sizes, strict=True)
    )
    data = b"".join(
        rounded(v.reshape(1, -1), t, random) for v, t in zip(values, types, strict=True)
    )
    return Sketch(sketch.names, types, sketch.sizes, data)


def rounded(values: Floats, kind: str, random: np.random.Generator | None = None) -> bytes:
    """Rows in a type, as llama.cpp's quantiser makes it."""
    rows, length = values.shape
    weights = None
    if random is not None:
        weights = np.asarray(random.lognormal(0.0, 1.0, length), dtype=np.float32)
    source = np.ascontiguousarray(values, np.float32)
    out = np.empty((rows, type_by_name(kind).row_bytes(length)), np.uint8)
    functions().ggml_quantize_chunk(
        *(type_by_name(kind).number, source.ctypes.data, out.ctypes.data, 0, rows, length),
        None if weights is None else weights.ctypes.data,
    )
    return out.tobytes()


def worst(before: Sketch, after: Sketch) -> float:
    """The largest distance of a matrix over what both types' rounding explains."""
    ratios = [0.0]
    for number, name in enumerate(before.names):
        explained = math.hypot(ROUNDING[before.types[number]], ROUNDING[after.types[number]])
        if not name.endswith("norm.weight"):
            difference = compare(only(before, number), only(after, number))
            assert difference is not None
            ratios.append(difference.distance / explained)
    return round(max(ratios), 3)


def only(sketch: Sketch, i: int) -> Sketch:
    """One piece of a sketch."""
    kinds = (sketch.types[i],)
    return Sketch((sketch.names[i],), kinds, (sketch.sizes[i],), sketch.piece(i))


def decode_copies(model: Path, drafter: Path | None, arguments: Any) -> dict[str, dict[str, Any]]:
    """Acceptance of the drafter on changed copies of its target, and what is said of each."""
    found: dict[str, dict[str, Any]] = {}
    recorded = describe_target(model).sketch
    assert recorded is not None
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, size) in FILES.items():
            path = Path(folder) / "copy.gguf"
            write_copy(model, path, kind, size)
            sketch = describe_target(path).sketch
            difference = None if sketch is None else compare(recorded, sketch)
            assert difference is not None
            length, rate = acceptance(path, drafter, arguments)
            found[name] = {
                "told_as": difference.likeness.name.lower(),
                "distance": round(difference.distance, 4),
                "acceptance_length": length,
                "acceptance_rate": rate,
            }
    return found


def write_copy(model: Path, path: Path, kind: str, size: float) -> None:
    """The target with every matrix but the embedding changed by a low-rank one and rounded."""
    gguf = GgufFile(model)
    random = np.random.default_rng(1)
    metadata = {key: writable(value) for key, value in gguf.header.metadata.items()}
    tensors = []
    for tensor in gguf:
        is_matrix = tensor.name.startswith("blk.") and len(tensor.ne) == 2
        into = kind if is_matrix and kind else tensor.type.name
        chunks: Callable[[], list[memoryview]] = partial(_as_stored, tensor)
        if is_matrix and (size or kind):
            seed = int(random.integers(1 << 32))
            chunks = partial(_changed, tensor, into, size, seed)
        tensors.append(TensorToWrite(tensor.name, type_by_name(into), tensor.ne, chunks))
    write_gguf(path, metadata, tensors, overwrite=True)


def _as_stored(tensor: StoredTensor) -> list[memoryview]:
    return [tensor.raw.data]


def _changed(tensor: StoredTensor, kind: str, size: float, seed: int) -> list[memoryview]:
    values = tensor.as_float32()
    random = np.random.default_rng(seed)
    a = random.standard_normal((values.shape[0], RANK), np.float32)
    change = a @ random.standard_normal((RANK, values.shape[1]), np.float32)
    scale = size * np.linalg.norm(values) / np.linalg.norm(change)
    return [memoryview(rounded((values + scale * change).astype(np.float32), kind))]


def acceptance(target: Path, drafter: Path | None, arguments: Any) -> tuple[float, float]:
    """Tokens per verify, and the share of drafts that are kept."""
    return acceptance_of(fixed_drafts(target, drafter, DRAFTS, arguments))


if __name__ == "__main__":
    main()
