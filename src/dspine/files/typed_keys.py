"""Metadata keys of drafter files: typed reading, and the values both kinds of file share."""

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
from dspine.files.schema import DrafterConfig, Pair, Sketch, TrainingRecord
from dspine.files.sketch import check_sketch


def checked_curve(config: DrafterConfig, record: TrainingRecord) -> tuple[float, ...]:
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


def read_provenance(keys: Keys) -> Mapping[str, object]:
    """The training record of key `training`."""
    text = keys.text("training")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise keys.wrong("training", "a JSON object", text[:40])
    return value


def target_values(pair: Pair) -> dict[str, WritableValue]:
    """The keys that say which target a drafter is for, below a prefix, without its sizes, which
    each kind of file has in places of its own."""
    return {
        "target.name": pair.name,
        "target.architecture": pair.architecture,
        "target.block_count": uint32("the target's num_layers", pair.num_layers),
        "target.vocab_hash": pair.vocab_hash,
        "target.fingerprint": pair.fingerprint,
        "target.thinking": pair.thinking,
        **_sketch_values(pair),
    }


def read_target_keys(keys: Keys, *, hidden_size: int, vocab_size: int) -> Pair:
    """The pair of these keys; the sizes come from where the kind of file has them."""
    return Pair(
        name=printable(keys.text("target.name")),
        architecture=printable(keys.text("target.architecture")),
        hidden_size=hidden_size,
        num_layers=keys.count("target.block_count"),
        vocab_size=vocab_size,
        vocab_hash=keys.text("target.vocab_hash"),
        fingerprint=keys.text("target.fingerprint"),
        thinking=keys.boolean("target.thinking"),
        sketch=_read_sketch_keys(keys),
    )


def _sketch_values(pair: Pair) -> dict[str, WritableValue]:
    """The keys of the target's sketch, below a prefix; none without one."""
    sketch = pair.sketch
    if sketch is None:
        return {}
    return {
        "target.sketch.names": sketch.names,
        "target.sketch.types": sketch.types,
        "target.sketch.sizes": np.array(sketch.sizes, dtype=np.uint32),
        "target.sketch.data": np.frombuffer(sketch.data, dtype=np.uint8),
    }


def _read_sketch_keys(keys: Keys) -> Sketch | None:
    """The sketch of a drafter file; None in files from before there were any."""
    if "target.sketch.names" not in keys:
        return None
    data = keys.octets("target.sketch.data")
    sketch = Sketch(
        names=tuple(map(printable, keys.texts("target.sketch.names"))),
        types=keys.texts("target.sketch.types"),
        sizes=keys.counts("target.sketch.sizes"),
        data=data,
    )
    if (expected := check_sketch(sketch)) is not None:
        raise keys.wrong("target.sketch.data", expected, f"{len(data)} bytes")
    return sketch


def uint32(name: str, value: int) -> np.uint32:
    """`value` as it is stored; FileError when it does not fit."""
    if not 0 <= value < 1 << 32:
        raise FileError(f"{name} {value} cannot be stored: it must be from 0 to {(1 << 32) - 1}")
    return np.uint32(value)


def float32(name: str, value: float) -> np.float32:
    """`value` as it is stored; FileError unless it is positive and finite there."""
    with np.errstate(over="ignore", under="ignore"):
        stored = np.float32(value)
    if not (np.isfinite(stored) and stored > 0):
        raise FileError(f"{name} {value} cannot be stored as float32: use a usual value")
    return stored


def writable(value: MetadataValue) -> WritableValue:
    """A value as it is written: of scalars the narrowest width that holds it, 32 bits at least."""
    if isinstance(value, bool | str | tuple | np.ndarray):
        return value
    if isinstance(value, float):
        single = np.float32(value)
        return single if float(single) == value or value != value else np.float64(value)
    for kind in (np.uint32, np.int32, np.uint64, np.int64):
        if np.iinfo(kind).min <= value <= np.iinfo(kind).max:
            return kind(value)
    raise FileError(f"a metadata number is {value}, which no GGUF holds: use one of up to 64 bits")


class Keys:
    """Typed access to the keys below a prefix that remembers which were asked for."""

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, MetadataValue],
        prefix: str,
        required_for: Mapping[str, str] | None = None,
    ) -> None:
        self._path = path
        self._metadata = metadata
        self._prefix = prefix
        self._required_for = required_for or {}
        self._asked: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._metadata

    def wrong(self, key: str, expected: str, found: object) -> FileError:
        """What to raise for a value that does not fit."""
        return FileError(
            f"{self._path}: {self._prefix}{key} is {shown(repr(found))}, expected {expected}"
        )

    def ignore(self, key: str) -> None:
        """Count a key as asked for, whether it is there or not."""
        self._asked.add(self._prefix + key)

    def refuse_unknown(self) -> None:
        """Raise FileError for keys below the prefix that nobody asked for."""
        unknown = [
            key for key in self._metadata if key.startswith(self._prefix) and key not in self._asked
        ]
        if unknown:
            raise FileError(
                f"{self._path} has keys that this dspine does not know "
                f"({shown(', '.join(unknown[:5]))}): it may need a newer "
                f"dspine, and running it without them would be wrong"
            )

    def count(self, key: str) -> int:
        """A whole number from 0."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(key, "a whole number", value)
        return value

    def number(self, key: str) -> float:
        """A float32, as the shortest decimal that gives it."""
        value = self._get(key)
        if not isinstance(value, float):
            raise self.wrong(key, "a number with a fraction (float32)", value)
        return _shortest(value)

    def text(self, key: str) -> str:
        """A text."""
        value = self._get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a text", value)
        return value

    def boolean(self, key: str) -> bool:
        """True or false."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers from 0."""
        array = self._array(key, "iu", "a list of whole numbers, one per entry")
        if array.size and int(array.min()) < 0:
            raise self.wrong(key, "numbers from 0", array.tolist())
        return tuple(int(v) for v in array)

    def octets(self, key: str) -> bytes:
        """A list of bytes."""
        value = self._get(key)
        if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
            raise self.wrong(key, "a list of bytes", type(value).__name__)
        return value.tobytes()

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts."""
        value = self._get(key)
        if not isinstance(value, tuple):
            raise self.wrong(key, "a list of texts", value)
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of floats."""
        return tuple(_shortest(float(v)) for v in self._array(key, "f", "a list of floats"))

    def booleans(self, key: str) -> tuple[bool, ...]:
        """A list of true or false."""
        return tuple(bool(v) for v in self._array(key, "b", "a list of true or false, per layer"))

    def _array(self, key: str, kinds: str, expected: str) -> npt.NDArray[np.generic]:
        value = self._get(key)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            shown = f"a list of {value.dtype}" if isinstance(value, np.ndarray) else value
            raise self.wrong(key, expected, shown)
        return value

    def _get(self, key: str) -> MetadataValue:
        self._asked.add(self._prefix + key)
        value = self._metadata.get(self._prefix + key)
        if value is None:
            why = self._required_for.get(key)
            raise FileError(
                f"{self._path} has no {self._prefix}{key}"
                + (f", which must say {why}" if why else "")
                + ": the file is incomplete, make it again"
            )
        return value


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32, so that 1e-6 stays 1e-6 after a round trip."""
    return float(str(np.float32(value))) if math.isfinite(value) else value
