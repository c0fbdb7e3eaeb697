"""Training that begins with an existing drafter: adapting one to a fine-tune of its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dspine.errors import TrainingError
from dspine.files.checkpoint import read_checkpoint
from dspine.files.drafter_file import read_drafter
from dspine.files.dtypes import Array, to_float32
from dspine.files.pairing import check_fit, check_pair
from dspine.files.run_folder import choose_checkpoint
from dspine.files.schema import DSpineConfig, Pair, tensor_specs
from dspine.train.initialise import LEAST_RMS, feature_sample
from dspine.train.module import DSpineModule
from dspine.train.shards import Shard, list_shards, read_info


@dataclass(frozen=True, slots=True)
class Start:
    """A drafter to begin with: its configuration, reduced head and weights by torch name."""

    path: Path
    config: DSpineConfig
    draft_vocab: list[int] | None
    tensors: Mapping[str, Array]


def read_start(path: Path, target: Pair, shard_folders: Sequence[Path]) -> Start:
    """A drafter GGUF, a checkpoint folder or a run's folder, for a target of the same shape.

    Another version or fine-tune of the drafter's target is what this is for; another architecture,
    size or vocabulary raises PairError, shards of other taps raise TrainingError.
    """
    if path.is_dir():
        folder = read_checkpoint(choose_checkpoint(path))
        config, pair, vocab, tensors = (
            folder.config,
            folder.pair,
            folder.draft_vocab,
            folder.tensors,
        )
    else:
        file = read_drafter(path)
        if not isinstance(file.config, DSpineConfig):
            raise TrainingError(f"{path} is a {file.config.kind} drafter: begin with a DSpine one")
        config, pair, vocab, tensors = file.config, file.pair, file.draft_vocab, file.arrays()
    if pair is not None:
        check_pair(pair, target)
    check_fit(str(path), config, target)
    for shard in [s for f in shard_folders for s in list_shards(f)][:1]:
        if (taps := read_info(shard).taps) != config.taps:
            raise TrainingError(
                f"{path} reads the target's layers {list(config.taps)}, the shards hold "
                f"{list(taps)}: capture features with --taps {','.join(map(str, config.taps))}"
            )
    return Start(path, config, None if vocab is None else vocab.tolist(), tensors)


def fill_module(module: DSpineModule, start: Start, shards: Sequence[Shard]) -> None:
    """Give a module the drafter's weights, quantised ones as float32; it computes the same.

    The features' scale is taken from the shards as for a new drafter, and out of `fc`.
    """
    rms = feature_sample(shards).square().mean(dim=0).sqrt().clamp_min(LEAST_RMS)
    state = module.state_dict()
    with torch.no_grad():
        module.feature_scale.copy_(1 / rms)
        for spec in tensor_specs(module.config):
            value = torch.from_numpy(to_float32(start.tensors[spec.torch_name]).copy())
            if spec.torch_name == "fc.weight":
                value = value * rms[None]
            state[spec.torch_name].copy_(value)
        if "transfer_ready" in state:
            state["transfer_ready"].fill_(True)
