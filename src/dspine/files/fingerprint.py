"""A short fingerprint of a large file: enough to tell models apart, cheap for any size."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dspine.errors import FileError
from dspine.files.atomic import reason

HEAD = 1 << 20
"""Bytes at the beginning that count in full: the header, where sizes, types and names are."""

SAMPLES = 64
SAMPLE = 4096
"""Then this many pieces of this many bytes, evenly spread over the rest."""


def file_fingerprint(path: Path) -> str:
    """blake2b (hex, 16 bytes) over a file's size, beginning and evenly spread pieces."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            digest.update(stream.read(HEAD))
            for number in range(SAMPLES):
                at = HEAD + (size - HEAD - SAMPLE) * number // max(1, SAMPLES - 1)
                if at >= HEAD:
                    stream.seek(at)
                    digest.update(stream.read(SAMPLE))
    except OSError as error:
        raise FileError(f"cannot read {path}: {reason(error)}") from error
    return digest.hexdigest()
