"""The metadata keys of a drafter GGUF: from configuration to keys and, strictly, back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dspine.errors import FileError
from dspine.files.gguf_file import MetadataValue
from dspine.files.gguf_writer import WritableValue
from dspine.files.mapped import printable, shown
from dspine.files.schema import ARCHITECTURE, DSpineConfig, Pair, TrainingRecord

_PREFIX = f"{ARCHITECTURE}."
_COUNTS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
    "target_hidden_size": "target.embedding_length",
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "transfer_rank": "transfer_rank",
    "message_size": "message_size",
    "top_k": "top_k",
    "max_positions": "context_length",
}
"""Whole numbers: field of DSpineConfig -> key without the architecture."""
_REQUIRED_FOR = {
    "attention.causal": "whether each layer's attention inside the block is causal",
    "attention.sliding_window": "the window of each layer (0 for none)",
}


def to_metadata(
    config: DSpineConfig, pair: Pair, record: TrainingRecord
) -> dict[str, WritableValue]:
    """All keys of a drafter file. Raises FileError when the record cannot be stored."""
    values: dict[str, WritableValue] = {
        key: _uint32(field, getattr(config, field)) for field, key in _COUNTS.items()
    }
    values |= {
        "attention.value_length": _uint32("head_dim", config.head_dim),
        "attention.layer_norm_rms_epsilon": _float32("rms_norm_eps", config.rms_norm_eps),
        "rope.freq_base": _float32("rope_theta", config.rope_theta),
        # As in llama.cpp's files for this family: the input of layer i + 1 is read.
        "target_layers": np.array([_uint32("taps", t + 1) for t in config.taps]),
        "attention.causal": np.array(config.causal, dtype=np.bool_),
        "attention.sliding_window": np.array([_uint32("windows", w or 0) for w in config.windows]),
        "target.name": pair.name,
        "target.architecture": pair.architecture,
        "target.block_count": _uint32("the target's num_layers", pair.num_layers),
        "target.vocab_size": _uint32("the target's vocab_size", pair.vocab_size),
        "target.vocab_hash": pair.vocab_hash,
        "target.fingerprint": pair.fingerprint,
        "target.thinking": pair.thinking,
        "acceptance_curve": np.array(checked_curve(config, record), dtype=np.float32),
        "training": provenance_json(record),
    }
    metadata: dict[str, WritableValue] = {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.quantization_version": np.uint32(2),
    }
    return metadata | {_PREFIX + key: value for key, value in values.items()}


def from_metadata(
    path: Path, metadata: Mapping[str, MetadataValue], draft_vocab_size: int | None
) -> tuple[DSpineConfig, Pair, TrainingRecord]:
    """Read every key strictly: missing, mistyped and unknown `dspine.*` keys raise FileError."""
    keys = _Keys(path, metadata)
    counts = {field: keys.count(key) for field, key in _COUNTS.items()}
    if (value_length := keys.count("attention.value_length")) != counts["head_dim"]:
        raise keys.wrong("attention.value_length", f"{counts['head_dim']}", value_length)
    taps = keys.counts("target_layers")
    if 0 in taps:
        raise keys.wrong("target_layers", "numbers from 1 (layer id + 1)", list(taps))
    causal = keys.booleans("attention.causal")
    windows = keys.counts("attention.sliding_window")
    pair = Pair(
        name=printable(keys.text("target.name")),
        architecture=printable(keys.text("target.architecture")),
        hidden_size=counts["target_hidden_size"],
        num_layers=keys.count("target.block_count"),
        vocab_size=keys.count("target.vocab_size"),
        vocab_hash=keys.text("target.vocab_hash"),
        fingerprint=keys.text("target.fingerprint"),
        thinking=keys.boolean("target.thinking"),
    )
    eps = keys.number("attention.layer_norm_rms_epsilon")
    theta = keys.number("rope.freq_base")
    curve = keys.numbers("acceptance_curve")
    provenance = _provenance(keys)
    keys.refuse_unknown()
    try:
        config = DSpineConfig(
            **counts,
            taps=tuple(t - 1 for t in taps),
            windows=tuple(w or None for w in windows),
            causal=causal,
            rope_theta=theta,
            rms_norm_eps=eps,
            draft_vocab_size=draft_vocab_size,
        )
        record = TrainingRecord(curve, provenance)
        checked_curve(config, record)
    except FileError as error:
        raise FileError(f"{path}: {error}") from error
    return config, pair, record


def checked_curve(config: DSpineConfig, record: TrainingRecord) -> tuple[float, ...]:
    """The acceptance curve; FileError unless it is empty or has a probability for every slot."""
    curve = record.acceptance_curve
    if curve and len(curve) != config.block_size - 1:
        raise FileError(
            f"acceptance_curve has {len(curve)} values, expected {config.block_size - 1} "
            f"(one per drafted slot) or none"
        )
    bad = next((p for p in curve if not 0.0 <= p <= 1.0), None)
    if bad is not None:
        raise FileError(f"acceptance_curve has the value {bad}, expected probabilities 0 to 1")
    return curve


def provenance_json(record: TrainingRecord) -> str:
    """The training record as JSON text; FileError when something in it is not plain data."""
    try:
        return json.dumps(dict(record.provenance), allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise FileError(
            f"the training record cannot be stored as JSON ({error}): use numbers, text, lists "
            f"and dictionaries"
        ) from error


def _uint32(name: str, value: int) -> np.uint32:
    if not 0 <= value < 1 << 32:
        raise FileError(f"{name} {value} cannot be stored: it must be from 0 to {(1 << 32) - 1}")
    return np.uint32(value)


def _float32(name: str, value: float) -> np.float32:
    with np.errstate(over="ignore", under="ignore"):
        stored = np.float32(value)
    if not (np.isfinite(stored) and stored > 0):
        raise FileError(f"{name} {value} cannot be stored as float32: use a usual value")
    return stored


def _provenance(keys: _Keys) -> Mapping[str, object]:
    text = keys.text("training")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise keys.wrong("training", "a JSON object", text[:40])
    return value


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32, so that 1e-6 stays 1e-6 after a round trip."""
    return float(str(np.float32(value))) if math.isfinite(value) else value


class _Keys:
    """Typed access to `dspine.*` keys that remembers which were asked for."""

    def __init__(self, path: Path, metadata: Mapping[str, MetadataValue]) -> None:
        self._path = path
        self._metadata = metadata
        self._asked: set[str] = set()

    def wrong(self, key: str, expected: str, found: object) -> FileError:
        return FileError(
            f"{self._path}: {_PREFIX}{key} is {shown(repr(found))}, expected {expected}"
        )

    def refuse_unknown(self) -> None:
        unknown = [
            key for key in self._metadata if key.startswith(_PREFIX) and key not in self._asked
        ]
        if unknown:
            raise FileError(
                f"{self._path} has keys that this dspine does not know "
                f"({shown(', '.join(unknown[:5]))}): it may need a newer "
                f"dspine, and running it without them would be wrong"
            )

    def count(self, key: str) -> int:
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(key, "a whole number", value)
        return value

    def number(self, key: str) -> float:
        value = self._get(key)
        if not isinstance(value, float):
            raise self.wrong(key, "a number with a fraction (float32)", value)
        return _shortest(value)

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a text", value)
        return value

    def boolean(self, key: str) -> bool:
        value = self._get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        array = self._array(key, "iu", "a list of whole numbers, one per entry")
        if array.size and int(array.min()) < 0:
            raise self.wrong(key, "numbers from 0", array.tolist())
        return tuple(int(v) for v in array)

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(_shortest(float(v)) for v in self._array(key, "f", "a list of floats"))

    def booleans(self, key: str) -> tuple[bool, ...]:
        return tuple(bool(v) for v in self._array(key, "b", "a list of true or false, per layer"))

    def _array(self, key: str, kinds: str, expected: str) -> npt.NDArray[np.generic]:
        value = self._get(key)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            shown = f"a list of {value.dtype}" if isinstance(value, np.ndarray) else value
            raise self.wrong(key, expected, shown)
        return value

    def _get(self, key: str) -> MetadataValue:
        self._asked.add(_PREFIX + key)
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            why = _REQUIRED_FOR.get(key)
            raise FileError(
                f"{self._path} has no {_PREFIX}{key}"
                + (f", which must say {why}" if why else "")
                + ": write the file again with dspine"
            )
        return value
