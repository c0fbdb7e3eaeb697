"""Feature shards: what the trainer reads, one safetensors file per group of whole sequences.

A shard is written atomically (partial file, fsync, rename), so every file that carries the
final name is complete. Reading maps the file; nothing is copied until it is used.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dspine.errors import FileError, TrainingError
from dspine.files.atomic import atomic_write
from dspine.files.safetensors_file import SafetensorsFile, read_safetensors

if TYPE_CHECKING:
    import torch

FORMAT = "dspine-features-1"
TEACHER_TOP_K = 64
_NAME = re.compile(r"shard-(\d{5,})\.safetensors")
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_COLUMNS: Mapping[str, tuple[str, int]] = {
    "tokens": ("I32", 1),
    "sequence_offsets": ("I64", 1),
    "loss_mask": ("U8", 1),
    "features": ("BF16", 2),
    "teacher_ids": ("I32", 2),
    "teacher_probs": ("F16", 2),
}


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """What a shard says about itself; the three lists have one entry per sequence."""

    taps: tuple[int, ...]
    fingerprint: str
    """sha256 of one tensor of the target that made the features (`Pair.fingerprint`)."""
    ids: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = ()
    num_tokens: int = 0

    def to_metadata(self) -> dict[str, str]:
        """The safetensors metadata block: every value a string, lists as JSON."""
        return {
            "format": FORMAT,
            "taps": json.dumps(list(self.taps)),
            "fingerprint": self.fingerprint,
            "ids": json.dumps(list(self.ids)),
            "sources": json.dumps(list(self.sources)),
            "temperatures": json.dumps(list(self.temperatures)),
            "num_tokens": str(self.num_tokens),
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], path: Path) -> ShardInfo:
        """Inverse of `to_metadata`; raises FileError when it is not one of ours."""
        if metadata.get("format") != FORMAT:
            raise FileError(
                f"{path} says format {metadata.get('format')!r}, not {FORMAT!r}: "
                f"it is not a feature shard of this version, capture the features again"
            )
        try:
            return cls(
                taps=tuple(int(t) for t in json.loads(metadata["taps"])),
                fingerprint=metadata["fingerprint"],
                ids=tuple(str(i) for i in json.loads(metadata["ids"])),
                sources=tuple(str(s) for s in json.loads(metadata["sources"])),
                temperatures=tuple(float(t) for t in json.loads(metadata["temperatures"])),
                num_tokens=int(metadata["num_tokens"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(
                f"{path} has damaged shard metadata ({error}): remove it and capture again"
            ) from error


@dataclass(frozen=True, slots=True)
class Shard:
    """One mapped shard of n tokens in s sequences. Row i of the teacher predicts token i + 1.

    `features` are bfloat16 bits (n, taps * hidden); `teacher_ids` / `teacher_probs` (n, K) hold the
    target's K most probable next tokens, most probable first, and zeros where no label needs them.
    """

    path: Path
    info: ShardInfo
    tokens: NDArray[np.int32]
    sequence_offsets: NDArray[np.int64]
    loss_mask: NDArray[np.uint8]
    features: NDArray[np.uint16]
    teacher_ids: NDArray[np.int32]
    teacher_probs: NDArray[np.float16]

    @classmethod
    def read(cls, path: Path) -> Shard:
        """Map a shard and check that its parts fit together; raises FileError if they do not."""
        # Private pages, so that torch may wrap them without a warning; nothing writes to them.
        file = read_safetensors(path, private=True)
        info = ShardInfo.from_metadata(file.metadata, path)
        columns: dict[str, Any] = {
            name: _column(file, name, dtype, rank) for name, (dtype, rank) in _COLUMNS.items()
        }
        shard = cls(path=path, info=info, **columns)
        shard.check()
        return shard

    def check(self) -> None:
        """FileError unless all parts have as many rows and sequences as each other."""
        n = len(self.tokens)
        for name in ("loss_mask", "features", "teacher_ids", "teacher_probs"):
            if len(getattr(self, name)) != n:
                raise FileError(
                    f"{self.path} has {n} tokens but {len(getattr(self, name))} rows of {name}: "
                    f"remove it and capture again"
                )
        offsets = self.sequence_offsets
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != n or (np.diff(offsets) < 1).any():
            raise FileError(
                f"{self.path} has sequence offsets that do not cover its {n} tokens: "
                f"remove it and capture again"
            )
        for name in ("ids", "sources", "temperatures"):
            if len(getattr(self.info, name)) != self.num_sequences:
                raise FileError(
                    f"{self.path} holds {self.num_sequences} sequences but "
                    f"{len(getattr(self.info, name))} {name}: remove it and capture again"
                )

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        """Sequences in this shard."""
        return len(self.sequence_offsets) - 1

    @property
    def num_labels(self) -> int:
        """Tokens that may be labels (loss mask 1)."""
        return int(self.loss_mask.sum(dtype=np.int64))

    def sequence(self, index: int) -> slice:
        """Rows of one sequence, for any of the per-token arrays."""
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences}")
        return slice(int(self.sequence_offsets[index]), int(self.sequence_offsets[index + 1]))

    def features_tensor(self) -> torch.Tensor:
        """The features as a bfloat16 torch tensor on the mapped file (no copy, do not write)."""
        import torch

        return torch.from_numpy(self.features).view(torch.bfloat16)


class ShardWriter:
    """Collects sequences and writes them as numbered shards of about `shard_tokens` tokens.

    Numbers continue after the shards that are already in the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        taps: Sequence[int],
        fingerprint: str,
        shard_tokens: int = 50_000,
    ) -> None:
        self.folder = folder
        self.taps = tuple(taps)
        self.fingerprint = fingerprint
        self.shard_tokens = shard_tokens
        self.pending_tokens = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(".shard-*.partial"):
                left.unlink()
        except OSError as error:
            raise TrainingError(
                f"{folder} cannot be used for shards ({error.strerror}): choose another folder"
            ) from error
        present = list_shards(folder)
        self._next = 1 + max((_number(p) for p in present), default=-1)
        self._reset()

    def _reset(self) -> None:
        self.pending_tokens = 0
        self._names: list[tuple[str, str, float]] = []
        self._tokens: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.uint8]] = []
        self._features: list[NDArray[np.uint16]] = []
        self._ids: list[NDArray[np.int32]] = []
        self._probs: list[NDArray[np.float16]] = []

    def add(
        self,
        *,
        sequence_id: str,
        source: str,
        temperature: float,
        tokens: NDArray[np.int32],
        loss_mask: NDArray[np.uint8],
        features: NDArray[np.uint16],
        teacher_ids: NDArray[np.int32],
        teacher_probs: NDArray[np.float16],
    ) -> Path | None:
        """Add one sequence of n rows; writes a shard and returns its path when enough are there."""
        rows = {
            len(tokens),
            len(loss_mask),
            len(features),
            len(teacher_ids),
            len(teacher_probs),
        }
        if len(rows) != 1 or 0 in rows:
            raise ValueError(f"a sequence needs equally many rows in every array, not {rows}")
        self._names.append((sequence_id, source, temperature))
        self._tokens.append(tokens)
        self._masks.append(loss_mask)
        self._features.append(features)
        self._ids.append(teacher_ids)
        self._probs.append(teacher_probs)
        self.pending_tokens += len(tokens)
        return self.flush() if self.pending_tokens >= self.shard_tokens else None

    def flush(self) -> Path | None:
        """Write what is pending as one shard; None when nothing is."""
        if not self._tokens:
            return None
        info = ShardInfo(
            taps=self.taps,
            fingerprint=self.fingerprint,
            ids=tuple(n[0] for n in self._names),
            sources=tuple(n[1] for n in self._names),
            temperatures=tuple(n[2] for n in self._names),
            num_tokens=self.pending_tokens,
        )
        lengths = [len(t) for t in self._tokens]
        path = self.folder / f"shard-{self._next:05d}.safetensors"
        _write(
            path,
            info,
            {
                "tokens": self._tokens,
                "sequence_offsets": [np.concatenate([[0], np.cumsum(lengths)])],
                "loss_mask": self._masks,
                "features": self._features,
                "teacher_ids": self._ids,
                "teacher_probs": self._probs,
            },
        )
        self._next += 1
        self._reset()
        return path


def list_shards(folder: Path) -> list[Path]:
    """Complete shards of a folder by number; an empty list when the folder does not exist."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=_number)


def read_info(path: Path) -> ShardInfo:
    """Only the metadata of a shard (reads the header, not the data)."""
    return ShardInfo.from_metadata(read_safetensors(path).metadata, path)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))


def _write(path: Path, info: ShardInfo, parts: Mapping[str, Sequence[NDArray[Any]]]) -> None:
    """One shard from the pieces of its columns, without joining them in memory first."""
    header: dict[str, Any] = {"__metadata__": info.to_metadata()}
    arrays: list[NDArray[Any]] = []
    offset = 0
    # Wide elements first keep every column aligned to its element size.
    for name in sorted(parts, key=lambda n: -_DTYPES[_COLUMNS[n][0]].itemsize):
        type_name, _ = _COLUMNS[name]
        pieces = [np.ascontiguousarray(p, dtype=_DTYPES[type_name]) for p in parts[name]]
        length = sum(p.nbytes for p in pieces)
        header[name] = {
            "dtype": type_name,
            "shape": [sum(len(p) for p in pieces), *pieces[0].shape[1:]],
            "data_offsets": [offset, offset + length],
        }
        arrays += pieces
        offset += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with atomic_write(path) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for array in arrays:
                file.write(array.data.cast("B"))
    except FileError as error:
        raise TrainingError(
            f"{error}; start again after that, the shards written before are complete"
        ) from error


def _column(file: SafetensorsFile, name: str, dtype: str, rank: int) -> NDArray[Any]:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise FileError(f"{file.path} has no column {name!r}: capture it again")
    if tensor.dtype != dtype or len(tensor.shape) != rank:
        raise FileError(
            f"{file.path}: column {name!r} is {tensor.dtype} {list(tensor.shape)}, expected "
            f"{dtype} with {rank} dimensions: capture it again"
        )
    return tensor.data
