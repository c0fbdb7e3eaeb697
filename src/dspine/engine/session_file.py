"""Conversations on disk: messages, tokens, and the memory of target and drafter for them."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dspine.drafters.base import ContextState
from dspine.engine.target import Snapshot
from dspine.errors import FileError, UsageError
from dspine.files.atomic import atomic_write, reason

MAGIC = b"DSPSESS\x00"
VERSION = 1
WHAT = {
    "target": "target",
    "library": "version of the llama.cpp library",
    "cache_type_k": "number format of the keys (-ctk)",
    "cache_type_v": "number format of the values (-ctv)",
    "flash_attention": "flash attention setting (-fa)",
}
"""Entries of `made_with` in which a saved memory must agree; `drafter` is compared apart."""

_PREFIX = struct.Struct("<8sIQ")
_DIGEST = 32


@dataclass(frozen=True, slots=True)
class SavedSession:
    """What a session file holds.

    `made_with` says what the memory belongs to (target, cache types, library, drafter).
    `tokens` are those whose memory `state` is, in llama.cpp's own form for one sequence; both
    are empty when the messages alone were worth keeping. `checkpoints` are earlier states of a
    recurrent target, `drafter` is the drafter's context K/V.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    made_with: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    state: bytes = b""
    checkpoints: tuple[Snapshot, ...] = ()
    drafter: ContextState | None = None


def write_session(path: Path, saved: SavedSession, *, overwrite: bool = False) -> None:
    """Write a session file; `path` shows the whole new file or stays as it was."""
    tokens = np.asarray(saved.tokens, "<i4").tobytes()
    context = saved.drafter
    sections = [tokens, saved.state, context.data if context else b""]
    sections += [checkpoint.data for checkpoint in saved.checkpoints]
    try:
        header = json.dumps(
            {
                "messages": [dict(message) for message in saved.messages],
                "variables": dict(saved.variables),
                "made_with": dict(saved.made_with),
                "drafter": None if context is None else [context.start, context.length],
                "checkpoints": [checkpoint.position for checkpoint in saved.checkpoints],
                "sections": [len(section) for section in sections],
            },
            ensure_ascii=False,
            allow_nan=False,
        ).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"this conversation cannot be saved, its messages or variables are no plain JSON "
            f"({error}): keep to texts, numbers, lists and objects"
        ) from error
    parts = [_PREFIX.pack(MAGIC, VERSION, len(header)), header, *sections]
    digest = hashlib.blake2b(digest_size=_DIGEST)
    with atomic_write(path, overwrite=overwrite) as stream:
        for part in parts:
            digest.update(part)
            stream.write(part)
        stream.write(digest.digest())


def read_session(path: Path) -> SavedSession:
    """Read and check a session file; FileError for one that is damaged, cut short or no such
    file at all."""
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise FileError(f"{path} does not exist: name a session that was saved") from error
    except OSError as error:
        raise FileError(f"cannot read {path}: {reason(error)}") from error
    if data[: len(MAGIC)] != MAGIC or len(data) < _PREFIX.size:
        raise FileError(f"{path} is not a saved session: name a file that dspine has saved as one")
    _, version, size = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise FileError(
            f"{path} is a session of format {version}, this dspine reads format {VERSION}: use "
            f"the version that saved it, or start a new session"
        )
    view = memoryview(data)
    body = view[: len(data) - _DIGEST]
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != view[len(body) :]:
        raise FileError(
            f"{path} is damaged or cut short (its checksum does not match): restore a copy, or "
            f"delete it and start a new session"
        )
    try:
        header = json.loads(bytes(view[_PREFIX.size : _PREFIX.size + size]))
        lengths = [int(length) for length in header["sections"]]
        at = _PREFIX.size + size
        if min(lengths) < 0 or at + sum(lengths) != len(body):
            raise ValueError("sections of another length")
        tokens, state, rows, *states = _split(body[at:], lengths)
        span = header["drafter"]
        return SavedSession(
            messages=tuple(_mapping(message) for message in header["messages"]),
            variables=_mapping(header["variables"]),
            made_with=_mapping(header["made_with"]),
            tokens=tuple(np.frombuffer(tokens, "<i4").tolist()),
            state=bytes(state),
            checkpoints=tuple(
                Snapshot(int(position), bytes(data))
                for position, data in zip(header["checkpoints"], states, strict=True)
            ),
            drafter=None if span is None else ContextState(int(span[0]), int(span[1]), bytes(rows)),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FileError(
            f"{path} has a header that this dspine does not understand ({error}): start a new "
            f"session"
        ) from error


def check_made_with(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """FileError unless a saved memory belongs to this target with these settings."""
    for key, what in WHAT.items():
        before, now = saved.get(key), here.get(key)
        if before != now:
            shown = "" if key == "target" else f" ({before} then, {now} now)"
            raise FileError(
                f"the session was saved with another {what}{shown}: load it with the same, or "
                f"start a new session"
            )


def _split(body: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    parts, at = [], 0
    for length in lengths:
        parts.append(body[at : at + length])
        at += length
    return parts


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return value
