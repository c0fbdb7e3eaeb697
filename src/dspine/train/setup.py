"""What a run needs before its first step: configuration, held-out shards, draft vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from dspine.errors import TrainingError
from dspine.files.gguf_file import read_header
from dspine.files.schema import VARIATIONS, DrafterConfig
from dspine.text.reasoning import CLOSE
from dspine.train.batches import ShardPool
from dspine.train.options import FitOptions
from dspine.train.shards import Shard, list_shards, read_info
from dspine.train.target import Target
from dspine.train.vocabulary import count_answers, count_shards, most_frequent


def drafter_config(options: FitOptions, target: Target) -> DrafterConfig:
    """The drafter that the options ask for, with the taps of the first shard."""
    paths = [p for folder in options.shards for p in list_shards(folder)]
    if not paths:
        raise TrainingError(
            f"no feature shard in {', '.join(str(f) for f in options.shards)}: capture features "
            f"first"
        )
    g = options.geometry
    return target.drafter_config(
        kind=g.kind,
        num_layers=g.num_layers,
        block_size=g.block_size,
        taps=read_info(paths[0]).taps,
        transfer_rank=g.transfer_rank,
        message_size=g.message_size,
        top_k=g.top_k,
        conv_kernel_size=g.conv_kernel_size,
        conv_group_size=g.conv_group_size,
        selector_rank=g.selector_rank,
        causal=g.causal,
        window=g.window,
        mask_token_id=g.mask_token_id,
        intermediate_size=g.intermediate_size,
        draft_vocab_size=options.draft_vocab_size,
        max_positions=g.max_positions,
    )


def read_held_out(folders: Sequence[Path]) -> list[Shard]:
    """Every shard of the held-out folders."""
    shards = []
    for folder in folders:
        found = list_shards(folder)
        if not found:
            raise TrainingError(
                f"no feature shard in the held-out folder {folder}: name the one that "
                f"`dspine train features --held-out-output` filled"
            )
        shards += [Shard.read(path) for path in found]
    return shards


def choose_vocabulary(options: FitOptions, target: Target, pool: ShardPool) -> list[int] | None:
    """Target ids that can be drafted, or None for all of them."""
    if options.draft_vocab_size is None:
        return None
    if options.vocabulary_answers:
        counts = count_answers(options.vocabulary_answers, target.pair.vocab_size)
    else:
        counts = count_shards(pool.shards, target.pair.vocab_size)
    return most_frequent(counts, options.draft_vocab_size)


def has_thoughts(target: Path, shards: Sequence[Shard]) -> bool:
    """Whether at least half of the answers hold the mark that ends thoughts: what is recorded of
    the drafter, whose acceptance is lower in the other mode.
    """
    texts = read_header(target).metadata.get("tokenizer.ggml.tokens")
    if not isinstance(texts, tuple) or CLOSE not in texts:
        return False
    mark = texts.index(CLOSE)
    found = total = 0
    for shard in shards:
        ends = (shard.tokens == mark) & (shard.loss_mask > 0)
        found += sum(bool(ends[shard.sequence(i)].any()) for i in range(shard.num_sequences))
        total += shard.num_sequences
    return 2 * found >= total > 0


def as_plain(config: DrafterConfig) -> dict[str, object]:
    """The fields of a configuration with lists for tuples, to store and to compare.

    Variations are left out where there are none, as in runs from before there were any.
    """
    plain = {field.name: getattr(config, field.name) for field in fields(config)}
    plain = {k: v for k, v in plain.items() if k not in VARIATIONS or k in config.variations}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}


def geometry_differences(stored: Mapping[str, object], config: DrafterConfig) -> str:
    """Where a run's configuration is not the wanted one: `num_layers 1, not 2`; empty if it is."""
    wanted = as_plain(config)
    names = [name for name in (*stored, *wanted) if stored.get(name) != wanted.get(name)]
    return "; ".join(
        f"{name} {stored.get(name)}, not {wanted.get(name)}" for name in dict.fromkeys(names)
    )
