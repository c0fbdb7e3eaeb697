"""Captures what a drafter learns from: the target's taps and next-token distributions.

The target decodes whole known sequences, one a call (a prefill), with the taps that drafting
reads; nothing is generated here.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dspine.errors import TrainingError, UsageError
from dspine.files.dtypes import bf16_from_float32
from dspine.files.pairing import describe_target
from dspine.files.schema import default_taps
from dspine.llama.batch import Batch
from dspine.llama.context import Context
from dspine.llama.model import Model, load_safely
from dspine.machine import physical_cores
from dspine.train.progress import JobProgress
from dspine.train.prompts import text_records
from dspine.train.records import Record, is_held_out, read_records, read_sources
from dspine.train.shards import TEACHER_TOP_K, ShardWriter, list_shards, read_info
from dspine.train.target_copy import check_weights, weights_file

# Rows of logits that are looked at together: 64 rows of 150,000 tokens are 38 MB.
_TEACHER_ROWS = 64
# Sequences of the held-out part come first and fill smaller shards, so that they exist early.
_HELD_OUT_SHARD = 10_000


@dataclass(frozen=True, slots=True)
class FeatureOptions:
    """One capture. Taps None: the default spread of `num_taps` over the target's layers."""

    target: Path
    answers: tuple[Path, ...]
    output: Path
    texts: tuple[Path, ...] = ()
    """Plain text files; every token but the first of each piece of `max_tokens` is a label."""
    held_out: Path | None = None
    """Folder for the sequences that training must not see; None: everything goes to `output`."""
    held_out_one_in: int = 50
    taps: tuple[int, ...] | None = None
    num_taps: int = 5
    prompts: Path | None = None
    """Prompt file that says which source an id has; needed to choose by `sources`."""
    sources: tuple[str, ...] = ()
    max_tokens: int = 512
    """Longer sequences are cut off there."""
    max_prompt_tokens: int | None = None
    """Sequences with a longer prompt are left out."""
    token_limit: int | None = None
    """Stop after about so many tokens, all runs into this folder together."""
    seed: int | None = 0
    """Shuffles the sequences; None keeps the order of the files."""
    shard_tokens: int = 50_000
    threads: int | None = None
    flash_attention: bool = True
    weights: str | None = None
    """Capture with a copy of the target whose weights have this type (f16, f32, bf16)."""


@dataclass(frozen=True, slots=True)
class FeatureReport:
    """What one run of a capture did."""

    sequences: int
    tokens: int
    labels: int
    held_out_sequences: int
    seconds: float
    greedy_labels: int
    """Labels of answers made at temperature 0."""
    greedy_agreed: int
    """How many of them are the token that this target finds most probable."""
    largest_feature: float

    @property
    def agreement(self) -> float | None:
        """Share of greedy labels that the target confirms; None without such labels."""
        return self.greedy_agreed / self.greedy_labels if self.greedy_labels else None


def capture(options: FeatureOptions) -> FeatureReport:
    """Capture every chosen sequence that the folders do not hold yet.

    Complete shards are what a later run finds done, so a kill loses at most one shard a folder.
    """
    _check(options)
    pair = describe_target(options.target)
    taps = options.taps or default_taps(pair.num_layers, options.num_taps)
    done, done_tokens = _done(options, taps, pair.fingerprint)
    # Both writers check their folder, so they come before the work.
    writer = ShardWriter(
        options.output, taps=taps, fingerprint=pair.fingerprint, shard_tokens=options.shard_tokens
    )
    held_writer = writer
    if options.held_out is not None:
        held_writer = ShardWriter(
            options.held_out,
            taps=taps,
            fingerprint=pair.fingerprint,
            shard_tokens=min(_HELD_OUT_SHARD, options.shard_tokens),
        )
    threads = options.threads or physical_cores()
    torch.set_num_threads(threads)
    path = weights_file(options.target, options.weights, options.output, threads=threads)
    with load_safely(path) as model:
        records = _choose(options, model, done, done_tokens)
        with Context(
            model,
            n_ctx=options.max_tokens,
            n_batch=options.max_tokens,
            n_threads=threads,
            flash_attention=options.flash_attention,
            taps=taps,
        ) as context:
            reader = _Reader(model, context, options.max_tokens)
            return _capture_all(options, records, reader, writer, held_writer)


def _capture_all(
    options: FeatureOptions,
    records: Sequence[Record],
    reader: _Reader,
    writer: ShardWriter,
    held_writer: ShardWriter,
) -> FeatureReport:
    tally = _Tally()
    total = sum(min(len(r), options.max_tokens) for r in records)
    with JobProgress("features", total) as progress:
        try:
            for record in records:
                held = options.held_out is not None and is_held_out(
                    record.id, options.held_out_one_in
                )
                tokens = reader.add(record, held_writer if held else writer, tally)
                tally.held_out += held
                progress.advance(tokens, f"{tally.sequences:,} sequences")
        finally:
            # Also when the user interrupts: what was computed is worth a small shard.
            held_writer.flush()
            writer.flush()
        return tally.report(progress.seconds)


@dataclass(slots=True)
class _Tally:
    sequences: int = 0
    tokens: int = 0
    labels: int = 0
    held_out: int = 0
    greedy_labels: int = 0
    greedy_agreed: int = 0
    largest: float = 0.0

    def report(self, seconds: float) -> FeatureReport:
        return FeatureReport(
            sequences=self.sequences,
            tokens=self.tokens,
            labels=self.labels,
            held_out_sequences=self.held_out,
            seconds=seconds,
            greedy_labels=self.greedy_labels,
            greedy_agreed=self.greedy_agreed,
            largest_feature=self.largest,
        )


class _Reader:
    """Decodes one sequence and turns what the target shows into rows of a shard."""

    def __init__(self, model: Model, context: Context, max_tokens: int) -> None:
        self._context = context
        self._batch = Batch(max_tokens)
        self._max_tokens = max_tokens
        self._top_k = min(TEACHER_TOP_K, model.vocab_size)
        self._logits = np.empty((_TEACHER_ROWS, model.vocab_size), dtype=np.float32)

    def add(self, record: Record, writer: ShardWriter, tally: _Tally) -> int:
        """Capture one record into `writer`; returns how many tokens were decoded."""
        tokens = record.tokens[: self._max_tokens]
        n = len(tokens)
        # The first token has no row before it that could predict it.
        first_label = max(len(record.prompt), 1)
        loss_mask = np.zeros(n, dtype=np.uint8)
        loss_mask[first_label:] = 1
        self._batch.clear()
        for position, token in enumerate(tokens.tolist()):
            wanted = first_label - 1 <= position < n - 1
            self._batch.add(token, position, (0,), logits=wanted)
        self._context.memory.clear()
        self._context.decode(self._batch)
        features = self._context.features(0, n)
        largest = float(np.abs(features).max())
        if not np.isfinite(largest):
            raise TrainingError(
                f"the target's layers gave a value that is not finite for sequence {record.id}: "
                f"capture without a copy of its weights, or with f32"
            )
        teacher_ids, teacher_probs = self._teacher(n, first_label - 1)
        writer.add(
            sequence_id=record.key,
            source=record.source,
            temperature=record.temperature,
            tokens=tokens,
            loss_mask=loss_mask,
            features=bf16_from_float32(features),
            teacher_ids=teacher_ids,
            teacher_probs=teacher_probs,
        )
        tally.sequences += 1
        tally.tokens += n
        tally.labels += n - first_label
        tally.largest = max(tally.largest, largest)
        if record.temperature == 0 and len(record.prompt):
            tally.greedy_labels += n - first_label
            tally.greedy_agreed += int(
                (teacher_ids[first_label - 1 : n - 1, 0] == tokens[first_label:]).sum()
            )
        return n

    def _teacher(self, n: int, first: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
        """Top tokens and their probabilities for rows first ... n - 2; zeros in the others."""
        ids = np.zeros((n, TEACHER_TOP_K), dtype=np.int32)
        probs = np.zeros((n, TEACHER_TOP_K), dtype=np.float16)
        for start in range(first, n - 1, _TEACHER_ROWS):
            end = min(start + _TEACHER_ROWS, n - 1)
            for row in range(start, end):
                self._logits[row - start] = self._context.logits(row)
            top_ids, top_probs = top_probabilities(self._logits[: end - start], self._top_k)
            ids[start:end, : self._top_k] = top_ids
            probs[start:end, : self._top_k] = top_probs
        return ids, probs


def top_probabilities(
    logits: NDArray[np.float32], k: int
) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """The k most probable ids of each row and their softmax over the whole vocabulary.

    Shapes (n, V) -> (n, k) twice, most probable first; the probabilities need not sum to 1.
    """
    rows = torch.from_numpy(logits)
    values, ids = torch.topk(rows, k, dim=1)
    probs = torch.exp(values - torch.logsumexp(rows, dim=1, keepdim=True))
    return ids.to(torch.int32).numpy(), probs.to(torch.float16).numpy()


def _check(options: FeatureOptions) -> None:
    if not options.answers and not options.texts:
        raise UsageError(
            "there is nothing to capture: name answer files with --answers FILE or plain text "
            "with --texts FILE"
        )
    for name in ("max_tokens", "num_taps", "shard_tokens", "held_out_one_in"):
        if getattr(options, name) < 1:
            raise UsageError(f"{name} is {getattr(options, name)}: it must be at least 1")
    if options.max_tokens < 2:
        raise UsageError(
            "max_tokens is 1: a sequence needs a token and the one after it, give at least 2"
        )
    check_weights(options.weights)
    if options.sources and options.prompts is None:
        raise UsageError(
            "sources can only be chosen when the prompt file is named: name it with --prompts FILE"
        )
    if options.held_out is not None and options.held_out.resolve() == options.output.resolve():
        raise UsageError(
            f"{options.output} cannot hold both the training and the held-out part: name another "
            "folder for one of them"
        )


def _done(options: FeatureOptions, taps: Sequence[int], fingerprint: str) -> tuple[set[str], int]:
    """Keys of the sequences that complete shards hold, and their tokens; refuses a mixture."""
    keys: set[str] = set()
    tokens = 0
    for folder in (options.output, options.held_out):
        for path in list_shards(folder) if folder is not None else []:
            info = read_info(path)
            if info.taps != tuple(taps):
                raise UsageError(
                    f"{path} was captured with taps {list(info.taps)}, now {list(taps)} are "
                    f"asked for: choose another folder"
                )
            if info.fingerprint != fingerprint:
                raise UsageError(
                    f"{path} was captured from another target than {options.target}: choose "
                    f"another folder"
                )
            keys.update(info.ids)
            tokens += info.num_tokens
    return keys, tokens


def _choose(
    options: FeatureOptions, model: Model, done: set[str], done_tokens: int
) -> list[Record]:
    """The sequences to capture, in order: held-out ones first, the rest shuffled by the seed."""
    sources = read_sources(options.prompts) if options.prompts is not None else None
    seen = set(done)
    records = []
    for record in itertools.chain(
        read_records(options.answers, vocab_size=model.vocab_size, sources=sources),
        text_records(model, options.texts, max_tokens=options.max_tokens),
    ):
        if options.sources and record.source not in options.sources:
            continue
        if options.max_prompt_tokens is not None and len(record.prompt) > options.max_prompt_tokens:
            continue
        if min(len(record), options.max_tokens) <= max(len(record.prompt), 1):
            continue
        if record.key not in seen:
            seen.add(record.key)
            records.append(record)
    if options.seed is not None:
        random.Random(options.seed).shuffle(records)
    if options.held_out is not None:
        records.sort(key=lambda r: not is_held_out(r.id, options.held_out_one_in))
    if options.token_limit is None:
        return records
    chosen = []
    left = options.token_limit - done_tokens
    for record in records:
        if left <= 0:
            break
        chosen.append(record)
        left -= min(len(record), options.max_tokens)
    return chosen
