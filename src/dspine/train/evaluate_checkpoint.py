"""Acceptance of a finished drafter, checkpoint folder or GGUF, on feature shards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from dspine.errors import PairError, TrainingError, UsageError
from dspine.files.pairing import check_pair
from dspine.files.source import read_source
from dspine.train.evaluate import Evaluation, evaluate_shards
from dspine.train.kinds import load
from dspine.train.objective import DraftHead
from dspine.train.shards import Shard, list_shards
from dspine.train.target import Target


def evaluate_checkpoint(
    path: Path,
    target_path: Path,
    shard_folders: Sequence[Path],
    *,
    max_tokens: int | None = None,
    threads: int | None = None,
) -> Evaluation:
    """Load a checkpoint (or a run's best, else newest one) or a GGUF, and measure it on the shards.

    `threads` None: as many as torch takes by itself.
    Raises PairError when it belongs to another target, UsageError without folders, TrainingError
    when there are no shards or they hold the features of other layers.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if not shard_folders:
        raise UsageError(
            "nothing to measure on: name the folder of held-out shards with --shards FOLDER"
        )
    checkpoint = read_source(path)
    target = Target.read(target_path)
    if checkpoint.pair is not None:
        check_pair(checkpoint.pair, target.pair)
    elif checkpoint.config.target_hidden_size != target.pair.hidden_size:
        raise PairError(
            f"{path} reads features of size {checkpoint.config.target_hidden_size}, "
            f"{target_path.name} has {target.pair.hidden_size}: name its target"
        )
    shards = [Shard.read(shard) for part in shard_folders for shard in list_shards(part)]
    if not shards:
        raise TrainingError(
            f"no feature shard in {', '.join(map(str, shard_folders))}: name a folder that "
            f"`dspine train features` filled"
        )
    for shard in shards:
        if shard.info.taps != checkpoint.config.taps:
            raise TrainingError(
                f"the shards hold layers {list(shard.info.taps)}, this drafter reads "
                f"{list(checkpoint.config.taps)}: capture those"
            )
    module = load(checkpoint.config, checkpoint.tensors)
    vocab = checkpoint.draft_vocab
    head = DraftHead.build(target.head, None if vocab is None else torch.from_numpy(vocab).long())
    return evaluate_shards(module, target.embedding, head, shards, max_tokens=max_tokens)
