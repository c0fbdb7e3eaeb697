"""A drafter of either format, to be written in the other: GGUF or checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dspine.errors import FileError
from dspine.files.checkpoint import read_checkpoint
from dspine.files.drafter_file import read_drafter
from dspine.files.dtypes import Array, encode
from dspine.files.gguf_file import StoredTensor, read_header
from dspine.files.mapped import release
from dspine.files.run_folder import choose_checkpoint
from dspine.files.safetensors_file import TensorStream
from dspine.files.schema import DrafterConfig, Pair, TrainingRecord, tensor_specs

_VIEWS: Mapping[str, str] = {"f32": "<f4", "f16": "<f2", "bf16": "<u2"}
_DTYPES: Mapping[str, str] = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A drafter as it was read; its tensors stay in the file until they are used."""

    path: Path
    config: DrafterConfig
    pair: Pair | None
    """None in folders that other programs wrote."""
    record: TrainingRecord
    tensors: Mapping[str, Array | StoredTensor]
    """By torch name: float types as arrays (bfloat16 as uint16), quantised ones as stored."""
    draft_vocab: npt.NDArray[np.int32] | None
    file_type: int | None = None
    """`general.file_type` of a GGUF."""

    @property
    def quantised(self) -> list[str]:
        """The quantised types among the tensors."""
        found = {t.type.name for t in self.tensors.values() if isinstance(t, StoredTensor)}
        return sorted(found)


def read_source(path: Path) -> Source:
    """A drafter GGUF, a checkpoint folder, or a run's folder, which stands for its best checkpoint.

    Raises FileError when it is none of these or incomplete.
    """
    if path.is_dir():
        folder = read_checkpoint(choose_checkpoint(path))
        return Source(
            folder.folder,
            folder.config,
            folder.pair,
            folder.record,
            folder.tensors,
            folder.draft_vocab,
        )
    file = read_drafter(path)
    if file.foreign_tables:
        raise FileError(
            f"{path} has its own {' and '.join(file.foreign_tables)}, for which the other formats "
            f"have no place: run the file as it is"
        )
    tensors = {
        spec.torch_name: _as_read(file.tensors[spec.gguf_name])
        for spec in tensor_specs(file.config)
    }
    number = read_header(path).metadata.get("general.file_type")
    file_type = number if isinstance(number, int) and not isinstance(number, bool) else None
    return Source(path, file.config, file.pair, file.record, tensors, file.draft_vocab, file_type)


def float_tensors(source: Source, dtype: str | None) -> dict[str, Array | TensorStream]:
    """The tensors for a checkpoint folder, by torch name.

    `dtype` is f32, f16, bf16, or None: float matrices keep their type, quantised ones become bf16,
    and vectors, which a GGUF always holds as f32, take the type of `fc` where that loses nothing.
    """
    main = dtype or _type_name(source.tensors["fc.weight"]) or "bf16"
    made: dict[str, Array | TensorStream] = {}
    for spec in tensor_specs(source.config):
        tensor = source.tensors[spec.torch_name]
        if isinstance(tensor, StoredTensor):
            chunks = partial(_decoded, tensor, dtype or "bf16")
            made[spec.torch_name] = TensorStream(_DTYPES[dtype or "bf16"], spec.shape, chunks)
        elif dtype is not None:
            chunks = partial(encode, tensor, dtype, spec.torch_name)
            made[spec.torch_name] = TensorStream(_DTYPES[dtype], spec.shape, chunks)
        else:
            made[spec.torch_name] = tensor if spec.is_matrix else _narrowed(tensor, main)
    return made


def _as_read(tensor: StoredTensor) -> Array | StoredTensor:
    view = _VIEWS.get(tensor.type.name)
    return tensor if view is None else tensor.raw.view(view).reshape(tensor.shape)


def _type_name(tensor: Array | StoredTensor) -> str | None:
    """The float type that a tensor is stored in."""
    if isinstance(tensor, StoredTensor):
        return None
    return {"float32": "f32", "float16": "f16", "uint16": "bf16"}[tensor.dtype.name]


def _narrowed(array: Array, name: str) -> Array:
    """float32 values in a 16-bit type if every one is there again, bit by bit; else as they are."""
    if array.dtype != np.float32 or name == "f32":
        return array
    bits = array.view(np.uint32)
    if name == "bf16":
        return array if (bits & np.uint32(0xFFFF)).any() else (bits >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    return half if (half.astype(np.float32).view(np.uint32) == bits).all() else array


def _decoded(tensor: StoredTensor, dtype: str) -> Iterator[memoryview]:
    """A quantised tensor as a float type, some rows at a time."""
    rows = tensor.raw_rows()
    step = max(1, _CHUNK_VALUES // tensor.ne[0])
    for first in range(0, len(rows), step):
        yield from encode(tensor.as_float32(slice(first, first + step)), dtype, tensor.name)
        release(rows[first : first + step])
