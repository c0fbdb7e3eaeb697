"""A table of likely next tokens after one, two or three tokens, counted on training text.

Keys are packed exactly (21 bits a token, absent ones 0) and sorted; a lookup is a binary search.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dspine.engine.ngram import TOKEN_BITS
from dspine.errors import FileError, UsageError
from dspine.ggml.kernels import Kernels
from dspine.ggml.ngram import NativeTable

FORMAT = 1
ORDERS = (3, 2, 1)
DOUBT = {1: 2.3, 2: 1.7, 3: 1.1}
"""Exponents that fit the probabilities to 400 answers of the default target not counted in."""

MAX_TOKEN = (1 << TOKEN_BITS) - 2

# A zip whose head is damaged names methods, versions or a password that zipfile does not know.
_DAMAGED = (
    OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip

_MASKS = tuple((1 << (TOKEN_BITS * order)) - 1 for order in ORDERS)
"""The part of a packed context that counts for each order."""

Keys = npt.NDArray[np.uint64]
Tokens = npt.NDArray[np.int32]
Confidences = npt.NDArray[np.uint8]


class Continuation(NamedTuple):
    """The likely next token, its probability, and the length of the context that says so."""

    token: int
    probability: float
    order: int


class NgramTable:
    """Immutable; entries of all orders share one sorted array (13 bytes an entry)."""

    def __init__(self, keys: Keys, tokens: Tokens, confidences: Confidences) -> None:
        """`keys` uint64 ascending, `tokens` int32, `confidences` uint8 (255 = certain)."""
        self.keys, self.tokens, self.confidences = keys, tokens, confidences
        self._keys = keys.data
        self._tokens = tokens.data
        self._confidences = confidences.data
        self._native: NativeTable | None = None

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def highest_token(self) -> int:
        """Largest token id it proposes, -1 when it is empty."""
        return int(self.tokens.max(initial=-1))

    def native(self, plug_in: Kernels) -> NativeTable:
        """The same table for the kernels' lookups, made when it is first asked for."""
        if self._native is None:
            parts = self.keys, self.tokens, self.confidences
            self._native = NativeTable(plug_in.library, *map(np.ascontiguousarray, parts))
        return self._native

    def after(self, context: Sequence[int], least: float = 0.0) -> Continuation | None:
        """What follows `context` (its last three tokens count), the longest known part first.

        Entries with a probability under `least` are passed over in favour of shorter ones.
        """
        key = _packed(context)
        found = self._likely(key, least)
        if found is None:
            return None
        token, probability, order = found
        return Continuation(token, probability, min(order, len(context)))

    def chain(
        self, context: Sequence[int], count: int, least: float, least_reach: float
    ) -> tuple[list[int], list[float], float]:
        """(tokens, their probabilities, chance that all are right): up to `count` of what follows
        `context`, each after those before it, until it becomes less likely than `least_reach`.
        """
        key, reached = _packed(context), 1.0
        tokens: list[int] = []
        probabilities: list[float] = []
        while len(tokens) < count and reached >= least_reach:
            found = self._likely(key, least)
            if found is None:
                break
            token, probability, _ = found
            tokens.append(token)
            probabilities.append(probability)
            reached *= probability
            key = ((key << TOKEN_BITS) | (token + 1)) & _MASKS[0]
        return tokens, probabilities, reached

    def _likely(self, key: int, least: float) -> tuple[int, float, int] | None:
        """(token, probability, order) after the packed last tokens."""
        keys = self._keys
        for mask, order in zip(_MASKS, ORDERS, strict=True):
            part = key & mask
            at = bisect_left(keys, part)
            if at < len(keys) and keys[at] == part:
                probability = self._confidences[at] / 255.0
                if probability >= least:
                    return self._tokens[at], probability, order
        return None

    def save(self, path: Path) -> None:
        """Write the table (npz); the file appears whole or not at all."""
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with partial.open("wb") as stream:
                np.savez_compressed(
                    stream,
                    format=np.array(FORMAT, dtype=np.int32),
                    keys=self.keys,
                    tokens=self.tokens,
                    confidences=self.confidences,
                )
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise FileError(f"{path} cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path) -> NgramTable:
        """Read a table; FileError says what is wrong with a damaged or foreign file."""
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
                parts = {name: stored[name] for name in stored.files}
        except FileNotFoundError as error:
            raise FileError(f"n-gram table {path} does not exist: check the path") from error
        except _DAMAGED as error:
            raise FileError(
                f"{path} is not a readable n-gram table ({error}): build it again"
            ) from error
        expected = {"keys": np.uint64, "tokens": np.int32, "confidences": np.uint8}
        for name, kind in expected.items():
            if name not in parts or parts[name].dtype != kind or parts[name].ndim != 1:
                raise FileError(f"{path} has no valid `{name}`: it is not an n-gram table")
        if parts.get("format", np.array(-1)).tolist() != FORMAT:
            raise FileError(f"{path} has an unknown n-gram table format: build it again")
        if len({len(parts[name]) for name in expected}) != 1:
            raise FileError(f"{path} is damaged: its columns have different lengths")
        keys = parts["keys"]
        if np.any(keys[1:] <= keys[:-1]):
            raise FileError(f"{path} is damaged: its keys are not in order")
        if np.any(parts["tokens"] < 0):
            raise FileError(f"{path} is damaged: it proposes a negative token")
        return cls(keys, parts["tokens"], parts["confidences"])


def _packed(context: Sequence[int]) -> int:
    """The key of its last tokens, as many as the longest order has."""
    key = 0
    for token in context[-ORDERS[0] :]:
        key = (key << TOKEN_BITS) | (token + 1)
    return key


def build_table(
    streams: Iterable[Sequence[int] | npt.NDArray[np.integer]],
    *,
    min_count: int = 2,
    min_probability: float = 0.2,
    max_entries: int | None = None,
) -> NgramTable:
    """Count what follows every 1-, 2- and 3-gram of the token streams and keep the best one.

    The probability of an entry is (best / (all + 1)) ** DOUBT[order]: rare contexts are trusted
    less, and so are short ones, which are asked only where the text is new. Entries seen fewer
    than `min_count` times or less probable than `min_probability` are left out; `max_entries`
    keeps those seen most.
    """
    arrays = [np.asarray(stream, dtype=np.int64) for stream in streams]
    for array in arrays:
        if array.size and (array.min() < 0 or array.max() > MAX_TOKEN):
            raise UsageError(f"token ids must lie in 0 ... {MAX_TOKEN} for an n-gram table")
    kept: list[tuple[Keys, Tokens, npt.NDArray[np.float64], npt.NDArray[np.int64]]] = []
    for order in sorted(ORDERS):
        keys, tokens, counts, totals = _count(arrays, order)
        probabilities = (counts / (totals + 1.0)) ** DOUBT[order]
        wanted = (counts >= min_count) & (probabilities >= min_probability)
        kept.append((keys[wanted], tokens[wanted], probabilities[wanted], counts[wanted]))
    all_keys = np.concatenate([part[0] for part in kept])
    all_tokens = np.concatenate([part[1] for part in kept])
    all_probabilities = np.concatenate([part[2] for part in kept])
    all_counts = np.concatenate([part[3] for part in kept])
    if max_entries is not None and len(all_keys) > max_entries:
        best = np.argsort(-all_counts, kind="stable")[:max_entries]
        all_keys, all_tokens = all_keys[best], all_tokens[best]
        all_probabilities = all_probabilities[best]
    rank = np.argsort(all_keys, kind="stable")
    confidences = np.rint(all_probabilities[rank] * 255.0).astype(np.uint8)
    return NgramTable(all_keys[rank], all_tokens[rank], confidences)


def _count(
    arrays: Sequence[npt.NDArray[np.int64]], order: int
) -> tuple[Keys, Tokens, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(context keys, their most frequent next token, its count, count of the context)."""
    contexts, followers = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for array in arrays:
        if len(array) <= order:
            continue
        key = np.zeros(len(array) - order, np.uint64)
        for offset in range(order):
            token = (array[offset : len(array) - order + offset] + 1).astype(np.uint64)
            key = (key << np.uint64(TOKEN_BITS)) | token
        contexts.append(key)
        followers.append(array[order:])
    key, follower = np.concatenate(contexts), np.concatenate(followers)
    if not len(key):
        return key, follower.astype(np.int32), follower, follower
    rank = np.lexsort((follower, key))
    key, follower = key[rank], follower[rank]
    starts = np.flatnonzero(
        np.concatenate(([True], (key[1:] != key[:-1]) | (follower[1:] != follower[:-1])))
    )
    pair_counts = np.diff(np.append(starts, len(key)))
    pair_keys, pair_tokens = key[starts], follower[starts]
    rank = np.lexsort((-pair_tokens, pair_counts, pair_keys))
    pair_keys, pair_tokens, pair_counts = pair_keys[rank], pair_tokens[rank], pair_counts[rank]
    ends = np.flatnonzero(np.concatenate((pair_keys[1:] != pair_keys[:-1], [True])))
    totals = np.diff(np.concatenate(([0], np.cumsum(pair_counts)[ends])))
    return pair_keys[ends], pair_tokens[ends].astype(np.int32), pair_counts[ends], totals
