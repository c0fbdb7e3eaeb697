"""What each kind of drafter minimises in one step.

DFlash: the backbone term. DFlash2: the same and the selector's, given the true predecessor.
DSpine: the backbone, the refined last write given the true predecessor, and alignment.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.train.backbone import BlockOutput
from dspine.train.batches import StepBatch
from dspine.train.dflash import DFlash2Module, DFlashModule
from dspine.train.module import DSpineModule, DSpineOutput
from dspine.train.objective import (
    DraftHead,
    Losses,
    StepWeights,
    alignment_distance,
    backbone_loss,
    refinement_loss,
    slot_weights,
)


@dataclass(frozen=True, slots=True)
class _Slots:
    """The R slots of a step in one row each. Those without supervision weigh nothing."""

    weight: Tensor
    scale: Tensor
    """Sum of the weights."""
    labels: Tensor
    """Target ids."""
    label: Tensor
    """Rows of the head, -1 where it lacks them."""
    teacher_rows: Tensor
    teacher_probs: Tensor
    previous: Tensor
    """Target ids of the true predecessors."""
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class _Backbone:
    """The term that all kinds share; `total` is its weighted sum."""

    total: Tensor
    ce: Tensor
    l1: Tensor
    candidates: Tensor
    """(R, K) rows of the head, best first."""


def dflash_losses(
    module: DFlashModule,
    output: BlockOutput,
    batch: StepBatch,
    head: DraftHead,
    weights: StepWeights,
) -> Losses:
    """Losses of DFlash and DFlash2, divided by the sum of slot weights."""
    slots = _slots(output, batch, head, weights.gamma)
    if not isinstance(module, DFlash2Module):
        backbone = _backbone(slots, head, weights, 1)
        return _summary(slots, backbone, backbone.total)
    backbone = _backbone(slots, head, weights, module.config.top_k)
    rows = backbone.candidates
    unary = (F.embedding(rows, head.weight) @ slots.hidden[:, :, None])[..., 0]
    tokens = head.tokens(rows)
    scores = unary + module.candidate_selector(slots.hidden, slots.previous[:, None], tokens)[:, 0]
    return _with_candidates(slots, backbone, scores, weights)


def dspine_losses(
    module: DSpineModule,
    output: DSpineOutput,
    batch: StepBatch,
    head: DraftHead,
    weights: StepWeights,
) -> Losses:
    """All terms of DSpine, divided by the sum of slot weights."""
    slots = _slots(output, batch, head, weights.gamma)
    backbone = _backbone(slots, head, weights, module.config.top_k)
    if weights.refinement == 0 and weights.beta == 0:
        return _summary(slots, backbone, backbone.total)
    z = module.refine(
        output.last_state.flatten(0, 1),
        output.last_feature.flatten(0, 1),
        module.code(slots.previous),
    )
    scores = (F.embedding(backbone.candidates, head.weight) @ z[:, :, None])[..., 0]
    code = F.embedding(slots.labels, module.transfer_codes)
    distance = torch.zeros_like(slots.weight)
    for layer, state in enumerate(output.states):
        feature = module.injection.feature(layer, state.flatten(0, 1))
        distance = distance + alignment_distance(feature, code)
    return _with_candidates(slots, backbone, scores, weights, distance)


def _slots(output: BlockOutput, batch: StepBatch, head: DraftHead, gamma: float) -> _Slots:
    weight = slot_weights(batch.labels.shape[1] + 1, gamma)[None] * batch.supervised
    labels = batch.labels.flatten()
    # Teacher entries without mass are padding and would all name token 0.
    teacher_probs = batch.teacher_probs.flatten(0, 1)
    teacher_rows = head.rows(batch.teacher_ids.flatten(0, 1)).masked_fill(teacher_probs <= 0, -1)
    return _Slots(
        weight=weight.flatten(),
        scale=weight.sum(),
        labels=labels,
        label=head.rows(labels),
        teacher_rows=teacher_rows,
        teacher_probs=teacher_probs * (teacher_rows >= 0),
        previous=torch.cat([batch.anchors[:, None], batch.labels[:, :-1]], dim=1).flatten(),
        hidden=output.hidden.flatten(0, 1),
    )


def _backbone(slots: _Slots, head: DraftHead, weights: StepWeights, top_k: int) -> _Backbone:
    return _Backbone(
        *backbone_loss(
            slots.hidden,
            head.weight,
            slots.label,
            slots.teacher_rows,
            slots.teacher_probs,
            slots.weight,
            weights.ce_share,
            top_k,
        )
    )


def _with_candidates(
    slots: _Slots,
    backbone: _Backbone,
    scores: Tensor,
    weights: StepWeights,
    distance: Tensor | None = None,
) -> Losses:
    """Add the terms of `scores` (R, K) of the candidates given the true predecessor, and of the
    alignment `distance` (R,) where there is one."""
    refine_ce, refine_l1 = refinement_loss(
        scores.float(),
        backbone.candidates,
        slots.label,
        slots.teacher_rows,
        slots.teacher_probs,
        weights.mass_threshold,
    )
    refined = weights.ce_share * refine_ce + (1 - weights.ce_share) * refine_l1
    total = backbone.total + weights.refinement * (slots.weight * refined).sum()
    alignment = slots.weight.new_zeros(())
    if distance is not None:
        alignment = (slots.weight * distance).sum()
        total = total + weights.beta * (slots.weight * backbone.ce).sum() / slots.scale * alignment
    best = backbone.candidates.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
    return _summary(slots, backbone, total, refine_ce, refine_l1, alignment, best)


def _summary(
    slots: _Slots,
    backbone: _Backbone,
    total: Tensor,
    refine_ce: Tensor | None = None,
    refine_l1: Tensor | None = None,
    alignment: Tensor | None = None,
    best: Tensor | None = None,
) -> Losses:
    """`total` divided by the sum of weights, and means for the log; what a kind lacks is 0."""

    def mean(x: Tensor | None) -> float:
        return 0.0 if x is None else float((slots.weight * x).sum() / slots.scale)

    total = total / slots.scale
    with torch.no_grad():
        label, candidates = slots.label, backbone.candidates
        best = candidates[:, 0] if best is None else best
        return Losses(
            total=total,
            ce=mean(backbone.ce),
            l1=mean(backbone.l1),
            refine_ce=mean(refine_ce),
            refine_l1=mean(refine_l1),
            alignment=0.0 if alignment is None else float(alignment / slots.scale),
            accuracy=mean((label >= 0) & (candidates[:, 0] == label)),
            coverage=mean((label >= 0) & (candidates == label[:, None]).any(dim=-1)),
            chain_accuracy=mean((label >= 0) & (best == label)),
        )
