"""What training and evaluation ask of a drafter, whatever its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspine.errors import TrainingError
from dspine.files.dtypes import Array, to_float32
from dspine.files.gguf_file import StoredTensor
from dspine.files.schema import DFlash2Config, DFlashConfig, DrafterConfig, DSpineConfig
from dspine.train.backbone import block_embedding
from dspine.train.batches import StepBatch
from dspine.train.chain import expected_chain, pick, top_candidates, transition_table, walk_chain
from dspine.train.dflash import DFlash2Module, DFlashModule
from dspine.train.losses import dflash_losses, dspine_losses
from dspine.train.module import DSpineModule
from dspine.train.objective import DraftHead, Losses, StepWeights

DrafterModule: TypeAlias = DSpineModule | DFlashModule


@dataclass(frozen=True, slots=True)
class TeacherForcing:
    """A share of DSpine's blocks gets the codes of the true tokens in its lowest layers."""

    share: float = 0.0
    layers: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """Target ids that would be drafted after A anchors, (A, S) each, by different rules."""

    chain: Tensor
    """As at run time: a greedy walk of the transition table; DFlash: the same as `unary`."""
    expected: Tensor
    """The path of the table with the greatest expected number of accepted drafts."""
    unary: Tensor
    """The best candidate of each slot by itself."""
    candidates: Tensor
    """(A, S, K)."""


def build(config: DrafterConfig) -> DrafterModule:
    """An untrained module of the configuration's kind."""
    for name, value in config.variations.items():
        raise TrainingError(
            f"the drafter has {name} {value}, which training does not compute: run it as it is, or "
            f"train a new one for this target"
        )
    if isinstance(config, DSpineConfig):
        return DSpineModule(config)
    if isinstance(config, DFlash2Config):
        return DFlash2Module(config)
    if isinstance(config, DFlashConfig):
        return DFlashModule(config)
    raise TrainingError(
        f"drafters of kind {config.kind!r} cannot be trained by this dspine: run it as it is"
    )


def load(config: DrafterConfig, tensors: Mapping[str, Array | StoredTensor]) -> DrafterModule:
    """A module with the weights of a file, by torch name; all types become float32."""
    module = build(config)
    state = {name: torch.from_numpy(_floats(tensor).copy()) for name, tensor in tensors.items()}
    if isinstance(module, DSpineModule):
        state["transfer_ready"] = torch.tensor(True)
    module.load_state_dict(state, strict=True)
    return module


def _floats(tensor: Array | StoredTensor) -> npt.NDArray[np.float32]:
    return tensor.as_float32() if isinstance(tensor, StoredTensor) else to_float32(tensor)


def restore_frozen(module: DrafterModule, tensors: Mapping[str, Array]) -> None:
    """Take the frozen tensors of a checkpoint, by torch name."""
    with torch.no_grad():
        for name, buffer in frozen_tensors(module).items():
            buffer.copy_(torch.from_numpy(to_float32(tensors[name]).copy()))
        if isinstance(module, DSpineModule):
            module.transfer_ready.fill_(True)


def frozen_tensors(module: DrafterModule) -> dict[str, Tensor]:
    """Buffers by torch name that a checkpoint keeps and no step changes."""
    if isinstance(module, DSpineModule):
        return {"transfer_codes": module.transfer_codes}
    return {}


def train_losses(
    module: DrafterModule,
    embedding: Tensor,
    head: DraftHead,
    batch: StepBatch,
    weights: StepWeights,
    forcing: TeacherForcing,
) -> Losses:
    """Forward pass and losses of one step; `embedding` (V, H) is the target's."""
    c, width = module.config, batch.labels.shape[1] + 1
    block = block_embedding(embedding, batch.anchors, c.mask_token_id, width)
    context = module.context(batch.features, batch.context_positions)
    place = (batch.anchor_positions, context, batch.context_positions, batch.views)
    if not isinstance(module, DSpineModule):
        return dflash_losses(module, module(block, *place), batch, head, weights)
    true_codes = replaced = None
    if forcing.share > 0:
        previous = torch.cat([batch.anchors[:, None], batch.labels[:, :-1]], dim=1)
        true_codes = module.code(previous)
        replaced = torch.rand(len(batch.anchors)) < forcing.share
    output = module(
        block,
        module.code(batch.anchors),
        *place,
        true_codes=true_codes,
        replaced=replaced,
        replacement_layers=forcing.layers,
    )
    return dspine_losses(module, output, batch, head, weights)


def draft(module: DrafterModule, embedding: Tensor, head: DraftHead, batch: StepBatch) -> Draft:
    """Drafts after every anchor of a batch of whole blocks."""
    c = module.config
    block = block_embedding(embedding, batch.anchors, c.mask_token_id, c.block_size)
    context = module.context(batch.features, batch.context_positions)
    place = (batch.anchor_positions, context, batch.context_positions, batch.views)
    if isinstance(module, DSpineModule):
        output = module(block, module.code(batch.anchors), *place)
    else:
        output = module(block, *place)
    top_k = c.top_k if isinstance(c, DSpineConfig | DFlash2Config) else 1
    _, rows = top_candidates(output.hidden, head.weight, top_k)
    tokens = head.tokens(rows)
    unary = tokens[..., 0]
    if not isinstance(module, DSpineModule | DFlash2Module):
        return Draft(unary, unary, unary, tokens)
    table = transition_table(module, output, batch.anchors, tokens, rows, head.weight)
    chain, expected = walk_chain(table), expected_chain(table)[0]
    return Draft(pick(tokens, chain), pick(tokens, expected), unary, tokens)
