"""Which target tokens a drafter may propose: the most frequent ones of the training answers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dspine.errors import FileError, UsageError
from dspine.train.shards import Shard

# A multiple of this lets the largest logits be found group by group.
_MULTIPLE = 16


def count_answers(paths: Sequence[Path], vocab_size: int) -> NDArray[np.int64]:
    """How often each token (V,) stands in the answers (field `g`) of JSON-lines files."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for path in paths:
        for number, line in enumerate(_lines(path), start=1):
            try:
                tokens = np.asarray(json.loads(line)["g"], dtype=np.int64)
            except (KeyError, TypeError, ValueError) as error:
                raise FileError(f"{path} line {number} is not an answer: {error}") from error
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
                raise FileError(
                    f"{path} line {number} has tokens outside the vocabulary of {vocab_size}: "
                    f"the answers belong to another target"
                )
            counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def count_shards(shards: Sequence[Shard], vocab_size: int) -> NDArray[np.int64]:
    """How often each token (V,) is a label of the shards."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in shards:
        counts += np.bincount(shard.tokens[shard.loss_mask > 0], minlength=vocab_size)
    return counts


def most_frequent(counts: NDArray[np.int64], size: int, always: Sequence[int] = ()) -> list[int]:
    """`size` token ids, ascending: `always` and the most frequent others, low ids first in ties."""
    if not 0 < size <= len(counts) or size % _MULTIPLE:
        raise UsageError(
            f"a draft vocabulary of {size} tokens is not possible: choose a multiple of "
            f"{_MULTIPLE} up to {len(counts)}"
        )
    ranked = counts.copy()
    ranked[list(always)] = np.iinfo(np.int64).max
    order = np.argsort(-ranked, kind="stable")[:size]
    return sorted(int(i) for i in order)


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield line
    except (OSError, EOFError) as error:
        raise FileError(f"answers {path} cannot be read ({error}): check the path") from error
