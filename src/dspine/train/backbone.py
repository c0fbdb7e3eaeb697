"""The network that all kinds of the family share, in torch: context K/V and block layers.

Parameter names are those of `files.schema.tensor_specs`. Shapes use N context rows, A anchors
(blocks), B block width, H hidden size, G key heads. Formulas follow the published DFlash drafter
(z-lab's and SpecForge's modeling code).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspine.files.schema import DrafterConfig
from dspine.train.attend import SequenceView, attend
from dspine.train.precision import product_dtype

LayerKV = tuple[Tensor, Tensor]
"""Context keys (rotated) and values of one layer, each (G, n, head_dim) for one sequence."""


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """What one pass over A blocks gives. `hidden` is after the final norm, ready for the head."""

    hidden: Tensor
    """(A, B - 1, H): slots 1 ... B - 1."""


class _ScaledRows(torch.autograd.Function):
    """RMS normalisation of float32 rows with fewer passes over them than separate operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (length.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        out: Tensor = (x * scale).mul_(weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        both = grad * unit
        along = (both @ weight)[..., None] / -x.shape[-1]
        back = (grad * weight).addcmul_(unit, along).mul_(scale)
        return back, both.flatten(0, -2).sum(dim=0), None


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Products may come in bf16; norms are made in float32.
        out: Tensor = _ScaledRows.apply(x.float(), self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Tables cos and sin (..., head_dim) for half-split rotary: pair d with d + head_dim / 2."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequency = theta ** -(half / head_dim)
    angle = positions.to(torch.float32)[..., None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


class _Rotation(torch.autograd.Function):
    """Half-split rotary of x; its gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    out = x * cos
    half = x.shape[-1] // 2
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-direction)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=direction)
    return out


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last dimension of x; cos and sin broadcast against it."""
    out: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


def context_bias(
    anchor_positions: Tensor, context_positions: Tensor, width: int, window: int | None
) -> Tensor:
    """Additive mask (A, B or 1, n): key p is visible to offset o of anchor a iff p < a and,
    with a window w, a + o - p < w."""
    a = anchor_positions[:, None, None]
    p = context_positions[None, None, :]
    hidden = p >= a
    if window is not None:
        offset = torch.arange(width, device=a.device)[None, :, None]
        too_old = a + offset - p >= window
        if bool(too_old.any()):
            hidden = hidden | too_old
    bias = torch.zeros(hidden.shape, device=a.device)
    return bias.masked_fill_(hidden, float("-inf"))


def block_bias(
    width: int, window: int | None, device: torch.device | None = None, *, causal: bool = True
) -> Tensor:
    """Additive mask (B, B): key o' is visible to o iff o - o' < w with a window w and, in causal
    layers, o' <= o."""
    o = torch.arange(width, device=device)
    distance = o[:, None] - o[None, :]
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (distance >= window)
    return torch.zeros(width, width, device=device).masked_fill_(hidden, float("-inf"))


class Attention(nn.Module):
    """Grouped-query attention of block slots over context K/V and their own block."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.window, self.causal = c.windows[layer], c.causal[layer]
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def context_kv(self, context: Tensor, cos: Tensor, sin: Tensor) -> LayerKV:
        """Keys and values (G, N, head_dim) of context rows (N, H); cos, sin (N, head_dim)."""
        shape = (context.shape[0], self.kv_heads, self.head_dim)
        k = self.k_norm(self.k_proj(context).view(shape))
        k = apply_rotary(k, cos[:, None], sin[:, None]).to(product_dtype())
        v = self.v_proj(context).view(shape)
        return k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()

    def forward(
        self,
        x: Tensor,
        context: LayerKV,
        views: Sequence[SequenceView],
        biases: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        first_slot: int,
    ) -> Tensor:
        """From x (A, B, H) to (A, B - first_slot, H); slots before `first_slot` ask nothing."""
        blocks, width, _ = x.shape
        groups, heads, d = self.kv_heads, self.heads // self.kv_heads, self.head_dim
        rows = width - first_slot
        q = self.q_proj(x[:, first_slot:]).view(blocks, rows, groups * heads, d)
        k = self.k_proj(x).view(blocks, width, groups, d)
        v = self.v_proj(x).view(blocks, width, groups, d).permute(2, 0, 1, 3).contiguous()
        q = apply_rotary(self.q_norm(q), cos[:, first_slot:, None], sin[:, first_slot:, None])
        k = apply_rotary(self.k_norm(k), cos[:, :, None], sin[:, :, None])
        k = k.to(product_dtype()).permute(2, 0, 1, 3).contiguous()
        # (G, A, rows * heads, d): the heads of one group share keys, so they are just more rows.
        q = (q * d**-0.5).to(k.dtype).view(blocks, rows, groups, heads, d).permute(2, 0, 1, 3, 4)
        q = q.reshape(groups, blocks, rows * heads, d)
        own_bias = block_bias(width, self.window, x.device, causal=self.causal)[first_slot:]
        seen = [
            b if b.shape[1] == 1 else b[:, first_slot:].repeat_interleave(heads, 1) for b in biases
        ]
        y = attend(
            q,
            context,
            (k, v),
            views,
            seen,
            own_bias.repeat_interleave(heads, 0),
        )
        y = y.view(groups, blocks, rows, heads, d)
        result: Tensor = self.o_proj(y.permute(1, 2, 0, 3, 4).reshape(blocks, rows, -1))
        return result


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and pre-norm SwiGLU, each with a residual."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(
        self,
        h: Tensor,
        context: LayerKV,
        views: Sequence[SequenceView],
        biases: Sequence[Tensor],
        cos: Tensor,
        sin: Tensor,
        first_slot: int,
    ) -> Tensor:
        mixed = self.self_attn(
            self.input_layernorm(h), context, views, biases, cos, sin, first_slot
        )
        h = h[:, first_slot:] + mixed
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where the blocks of a pass lie: rotary tables (A, B, head_dim) and, by window, the masks."""

    cos: Tensor
    sin: Tensor
    biases: dict[int | None, list[Tensor]]
    views: Sequence[SequenceView]


class Backbone(nn.Module):
    """What every kind is built on. Embedding rows and the head are the target's and passed in."""

    layer_type: ClassVar[type[Layer]] = Layer
    needs_slot_0: ClassVar[bool] = False
    """Whether the last layer's slot 0 feeds a later slot by more than its keys and values."""
    config: DrafterConfig
    feature_scale: Tensor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer_type(config, i) for i in range(config.num_layers))
        # Training only: features are multiplied by it before fc; exporting folds it into fc.
        self.register_buffer("feature_scale", torch.ones(config.feature_size), persistent=False)

    def layer(self, index: int) -> Layer:
        """One transformer layer."""
        return cast(Layer, self.layers[index])

    def context(self, features: Tensor, positions: Tensor) -> list[LayerKV]:
        """Context K/V of every layer from features (N, T * H) at absolute positions (N,)."""
        c = self.config
        if not torch.is_autocast_enabled("cpu"):
            features = features.float()
        # There are fewer weights than features to scale.
        state = self.hidden_norm(F.linear(features, self.fc.weight * self.feature_scale))
        cos, sin = rotary_tables(positions, c.head_dim, c.rope_theta)
        every = (self.layer(i) for i in range(c.num_layers))
        return [layer.self_attn.context_kv(state, cos, sin) for layer in every]

    def place(
        self,
        width: int,
        anchor_positions: Tensor,
        context_positions: Tensor,
        views: Sequence[SequenceView],
    ) -> BlockPlace:
        """Rotary tables and context masks of blocks anchored at absolute positions (A,)."""
        c = self.config
        offsets = torch.arange(width, device=anchor_positions.device)
        cos, sin = rotary_tables(anchor_positions[:, None] + offsets, c.head_dim, c.rope_theta)
        biases = {
            window: [
                context_bias(
                    anchor_positions[v.first : v.last],
                    context_positions[v.start : v.end],
                    width,
                    window,
                )
                for v in views
            ]
            for window in set(c.windows)
        }
        return BlockPlace(cos, sin, biases, views)

    def run_layer(self, index: int, h: Tensor, context: LayerKV, place: BlockPlace) -> Tensor:
        """One layer on h (A, B, H); the last one gives slots 1 ... B - 1 alone, (A, B - 1, H)."""
        last = index == self.config.num_layers - 1
        # Slot 0 of the last layer is no draft; where nothing else needs it, it is not computed.
        skipped = 1 if last and not self.needs_slot_0 else 0
        window = self.config.windows[index]
        h = self.layer(index)(
            h, context, place.views, place.biases[window], place.cos, place.sin, skipped
        )
        return h[:, 1:] if last and not skipped else h


def block_embedding(embedding: Tensor, anchors: Tensor, mask_token: int, width: int) -> Tensor:
    """Block input (A, B, H): the anchor's row of `embedding` (V, H), then the mask token's."""
    block = embedding[mask_token].repeat(len(anchors), width, 1)
    block[:, 0] = F.embedding(anchors, embedding)
    return block
