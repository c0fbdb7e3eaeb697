"""Training that begins with an existing drafter: adapting one to a fine-tune of its target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from dspine.errors import TrainingError
from dspine.files.dtypes import to_float32
from dspine.files.gguf_file import StoredTensor
from dspine.files.pairing import check_fit, check_pair
from dspine.files.schema import Pair, tensor_specs
from dspine.files.source import Source, read_source
from dspine.train.initialise import LEAST_RMS, feature_sample
from dspine.train.kinds import DrafterModule
from dspine.train.shards import Shard, list_shards, read_info


def read_start(path: Path, target: Pair, shard_folders: Sequence[Path], kind: str) -> Source:
    """A drafter GGUF, a checkpoint folder or a run's folder, for a target of the same shape.

    Another version or fine-tune of the drafter's target is what this is for; another architecture,
    size or vocabulary raises PairError, shards of other taps raise TrainingError.
    """
    read = read_source(path)
    if (found := read.config.kind.lower()) != kind:
        raise TrainingError(f"{path} is a {read.config.kind} drafter: say so with --kind {found}")
    if read.pair is not None:
        check_pair(read.pair, target)
    check_fit(str(path), read.config, target)
    for shard in [s for f in shard_folders for s in list_shards(f)][:1]:
        if (taps := read_info(shard).taps) != read.config.taps:
            raise TrainingError(
                f"{path} reads the target's layers {list(read.config.taps)}, the shards hold "
                f"{list(taps)}: capture features with --taps {','.join(map(str, read.config.taps))}"
            )
    return read


def fill_module(module: DrafterModule, start: Source, shards: Sequence[Shard]) -> None:
    """Give a module the drafter's weights, quantised ones as float32; it computes the same.

    The features' scale is taken from the shards as for a new drafter, and out of `fc`.
    """
    rms = feature_sample(shards).square().mean(dim=0).sqrt().clamp_min(LEAST_RMS)
    state = module.state_dict()
    with torch.no_grad():
        module.feature_scale.copy_(1 / rms)
        for spec in tensor_specs(module.config):
            tensor = start.tensors[spec.torch_name]
            floats = tensor.as_float32() if isinstance(tensor, StoredTensor) else to_float32(tensor)
            value = torch.from_numpy(floats.copy())
            if spec.torch_name == "fc.weight":
                value = value * rms[None]
            state[spec.torch_name].copy_(value)
        if "transfer_ready" in state:
            state["transfer_ready"].fill_(True)
