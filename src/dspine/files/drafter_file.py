"""Drafters as GGUF files: write one, read one.

DSpine has an architecture of its own, `dspine`, which a stock llama.cpp refuses as unknown.
DFlash and DFlash2 are llama.cpp's `dflash`, so that either program runs them. Every metadata key
and every tensor's name, type and shape is checked on reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dspine.architectures import NOT_TARGETS
from dspine.errors import FileError
from dspine.files import drafter_keys
from dspine.files.dtypes import Q8_BLOCK, WEIGHT_TYPES, Array, encode
from dspine.files.gguf_file import GgufFile, GgufHeader, StoredTensor, find_tensor
from dspine.files.gguf_writer import Progress, TensorToWrite, write_gguf
from dspine.files.mapped import printable, release
from dspine.files.pairing import check_fit
from dspine.files.schema import (
    ARCHITECTURE,
    DFLASH_ARCHITECTURE,
    DrafterConfig,
    DSpineConfig,
    Pair,
    TensorSpec,
    TrainingRecord,
    tensor_specs,
)
from dspine.ggml.types import TensorType, type_by_name

FILE_TYPES: Mapping[str, int] = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
"""Matrix types that `write_drafter` makes, and their number in `general.file_type`."""
DRAFT_VOCAB_TENSOR = "d2t"
OWN_TABLES = ("token_embd.weight", "output.weight")
"""What a DFlash file may bring instead of using the target's."""

Weights: TypeAlias = Mapping[str, Array | StoredTensor]
"""By torch name: a numpy array in PyTorch order, or a tensor that is stored as it is."""


@dataclass(frozen=True, slots=True)
class DrafterFile:
    """A drafter read from a GGUF; tensors stay mapped from the file until they are used."""

    path: Path
    config: DrafterConfig
    pair: Pair | None
    """None for a file that does not say which target it is for."""
    record: TrainingRecord
    tensors: Mapping[str, StoredTensor]
    """By GGUF name, in the order of `tensor_specs`."""
    draft_vocab: npt.NDArray[np.int32] | None
    """Target ids of the reduced head's rows, or None for the full vocabulary."""
    own_tables: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Embedding and head that replace the target's, by the names of OWN_TABLES."""

    @property
    def foreign_tables(self) -> list[str]:
        """Names of own tables that are no copy of the target's. Where we write a reduced head into
        a file, it is made of the target's rows, for llama.cpp alone.
        """
        is_copy = self.pair is not None and self.draft_vocab is not None
        return [n for n in self.own_tables if not (is_copy and n == OWN_TABLES[1])]

    @property
    def matrix_type(self) -> str:
        """The ggml type that holds most bytes of the weights."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.raw.size
        return max(sizes, key=lambda name: sizes[name])

    def arrays(self) -> dict[str, Array]:
        """Weights by torch name: float32, float16 and bfloat16 (uint16 bits) exactly as stored,
        quantised types as float32."""
        return {
            spec.torch_name: _native(self.tensors[spec.gguf_name])
            for spec in tensor_specs(self.config)
        }


def _what_else(header: GgufHeader) -> str:
    """What a file is that is no drafter of ours."""
    architecture = header.architecture
    if architecture in NOT_TARGETS:
        return NOT_TARGETS[architecture]
    if header.metadata.get(f"{architecture}.nextn_predict_layers"):
        return f"a {architecture} model or its next-token (MTP) layers"
    return f"of architecture {architecture or 'not given'!r}"


def write_drafter(
    path: Path,
    config: DrafterConfig,
    pair: Pair,
    record: TrainingRecord,
    tensors: Weights,
    dtype: str = "q8_0",
    draft_vocab: Sequence[int] | npt.NDArray[np.integer] | None = None,
    *,
    target: Path | None = None,
    name: str = "",
    file_type: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a drafter GGUF of the configuration's kind atomically.

    `tensors` maps torch names (see `tensor_specs`) to float32, float16 or bfloat16-bit (uint16)
    arrays, or to `StoredTensor`s that are copied byte by byte. Matrices are stored as `dtype`
    (f32, f16, bf16, q8_0; with q8_0 a row length not divisible by 32 falls back to f16),
    vectors as float32. `target` is the target's GGUF: llama.cpp needs its tokenizer in a DFlash or
    DFlash2 file, and the head's rows beside a reduced vocabulary; dspine needs neither, and for
    DSpine the target is not read. `file_type` is the number of a mix whose tensors are copied.
    Raises FileError for missing, extra,
    misshapen or non-finite tensors, an existing file without `overwrite`, and anything that keeps
    the file from being written.
    """
    if dtype not in FILE_TYPES:
        raise FileError(f"unknown drafter dtype {dtype!r}: choose one of {', '.join(FILE_TYPES)}")
    vocab = check_draft_vocab(config, draft_vocab)
    check_fit(path.name, config, pair)
    specs = tensor_specs(config)
    check_names(
        f"drafter for {path.name}",
        expected=[s.torch_name for s in specs],
        found=list(tensors),
    )
    planned = [_plan(spec, tensors[spec.torch_name], dtype) for spec in specs]
    if vocab is not None:
        planned.append(_plan_vocab(vocab, vocab_type(config)))
        if target is not None and not isinstance(config, DSpineConfig):
            planned.append(_plan_head(target, config, vocab))
    metadata = drafter_keys.to_metadata(config, pair, record, target)
    metadata["general.file_type"] = np.uint32(FILE_TYPES[dtype] if file_type is None else file_type)
    metadata["general.name"] = name or f"{config.kind} drafter for {pair.name}"
    write_gguf(path, metadata, planned, overwrite=overwrite, progress=progress)


def read_drafter(path: Path) -> DrafterFile:
    """Open a drafter GGUF; raises FileError naming the field, what was expected and found."""
    gguf = GgufFile(path)
    header = gguf.header
    if header.architecture not in (ARCHITECTURE, DFLASH_ARCHITECTURE):
        raise FileError(
            f"{path} is no drafter that dspine runs: it is {_what_else(header)}; name a file that "
            f"`dspine convert` made, or a DFlash GGUF"
        )
    stored_vocab = header.tensors.get(DRAFT_VOCAB_TENSOR)
    integer = "i32" if header.architecture == ARCHITECTURE else "i64"
    if stored_vocab is not None and (
        stored_vocab.type.name != integer or len(stored_vocab.ne) != 1
    ):
        raise FileError(
            f"{path}: tensor {DRAFT_VOCAB_TENSOR} must be one row of {integer} target ids"
        )
    size = None if stored_vocab is None else stored_vocab.n_elements
    config, pair, record = drafter_keys.from_metadata(path, header, size)
    if pair is not None:
        check_fit(str(path), config, pair)
    specs = tensor_specs(config)
    extra = [] if stored_vocab is None else [DRAFT_VOCAB_TENSOR]
    if header.architecture == DFLASH_ARCHITECTURE:
        extra += [name for name in OWN_TABLES if name in header.tensors]
    check_names(str(path), [s.gguf_name for s in specs] + extra, list(header.tensors))
    tensors = {spec.gguf_name: _checked(path, spec, gguf.tensor(spec.gguf_name)) for spec in specs}
    vocab: npt.NDArray[np.int32] | None = None
    if stored_vocab is not None:
        ids = gguf.tensor(DRAFT_VOCAB_TENSOR).raw.view("<i4" if integer == "i32" else "<i8")
        try:
            vocab = check_draft_vocab(config, ids)
        except FileError as error:
            raise FileError(f"{path}: {error}") from error
    own = {
        spec.gguf_name: _checked(path, spec, gguf.tensor(spec.gguf_name))
        for spec in own_table_specs(config)
        if spec.gguf_name in extra
    }
    return DrafterFile(path, config, pair, record, tensors, vocab, own)


def vocab_type(config: DrafterConfig) -> str:
    """The type of the list of target ids in a file of this kind."""
    return "i32" if isinstance(config, DSpineConfig) else "i64"


def own_table_specs(config: DrafterConfig) -> tuple[TensorSpec, ...]:
    """The tables that a DFlash file may bring."""
    rows = config.draft_vocab_size or config.vocab_size
    return (
        TensorSpec("embed_tokens.weight", OWN_TABLES[0], (config.vocab_size, config.hidden_size)),
        TensorSpec("lm_head.weight", OWN_TABLES[1], (rows, config.hidden_size)),
    )


def check_names(label: str, expected: Sequence[str], found: Sequence[str]) -> None:
    """Raise FileError when tensor names are missing or unknown; names at most three of each."""
    wanted, present = set(expected), set(found)
    problems: list[str] = []
    for names, what in (
        ([n for n in expected if n not in present], "missing"),
        ([n for n in found if n not in wanted], "unknown"),
    ):
        if names:
            shown = ", ".join(map(printable, names[:3])) + (", ..." if len(names) > 3 else "")
            problems.append(f"{len(names)} {what} ({shown})")
    if problems:
        raise FileError(
            f"{label}: {' and '.join(problems)} of {len(expected)} tensors expected from its "
            "configuration: the tensors do not fit their own description, copy, download or "
            "convert them again"
        )


def check_shape(label: str, spec_name: str, expected: tuple[int, ...], found: object) -> None:
    """Raise FileError when a tensor's shape (PyTorch order) is not the expected one."""
    if found != expected:
        raise FileError(f"{label}: tensor {spec_name} has shape {found}, expected {expected}")


def check_draft_vocab(
    config: DrafterConfig, draft_vocab: Sequence[int] | npt.NDArray[np.integer] | None
) -> npt.NDArray[np.int32] | None:
    """The reduced head's target ids as int32; FileError when they do not fit the config."""
    if (draft_vocab is None) != (config.draft_vocab_size is None):
        raise FileError(
            f"draft_vocab_size is {config.draft_vocab_size} but the list of target ids is "
            f"{'missing' if draft_vocab is None else 'given'}: a reduced head needs both"
        )
    if draft_vocab is None:
        return None
    ids = np.asarray(draft_vocab)
    if ids.ndim != 1 or ids.dtype.kind not in "ui" or ids.size != config.draft_vocab_size:
        raise FileError(
            f"the reduced head lists {ids.size} target ids, expected {config.draft_vocab_size}"
        )
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise FileError(
            f"the reduced head names target id {ids.min() if ids.min() < 0 else ids.max()}, "
            f"outside the vocabulary of {config.vocab_size}: convert or copy it again"
        )
    if np.unique(ids).size != ids.size:
        raise FileError(
            "the reduced head names a target id twice: every id must be unique, convert or copy "
            "it again"
        )
    return ids.astype(np.int32)


def _plan(spec: TensorSpec, tensor: Array | StoredTensor, matrix_type: str) -> TensorToWrite:
    check_shape("drafter", spec.torch_name, spec.shape, tuple(tensor.shape))
    ne = tuple(reversed(spec.shape))
    if isinstance(tensor, StoredTensor):
        _check_type("drafter", spec, tensor.type)
        return TensorToWrite(spec.gguf_name, tensor.type, ne, partial(_pieces, tensor))
    type_name = "f32"
    if spec.is_matrix:
        fits = matrix_type != "q8_0" or spec.shape[1] % Q8_BLOCK == 0
        type_name = matrix_type if fits else "f16"
    chunks = partial(encode, tensor, type_name, spec.torch_name)
    return TensorToWrite(spec.gguf_name, type_by_name(type_name), ne, chunks)


def _pieces(stored: StoredTensor) -> Iterator[memoryview]:
    step = 1 << 24
    for start in range(0, stored.raw.size, step):
        part = stored.raw[start : start + step]
        yield part.data
        release(part)


def _plan_vocab(vocab: npt.NDArray[np.int32], type_name: str) -> TensorToWrite:
    kind = type_by_name(type_name)
    chunks = partial(encode, vocab, type_name, DRAFT_VOCAB_TENSOR)
    return TensorToWrite(DRAFT_VOCAB_TENSOR, kind, (vocab.size,), chunks)


def _plan_head(target: Path, config: DrafterConfig, vocab: npt.NDArray[np.int32]) -> TensorToWrite:
    """The rows of the target's head that a reduced vocabulary names, as they are stored."""
    head = find_tensor(target, "output.weight") or find_tensor(target, "token_embd.weight")
    if head is None or head.shape[1] != config.hidden_size or head.shape[0] <= vocab.max():
        raise FileError(f"{target} has no head that fits the drafter: name its own target")
    rows = head.raw_rows()[vocab]
    ne = (config.hidden_size, int(vocab.size))
    return TensorToWrite(OWN_TABLES[1], head.type, ne, lambda: [rows.reshape(-1).data])


def _checked(path: Path, spec: TensorSpec, tensor: StoredTensor) -> StoredTensor:
    check_shape(str(path), spec.gguf_name, spec.shape, tensor.shape)
    _check_type(str(path), spec, tensor.type)
    return tensor


def _check_type(label: str, spec: TensorSpec, found: TensorType) -> None:
    allowed, expected = WEIGHT_TYPES, "a weight type"
    if len(spec.shape) == 1:
        allowed, expected = frozenset({"f32"}), "f32"
    elif len(spec.shape) == 3:
        allowed, expected = frozenset({"f32", "f16", "bf16"}), "f32, f16 or bf16"
    if found.name not in allowed:
        raise FileError(
            f"{label}: tensor {spec.gguf_name} has type {found.name}, expected {expected}"
        )


def _native(tensor: StoredTensor) -> Array:
    views = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}
    if tensor.type.name in views:
        return tensor.raw.view(views[tensor.type.name]).reshape(tensor.shape)
    return tensor.as_float32()
