"""Answer files: one JSON object a line with the token ids of a prompt and of the answer to it."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspine.errors import FileError

UNKNOWN_SOURCE = "unknown"


@dataclass(frozen=True, slots=True)
class Record:
    """One sequence: prompt tokens (p,) and answer tokens (g,), either may be empty, not both."""

    id: str
    temperature: float
    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]
    source: str = UNKNOWN_SOURCE
    number: int = 0
    """Which answer to this prompt it is."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Prompt and answer in one array."""
        return np.concatenate([self.prompt, self.answer])

    @property
    def key(self) -> str:
        """Names this very sequence: the id alone may have several answers."""
        return f"{self.id}:{hashlib.sha1(self.tokens.tobytes()).hexdigest()[:10]}"

    def to_line(self) -> str:
        """The record as one line of an answer file, newline included."""
        fields: dict[str, object] = {
            "id": int(self.id) if self.id.isdecimal() else self.id,
            "t": self.temperature,
            "p": self.prompt.tolist(),
            "g": self.answer.tolist(),
        }
        if self.number:
            fields["n"] = self.number
        if self.source != UNKNOWN_SOURCE:
            fields["source"] = self.source
        return json.dumps(fields, separators=(",", ":")) + "\n"


def is_begun_line(data: bytes) -> bool:
    """Whether `data`, which has no newline, may be a line of `Record.to_line` that broke off."""
    try:
        fields = json.loads(data)
    except ValueError:
        return b'{"id":'.startswith(data[:6])
    return isinstance(fields, dict) and "g" in fields


def is_held_out(prompt_id: str, one_in: int) -> bool:
    """Whether a prompt belongs to the part that training never sees; all its answers do then."""
    return one_in > 0 and zlib.crc32(prompt_id.encode()) % one_in == 0


def read_records(
    paths: Sequence[Path], *, vocab_size: int, sources: Mapping[str, str] | None = None
) -> Iterator[Record]:
    """Every record of the files in order; `sources` maps prompt ids to their source.

    Raises FileError for a line that is not a record. Only the very last line of a file may be
    incomplete (a writer was stopped in it): it is left out.
    """
    for path in paths:
        for number, line in enumerate(lines(path, only_ended=True), start=1):
            try:
                record = _parse(json.loads(line), sources or {})
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise FileError(
                    f"{path} line {number} is not an answer ({error}): each line needs the "
                    f"fields id, t, p and g"
                ) from error
            tokens = record.tokens
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
                raise FileError(
                    f"{path} line {number} has token ids outside the vocabulary of {vocab_size}: "
                    f"it belongs to another target"
                )
            yield record


def read_sources(path: Path) -> dict[str, str]:
    """Prompt id -> source, from a prompt file."""
    found = {}
    for number, line in enumerate(lines(path), start=1):
        try:
            fields = json.loads(line)
            found[str(fields["id"])] = str(fields["source"])
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(
                f"{path} line {number} is not a prompt ({error}): each line needs id and source"
            ) from error
    return found


def lines(path: Path, *, only_ended: bool = False) -> Iterator[bytes]:
    """Non-empty lines of a plain or .gz file; with `only_ended` without a last one that lacks its
    newline, which a writer was stopped in."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                if line.strip() and (line.endswith(b"\n") or not only_ended):
                    yield line
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise FileError(f"{path} cannot be read ({reason}): check the path") from error


def _parse(fields: Any, sources: Mapping[str, str]) -> Record:
    identity = str(fields["id"])
    return Record(
        id=identity,
        # Files written by 32-bit tools say 0.800000011920929.
        temperature=round(float(fields["t"]), 4),
        prompt=_tokens(fields["p"]),
        answer=_tokens(fields["g"]),
        source=str(fields.get("source") or sources.get(identity, UNKNOWN_SOURCE)),
        number=int(fields.get("n", 0)),
    )


def _tokens(values: Any) -> NDArray[np.int32]:
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind != "i"):
        raise ValueError("tokens are not a list of whole numbers")
    return array.astype(np.int32)
