"""A copy of the target in another weight type, made once and used again, for faster long jobs."""

from __future__ import annotations

from pathlib import Path

from dspine.errors import UsageError
from dspine.llama.convert_weights import WEIGHT_TYPES, convert_weights


def check_weights(weights: str | None) -> None:
    """UsageError unless this names a weight type, or None for the target's own file."""
    if weights is not None and weights not in WEIGHT_TYPES:
        raise UsageError(f"weights {weights!r} is unknown: choose {', '.join(WEIGHT_TYPES)}")


def weights_file(target: Path, weights: str | None, folder: Path, *, threads: int) -> Path:
    """The file to decode with: the target itself, or its copy in `folder` (made if missing).

    On CPUs without matrix units the products of a small quantised target take most of the time of
    a prefill, and the same model in f16 is about twice as fast.
    """
    check_weights(weights)
    if weights is None:
        return target
    copy = folder / f"{target.stem}-{weights}.gguf"
    if not copy.exists():
        convert_weights(target, copy, weights, n_threads=threads)
    return copy
