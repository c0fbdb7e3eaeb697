"""The attention of blocks over their sequence's context and their own slots, with its gradient.

Written out because autograd's way keeps and copies several times as much. Shapes: G key heads, A
blocks, M queries of a block per key head, B block width, N context rows, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence of a step: context rows [start, end), blocks [first, last)."""

    start: int
    end: int
    first: int
    last: int


def attend(
    queries: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    views: Sequence[SequenceView],
    biases: Sequence[Tensor],
    own_bias: Tensor,
) -> Tensor:
    """Softmax attention (G, A, M, D) of scaled `queries` (G, A, M, D).

    Keys and values of the context are (G, N, D), of the blocks themselves (G, A, B, D), all of one
    number format, in which products are made. biases are (blocks, 1 or M, rows) for each of
    `views`, own_bias is (M, B).
    """
    out: Tensor = _Attend.apply(queries, *context, *own, views, biases, own_bias)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        far_k: Tensor,
        far_v: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        views: Sequence[SequenceView],
        biases: Sequence[Tensor],
        own_bias: Tensor,
    ) -> Tensor:
        groups, _, rows, size = q.shape
        width = own_k.shape[2]
        out = torch.empty_like(q)
        near = q @ own_k.transpose(-1, -2)
        kept = []
        for view, bias in zip(views, biases, strict=True):
            n, blocks = view.end - view.start, view.last - view.first
            mine = slice(view.first, view.last)
            keys, values = far_k[:, view.start : view.end], far_v[:, view.start : view.end]
            far = q[:, mine].reshape(groups, -1, size) @ keys.transpose(-1, -2)
            scores = q.new_empty(groups, blocks, rows, n + width, dtype=torch.float32)
            torch.add(far.view(groups, blocks, rows, n), bias, out=scores[..., :n])
            torch.add(near[:, mine], own_bias, out=scores[..., n:])
            weight = torch.softmax(scores, dim=-1)
            far = weight[..., :n].to(q.dtype).reshape(groups, -1, n)
            own = weight[..., n:].to(q.dtype)
            mixed = (far @ values).view(groups, blocks, rows, size)
            torch.add(mixed, own @ own_v[:, mine], out=out[:, mine])
            kept += [far, own]
        ctx.save_for_backward(q, far_k, far_v, own_k, own_v, out, *kept)
        ctx.views = views
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, far_k, far_v, own_k, own_v, out, *kept = ctx.saved_tensors
        grad = grads[0].contiguous()
        groups, _, rows, size = q.shape
        # Of a softmax's scores: weight * (its gradient - the mean of gradients).
        mean = (grad.float() * out).sum(dim=-1, keepdim=True)
        own_scores = grad @ own_v.transpose(-1, -2)
        # Rows between views belong to no sequence.
        g_far_k, g_far_v = torch.zeros_like(far_k), torch.zeros_like(far_v)
        g_q = torch.empty_like(q)
        g_own_v = torch.empty_like(own_v)
        for view, far, own in zip(ctx.views, kept[::2], kept[1::2], strict=True):
            mine, there = slice(view.first, view.last), slice(view.start, view.end)
            asked = q[:, mine].reshape(groups, -1, size)
            g = grad[:, mine].reshape(groups, -1, size)
            g_far_v[:, there] = far.transpose(-1, -2) @ g
            g_own_v[:, mine] = own.transpose(-1, -2) @ grad[:, mine]
            scores = g @ far_v[:, there].transpose(-1, -2)
            scores.sub_(mean[:, mine].reshape(groups, -1, 1)).mul_(far)
            own_scores[:, mine].sub_(mean[:, mine]).mul_(own)
            g_q[:, mine] = (scores @ far_k[:, there]).view(groups, -1, rows, size)
            g_far_k[:, there] = scores.transpose(-1, -2) @ asked
        g_q += own_scores @ own_k
        g_own_k = own_scores.transpose(-1, -2) @ q
        return g_q, g_far_k, g_far_v, g_own_k, g_own_v, None, None, None
