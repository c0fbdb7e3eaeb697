"""A drafter GGUF with smaller matrices: which tensor gets which type, and the writing of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from dspine.errors import FileError, UsageError
from dspine.files.atomic import reason, refuse_existing
from dspine.files.drafter_file import (
    DRAFT_VOCAB_TENSOR,
    DrafterFile,
    own_table_specs,
    read_drafter,
)
from dspine.files.drafter_keys import to_metadata
from dspine.files.dtypes import Floats, decode_rows, encode
from dspine.files.gguf_file import GgufHeader, TensorInfo, read_header
from dspine.files.gguf_writer import Progress, TensorToWrite, WritableValue, write_gguf
from dspine.files.schema import TensorSpec, tensor_specs
from dspine.files.typed_keys import writable
from dspine.ggml.types import TensorType, type_by_name
from dspine.ggml.weights import quantise

FLOAT_TYPES = ("f32", "f16", "bf16")
CHUNK_VALUES = 1 << 20
"""Values converted at a time by each thread: 4 MiB as float32, at least one row."""

_LARGEST = 65504.0
"""Scales of all block types are stored as float16."""
_FITTING: Mapping[str, str] = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""For rows that are no multiple of 256, as `tensor_type_fallback` in llama.cpp has it."""


@dataclass(frozen=True, slots=True)
class Mix:
    """The types of one kind of file, numbered in `general.file_type` as llama.cpp does."""

    file_type: int
    usual: str
    important: str
    """Values and down projections of some layers, and the projection of the taps."""
    small: str
    """Injection and transfer codes, convolutions and selector: small, or read a row at a time."""


MIXES: Mapping[str, Mix] = {
    "q4_0": Mix(2, "q4_0", "q4_0", "q8_0"),
    "q4_k_m": Mix(15, "q4_k", "q6_k", "q8_0"),
    "q5_k_m": Mix(17, "q5_k", "q6_k", "q8_0"),
    "q6_k": Mix(18, "q6_k", "q6_k", "q8_0"),
    "q8_0": Mix(7, "q8_0", "q8_0", "q8_0"),
    "bf16": Mix(32, "bf16", "bf16", "bf16"),
    "f16": Mix(1, "f16", "f16", "f16"),
}


@dataclass(slots=True)
class _Plan:
    """Which tensor gets which type, and what that says about the source."""

    types: list[tuple[TensorInfo, TensorType]] = field(default_factory=list)
    fallen: list[str] = field(default_factory=list)
    """For each matrix whose rows do not fit the wanted type, both types."""
    twice: set[str] = field(default_factory=set)
    """Quantised types that would be quantised to another one."""


def quantise_drafter(
    source: Path,
    output: Path,
    mix_name: str,
    *,
    allow_requantize: bool = False,
    overwrite: bool = False,
    threads: int = 1,
    progress: Progress | None = None,
) -> list[str]:
    """Write the drafter in `source` with the matrix types of a mix; returns warnings for people.

    `mix_name` is a key of MIXES. Tensors pass through memory in pieces of CHUNK_VALUES for each
    thread. Needs the ggml library (`dspine.llama.library.find_library`) for types other than
    f16 and bf16. A tensor that would have to change from one quantised type to another is refused
    unless `allow_requantize`. Raises FileError or UsageError; nothing is written then.
    """
    mix = MIXES.get(mix_name.lower())
    if mix is None:
        raise UsageError(f"quantisation type is {mix_name!r}: choose one of {', '.join(MIXES)}")
    refuse_existing(output, overwrite)
    drafter = read_drafter(source)
    header = read_header(source)
    plan = _planned(drafter, header, mix)
    warnings = _warnings(source, plan, allow_requantize)
    if (vocab := header.tensors.get(DRAFT_VOCAB_TENSOR)) is not None:
        plan.types.append((vocab, vocab.type))
    metadata = _metadata(source, drafter, header, mix_name, mix)
    workers = max(1, threads)
    try:
        with source.open("rb") as stream, ThreadPoolExecutor(workers) as pool:
            convert = partial(_converted, source, stream.fileno(), pool, workers)
            tensors = [
                TensorToWrite(info.name, kind, info.ne, partial(convert, info, kind))
                for info, kind in plan.types
            ]
            write_gguf(output, metadata, tensors, overwrite=overwrite, progress=progress)
    except OSError as error:
        raise FileError(f"cannot read {source}: {reason(error)}") from error
    return warnings


def _planned(drafter: DrafterFile, header: GgufHeader, mix: Mix) -> _Plan:
    """The types of all tensors of the network; the list of its draft vocabulary is none."""
    plan = _Plan()
    own = [s for s in own_table_specs(drafter.config) if s.gguf_name in drafter.own_tables]
    for spec in (*tensor_specs(drafter.config), *own):
        info = header.tensors[spec.gguf_name]
        wanted = wanted_type(spec, mix, drafter.config.num_layers)
        kind = fitting_type(wanted, info.ne[0])
        if spec in own and info.type.is_quantised:
            # The target's rows as the target has them, or a choice of whoever wrote the file.
            wanted = kind = info.type.name
        if spec.is_matrix and kind != wanted:
            plan.fallen.append(f"{wanted} to {kind}")
        if info.type.is_quantised and info.type.name != kind:
            plan.twice.add(info.type.name)
        plan.types.append((info, type_by_name(kind)))
    return plan


def _warnings(source: Path, plan: _Plan, allow_requantize: bool) -> list[str]:
    """What people should know of the plan; FileError for one that needs to be allowed."""
    warnings: list[str] = []
    before = ", ".join(sorted(plan.twice))
    if before and not allow_requantize:
        raise FileError(
            f"{source} is quantised already ({before}): quantise its f16, bf16 or f32 original, or "
            f"add --allow-requantize and lose accuracy twice"
        )
    if before:
        warnings.append(
            f"{source.name} was quantised already ({before}): the result is less accurate than "
            f"one made from its original"
        )
    if fallen := plan.fallen:
        shown = ", ".join(f"{change} ({fallen.count(change)})" for change in sorted(set(fallen)))
        warnings.append(
            f"rows of {len(fallen)} of {len(plan.types)} tensors are no multiple of the block: "
            f"{shown}"
        )
    return warnings


def _metadata(
    source: Path, drafter: DrafterFile, header: GgufHeader, mix_name: str, mix: Mix
) -> dict[str, WritableValue]:
    """The keys that say what the drafter is are written anew; all others are copied."""
    note = {"type": mix_name.upper(), "from": drafter.matrix_type.upper(), "source": source.name}
    note |= {"dspine": version("dspine"), "llama-cpp-python": version("llama-cpp-python")}
    record = replace(drafter.record, provenance=_with_note(drafter.record.provenance, note))
    metadata = to_metadata(drafter.config, drafter.pair, record, source)
    for key, value in header.metadata.items():
        if key not in metadata and key not in ("general.alignment", "general.file_type"):
            metadata[key] = writable(value)
    metadata["general.file_type"] = np.uint32(mix.file_type)
    return metadata


def wanted_type(spec: TensorSpec, mix: Mix, num_layers: int) -> str:
    """The type of a tensor in a mix, whatever its row length; vectors are always f32."""
    name = spec.gguf_name
    if not spec.is_matrix:
        return "f32"
    if name.startswith(("transfer_codes", "selector_")) or "inj_" in name or "_conv_" in name:
        return mix.small
    if name == "fc.weight":
        return mix.important
    if name.endswith(("attn_v.weight", "ffn_down.weight")):
        layer = int(name.split(".")[1])
        return mix.important if is_important(layer, num_layers) else mix.usual
    return mix.usual


def is_important(layer: int, num_layers: int) -> bool:
    """llama.cpp's `use_more_bits`: the first and last eighth of the layers, and every third."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def fitting_type(wanted: str, row: int) -> str:
    """`wanted`, or the type that llama.cpp takes instead for rows of `row` values."""
    kind = wanted
    if row % type_by_name(kind).block:
        kind = _FITTING.get(kind, kind)
    return "f16" if row % type_by_name(kind).block else kind


def _with_note(provenance: Mapping[str, object], note: Mapping[str, str]) -> dict[str, object]:
    """The record with one more entry in the list of quantisations."""
    before = provenance.get("quantised", [])
    return {**provenance, "quantised": [*(before if isinstance(before, list) else []), note]}


def _converted(
    path: Path,
    descriptor: int,
    pool: ThreadPoolExecutor,
    workers: int,
    info: TensorInfo,
    kind: TensorType,
) -> Iterator[memoryview]:
    """The bytes of a tensor as `kind`, piece by piece and in order.

    Pieces are read rather than mapped, so that what was read does not stay in memory.
    """
    row = info.type.row_bytes(info.ne[0])
    rows = info.n_bytes // row
    step = max(1, CHUNK_VALUES // info.ne[0])
    waiting: list[Future[memoryview]] = []
    for first in range(0, rows, step):
        count = min(step, rows - first)
        work = partial(_piece, path, descriptor, info, kind, first, count)
        waiting.append(pool.submit(work))
        if len(waiting) > workers:
            yield waiting.pop(0).result()
    for piece in waiting:
        yield piece.result()


def _piece(
    path: Path, descriptor: int, info: TensorInfo, kind: TensorType, first: int, count: int
) -> memoryview:
    row = info.type.row_bytes(info.ne[0])
    raw = os.pread(descriptor, row * count, info.offset + row * first)
    if len(raw) != row * count:
        raise FileError(f"{path} became shorter while it was read: quantise it again")
    if kind == info.type:
        return memoryview(raw)
    values = decode_rows(
        np.frombuffer(raw, np.uint8).reshape(count, row), info.type.name, info.name
    )
    if kind.name in FLOAT_TYPES:
        return memoryview(b"".join(encode(values, kind.name, info.name)))
    _check_range(values, kind.name, info.name)
    return quantise(values, kind.name).data.cast("B")


def _check_range(values: Floats, type_name: str, name: str) -> None:
    largest: Any = np.abs(values).max(initial=0.0)
    if not np.isfinite(largest):
        raise FileError(
            f"tensor {name} holds NaN or infinite values and cannot be used: copy or train it again"
        )
    if largest > _LARGEST:
        raise FileError(
            f"tensor {name} has a value of {largest:.6g}, too large for {type_name}: use bf16"
        )
