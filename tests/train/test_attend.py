"""The written-out attention and its gradient against plain autograd."""

from __future__ import annotations

import torch

from dspine.train.attend import SequenceView, attend
from dspine.train.backbone import RMSNorm, apply_rotary, block_bias, rotary_tables

VIEWS = (SequenceView(0, 7, 0, 2), SequenceView(7, 16, 2, 5))
GROUPS, BLOCKS, WIDTH, HEADS, SIZE, ROWS = 2, 5, 4, 3, 8, 16


def plain(
    parts: list[torch.Tensor], biases: list[torch.Tensor], own_bias: torch.Tensor
) -> torch.Tensor:
    """One softmax over the context and the block's own keys, block by block."""
    q, far_k, far_v, own_k, own_v = parts
    out = []
    for view, bias in zip(VIEWS, biases, strict=True):
        for block in range(view.first, view.last):
            keys = torch.cat([far_k[:, view.start : view.end], own_k[:, block]], dim=1)
            values = torch.cat([far_v[:, view.start : view.end], own_v[:, block]], dim=1)
            seen = bias[block - view.first].expand(WIDTH * HEADS, -1)
            scores = q[:, block] @ keys.transpose(-1, -2) + torch.cat([seen, own_bias], dim=1)
            out.append(torch.softmax(scores, dim=-1) @ values)
    return torch.stack(out, dim=1)


def test_attention_and_its_gradient_equal_autograd() -> None:
    torch.manual_seed(3)
    shapes = (
        (GROUPS, BLOCKS, WIDTH * HEADS, SIZE),
        *[(GROUPS, ROWS, SIZE)] * 2,
        *[(GROUPS, BLOCKS, WIDTH, SIZE)] * 2,
    )
    parts = [torch.randn(shape) for shape in shapes]
    own_bias = block_bias(WIDTH, None).repeat_interleave(HEADS, 0)
    biases = []
    for view in VIEWS:
        shape = (view.last - view.first, 1, view.end - view.start)
        biases.append(torch.zeros(shape).masked_fill_(torch.rand(shape) < 0.5, float("-inf")))
    # One block that sees nothing of its sequence.
    biases[1][0] = float("-inf")
    upstream = torch.randn(shapes[0])
    ours = [p.clone().requires_grad_() for p in parts]
    theirs = [p.clone().requires_grad_() for p in parts]
    q, far_k, far_v, own_k, own_v = ours
    found = attend(q, (far_k, far_v), (own_k, own_v), VIEWS, biases, own_bias)
    expected = plain(theirs, biases, own_bias)
    torch.testing.assert_close(found, expected)
    torch.autograd.backward([found, expected], [upstream, upstream])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)


def test_norm_and_rotary_have_the_gradients_of_autograd() -> None:
    torch.manual_seed(4)
    norm = RMSNorm(SIZE, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, SIZE, dtype=torch.float32, requires_grad=True)
    cos, sin = rotary_tables(torch.arange(5), SIZE, 1000.0)
    other, weight = x.detach().clone().requires_grad_(), norm.weight.detach().clone()
    weight.requires_grad_()
    found = apply_rotary(norm(x), cos, sin)
    expected = torch.nn.functional.rms_norm(other, (SIZE,), weight, 1e-5)
    first, second = expected.chunk(2, dim=-1)
    expected = expected * cos + torch.cat([-second, first], dim=-1) * sin
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(found.shape)
    torch.autograd.backward([found, expected], [upstream, upstream])
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(norm.weight.grad, weight.grad)
