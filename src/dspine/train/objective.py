"""The terms of the training objectives: cross-entropy, L1, refinement and alignment over slots.

R below counts slots of a step, D rows of the draft head, K candidates, T teacher
entries. Choices that the publication leaves open: a label outside the draft vocabulary drops its
cross-entropy while the block goes on; teacher mass outside the stored entries or outside the
draft vocabulary is ignored (a constant of L1); alignment counts teacher-replaced blocks as well;
gradient flows through the norm of the state that scales a write.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of head logits handled at once: 256 x 12288 floats stay inside a last-level cache.
_ROWS = 256
_GROUP = 16


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Rows of the target's head a draft may use. Frozen."""

    weight: Tensor
    """(D, H)."""
    vocab: Tensor | None
    """(D,) target ids of the rows, ascending; None when D is the whole vocabulary."""
    lookup: Tensor | None
    """(V,) row of a target id, or -1."""

    @classmethod
    def build(cls, head: Tensor, draft_vocab: Tensor | None) -> DraftHead:
        """From the target's whole head (V, H) and the target ids to keep."""
        if draft_vocab is None:
            return cls(head, None, None)
        lookup = torch.full((head.shape[0],), -1, dtype=torch.long)
        lookup[draft_vocab] = torch.arange(len(draft_vocab))
        return cls(head[draft_vocab].contiguous(), draft_vocab, lookup)

    def to(self, dtype: torch.dtype) -> DraftHead:
        """The same head with its weights in another number format."""
        return replace(self, weight=self.weight.to(dtype))

    def rows(self, tokens: Tensor) -> Tensor:
        """Head rows of target ids, -1 where the draft vocabulary lacks them."""
        return tokens if self.lookup is None else self.lookup[tokens]

    def tokens(self, rows: Tensor) -> Tensor:
        """Target ids of head rows."""
        return rows if self.vocab is None else self.vocab[rows]


@dataclass(frozen=True, slots=True)
class StepWeights:
    """The scheduled numbers of one step."""

    ce_share: float
    beta: float
    gamma: float
    mass_threshold: float = 1e-4
    refinement: float = 1.0
    """Weight of DSpine's refinement or of DFlash2's selector."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Weighted means over supervised slots; `total` carries the gradient."""

    total: Tensor
    ce: float
    l1: float
    refine_ce: float
    """Of the candidates given the true predecessor; 0 for DFlash."""
    refine_l1: float
    alignment: float
    """0 for all but DSpine."""
    accuracy: float
    """Share of slots whose best unary candidate is the label."""
    coverage: float
    """Share of slots whose label is among the K candidates."""
    chain_accuracy: float
    """Share of slots whose best candidate given the true predecessor is right."""


def slot_weights(width: int, gamma: float) -> Tensor:
    """exp(-(i - 1) / gamma) for slots i = 1 ... width - 1."""
    return torch.exp(-torch.arange(width - 1, dtype=torch.float32) / gamma)


class _BackboneLoss(torch.autograd.Function):
    """Head product, CE, L1 and top-K in one pass; the gradient is made on the way.

    The head is frozen, so the gradient of the hidden rows is all that is needed and no logits
    have to be kept. Products are made in the format of the head, everything else in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        label: Tensor,
        teacher_rows: Tensor,
        teacher_probs: Tensor,
        weight: Tensor,
        ce_share: float,
        top_k: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad = torch.empty_like(hidden)
        ces, l1s, tops = [], [], []
        for first in range(0, hidden.shape[0], _ROWS):
            part = slice(first, first + _ROWS)
            w = weight[part, None]
            logits = (hidden[part].to(head.dtype) @ head.T).float()
            top = grouped_topk(logits, top_k)
            known = label[part, None] >= 0
            at = label[part, None].clamp_min(0)
            peak = logits.amax(dim=-1, keepdim=True)
            label_logit = logits.gather(1, at) - peak
            p = logits.sub_(peak).exp_()
            total = p.sum(dim=-1, keepdim=True)
            ce = (total.log() - label_logit) * known

            rows = teacher_rows[part]
            t = teacher_probs[part]
            valid = (rows >= 0) & (t > 0)
            rows = rows.clamp_min(0)
            p_t = p.gather(1, rows) / total * valid
            sign = torch.sign(p_t - t) * valid
            outside = 1 - p_t.sum(dim=-1, keepdim=True)
            taught = valid.any(dim=-1, keepdim=True)
            l1 = (((p_t - t).abs() * valid).sum(dim=-1, keepdim=True) + outside) * taught
            mean_sign = (p_t * sign).sum(dim=-1, keepdim=True) + outside

            w_ce = w * ce_share * known
            w_l1 = w * (1 - ce_share) * taught
            p.mul_((w_ce + w_l1 * (1 - mean_sign)) / total)
            p.scatter_add_(1, rows, w_l1 * p_t * (sign - 1))
            p.scatter_add_(1, at, -w_ce)
            grad[part] = p.to(head.dtype) @ head
            ces.append(ce[:, 0])
            l1s.append(l1[:, 0])
            tops.append(top)
        ce, l1, top = torch.cat(ces), torch.cat(l1s), torch.cat(tops)
        loss = (weight * (ce_share * ce + (1 - ce_share) * l1)).sum()
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(ce, l1, top)
        return loss, ce, l1, top

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = ctx.saved_tensors
        return (grad * grads[0], *([None] * 7))


def grouped_topk(logits: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest entries per row, best first, exact.

    The largest entries lie in the groups with the largest maxima, and finding those first is
    several times quicker on a CPU than one topk over the whole row.
    """
    rows, size = logits.shape
    if size % _GROUP or size // _GROUP < 2 * count:
        return logits.topk(count, dim=-1).indices
    # A group is every (size / _GROUP)-th entry, so that maxima are taken of whole vectors.
    grouped = logits.view(rows, _GROUP, size // _GROUP)
    groups = grouped.amax(dim=1).topk(count, dim=-1).indices
    inside = grouped.gather(2, groups[:, None].expand(-1, _GROUP, -1)).view(rows, -1)
    best = inside.topk(count, dim=-1).indices
    return groups.gather(1, best % count) + best // count * (size // _GROUP)


def backbone_loss(
    hidden: Tensor,
    head: Tensor,
    label: Tensor,
    teacher_rows: Tensor,
    teacher_probs: Tensor,
    weight: Tensor,
    ce_share: float,
    top_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum over R rows of weight * (ce_share * CE + (1 - ce_share) * L1), and CE, L1, top-K rows.

    hidden (R, H); label (R,) head rows or -1; teacher_rows, teacher_probs (R, T), unused entries
    with row -1 or probability 0. L1 = sum over teacher entries |p - t| + p outside of them.
    """
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _BackboneLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head, label, teacher_rows, teacher_probs, weight, ce_share, top_k
    )
    return result


def refinement_loss(
    scores: Tensor,
    candidates: Tensor,
    label: Tensor,
    teacher_rows: Tensor,
    teacher_probs: Tensor,
    mass_threshold: float,
) -> tuple[Tensor, Tensor]:
    """CE and L1 (R,) on the own candidates: scores (R, K) of head rows `candidates` (R, K).

    CE is 0 where the label is not a candidate. The teacher is renormalised on the candidates; L1
    is 0 where its mass on them is at most `mass_threshold`.
    """
    log_p = torch.log_softmax(scores, dim=-1)
    hit = candidates == label[:, None]
    ce = -(log_p * hit).sum(dim=-1)
    match = candidates[:, :, None] == teacher_rows[:, None, :]
    teacher = (match * teacher_probs[:, None, :]).sum(dim=-1)
    mass = teacher.sum(dim=-1, keepdim=True)
    wanted = teacher / mass.clamp_min(1e-12)
    l1 = (log_p.exp() - wanted).abs().sum(dim=-1)
    return ce, l1 * (mass[:, 0] > mass_threshold)


def alignment_distance(feature: Tensor, code: Tensor) -> Tensor:
    """1 - cos(feature, code) over the last dimension."""
    return 1 - F.cosine_similarity(feature.float(), code.float(), dim=-1)
