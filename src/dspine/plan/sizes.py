"""Sizes in bytes: text such as 24G to a number, and back for people."""

from __future__ import annotations

import re
from collections.abc import Mapping

from dspine.errors import UsageError

MIB, GIB = 1 << 20, 1 << 30

_UNITS: Mapping[str, int] = {
    "": 1,
    "b": 1,
    "k": 1 << 10,
    "m": MIB,
    "g": GIB,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
UNITS_SENTENCE = (
    "K, M, G and T (also KiB, MiB, GiB, TiB) are powers of 1024, KB, MB, GB and TB powers of 1000"
)


def parse_size(text: str, origin: str) -> int:
    """Bytes of a size such as `24G`, `24GiB`, `24000M` or `24GB`, which came from `origin`.

    UsageError for anything else and for 0.
    """
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _UNITS.get(match[2].lower())
    if match is None or unit is None:
        raise UsageError(
            f"{origin} is {text!r}: give a size such as 24G or 24000M; {UNITS_SENTENCE}"
        )
    size = int(float(match[1]) * unit)
    if size < 1:
        raise UsageError(f"{origin} is {text}: it must be more than nothing")
    return size


def shown(n_bytes: int) -> str:
    """A size for people, in MiB or GiB."""
    if abs(n_bytes) < GIB:
        digits = 0 if abs(n_bytes) >= 10 * MIB else 1
        return f"{n_bytes / MIB:.{digits}f} MiB"
    return f"{n_bytes / GIB:.2f} GiB"
