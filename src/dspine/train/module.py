"""The DSpine drafter in torch: what training optimises and what the ggml graph is checked against.

Parameter names are those of `files.schema.tensor_specs`. Shapes below use N context rows, A
anchors (blocks), B block width, H hidden size, G key heads, r transfer rank, m message size,
K candidates per slot. Formulas follow the published DSpine drafter (SpecForge's modeling code).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspine.errors import TrainingError
from dspine.files.schema import DSpineConfig

LayerKV = tuple[Tensor, Tensor]
"""Context keys (rotated) and values of one layer, each (G, n, head_dim) for one sequence."""


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence of a step: context rows [start, end), blocks [first, last)."""

    start: int
    end: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """What one pass over A blocks gives. `hidden` is after the final norm, ready for the head."""

    hidden: Tensor
    """(A, B - 1, H): slots 1 ... B - 1 with predicted predecessors."""
    last_state: Tensor
    """(A, B - 1, H): state q of the last layer before its injection."""
    last_feature: Tensor
    """(A, B - 1, r): readout of `last_state`, the receiver of a refined last write."""
    states: tuple[Tensor, ...]
    """Per layer (A, B - 1, H): state after the layer's write; alignment reads it."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Tables cos and sin (..., head_dim) for half-split rotary: pair d with d + head_dim / 2."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    frequency = theta ** -(half / head_dim)
    angle = positions.to(torch.float32)[..., None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last dimension of x; cos and sin broadcast against it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


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


def block_bias(width: int, window: int | None, device: torch.device | None = None) -> Tensor:
    """Additive mask (B, B): key o' is visible to o iff o' <= o and, with window w, o - o' < w."""
    o = torch.arange(width, device=device)
    distance = o[:, None] - o[None, :]
    hidden = distance < 0
    if window is not None:
        hidden = hidden | (distance >= window)
    return torch.zeros(width, width, device=device).masked_fill_(hidden, float("-inf"))


class Attention(nn.Module):
    """Grouped-query attention of block slots over context K/V and their own block."""

    def __init__(self, config: DSpineConfig, layer: int) -> None:
        super().__init__()
        c = config
        self.heads, self.kv_heads, self.head_dim = c.num_heads, c.num_kv_heads, c.head_dim
        self.window = c.windows[layer]
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
        k = apply_rotary(k, cos[:, None], sin[:, None])
        v = self.v_proj(context).view(shape)
        return k.transpose(0, 1), v.transpose(0, 1)

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
        v = self.v_proj(x).view(blocks, width, groups, d).permute(0, 2, 1, 3)
        q = apply_rotary(self.q_norm(q), cos[:, first_slot:, None], sin[:, first_slot:, None])
        k = apply_rotary(self.k_norm(k), cos[:, :, None], sin[:, :, None]).permute(0, 2, 1, 3)
        # (A, G, rows * heads, d): the heads of one group share keys, so they are just more rows.
        q = (q * d**-0.5).view(blocks, rows, groups, heads, d).permute(0, 2, 1, 3, 4)
        q = q.reshape(blocks, groups, rows * heads, d)
        own_bias = block_bias(width, self.window, x.device)[first_slot:].repeat_interleave(heads, 0)
        own = q @ k.transpose(-1, -2) + own_bias
        mixed = []
        for view, bias in zip(views, biases, strict=True):
            n, a = view.end - view.start, view.last - view.first
            keys = context[0][:, view.start : view.end]
            values = context[1][:, view.start : view.end]
            queries = q[view.first : view.last].transpose(0, 1).reshape(groups, -1, d)
            seen = bias if bias.shape[1] == 1 else bias[:, first_slot:].repeat_interleave(heads, 1)
            far = (queries @ keys.transpose(-1, -2)).view(groups, a, rows * heads, n) + seen
            near = own[view.first : view.last].transpose(0, 1)
            weight = torch.softmax(torch.cat([far, near], dim=-1), dim=-1)
            out = (weight[..., :n].reshape(groups, -1, n) @ values).view(groups, a, rows * heads, d)
            out = out + weight[..., n:] @ v[view.first : view.last].transpose(0, 1)
            mixed.append(out)
        y = torch.cat(mixed, dim=1).view(groups, blocks, rows, heads, d)
        result: Tensor = self.o_proj(y.permute(1, 2, 0, 3, 4).reshape(blocks, rows, -1))
        return result


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DSpineConfig) -> None:
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

    def __init__(self, config: DSpineConfig, layer: int) -> None:
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


class Injection(nn.Module):
    """Adjacent causal injection: every slot receives a gated message from its left neighbour."""

    def __init__(self, config: DSpineConfig) -> None:
        super().__init__()
        hidden, rank, size = config.hidden_size, config.transfer_rank, config.message_size
        self.rank = rank
        self.readouts = nn.ModuleList(
            nn.Linear(hidden, rank, bias=False) for _ in range(config.num_layers)
        )
        self.writes = nn.ModuleList(
            nn.Linear(size, hidden, bias=False) for _ in range(config.num_layers)
        )
        self.message = nn.Linear(rank, size, bias=False)
        self.receiver_gate = nn.Linear(rank, size, bias=False)
        self.predecessor_gate = nn.Linear(rank, size, bias=False)
        self.bias = nn.Parameter(torch.zeros(size))
        for layer in range(config.num_layers):
            nn.init.zeros_(self._write(layer).weight)
        nn.init.zeros_(self.predecessor_gate.weight)

    def readout(self, layer: int) -> nn.Linear:
        """R_l."""
        return cast(nn.Linear, self.readouts[layer])

    def _write(self, layer: int) -> nn.Linear:
        return cast(nn.Linear, self.writes[layer])

    def feature(self, layer: int, h: Tensor) -> Tensor:
        """f_l(h) = sqrt(r) * normalize(R_l h), normalised in fp32: (..., H) -> (..., r)."""
        read: Tensor = self.readout(layer)(h)
        return float(self.rank**0.5) * F.normalize(read.float(), dim=-1).to(h.dtype)

    def write(self, layer: int, h: Tensor, receiver: Tensor, predecessor: Tensor) -> Tensor:
        """Returns h + (|h| / sqrt(H)) * Wr_l (g * (M pred)), g = sigmoid(U recv + P pred + b)."""
        gate = torch.sigmoid(
            self.receiver_gate(receiver) + self.predecessor_gate(predecessor) + self.bias
        )
        scale = torch.linalg.vector_norm(h.float(), dim=-1, keepdim=True) / h.shape[-1] ** 0.5
        out: Tensor = h + scale.to(h.dtype) * self._write(layer)(gate * self.message(predecessor))
        return out


class DSpineModule(nn.Module):
    """The drafter. Embedding rows and the head are the target's and are passed in."""

    transfer_codes: Tensor
    transfer_ready: Tensor
    feature_scale: Tensor

    def __init__(self, config: DSpineConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.injection = Injection(config)
        self.register_buffer("transfer_codes", torch.zeros(config.vocab_size, config.transfer_rank))
        self.register_buffer("transfer_ready", torch.tensor(False))
        # Training only: features are multiplied by it before fc; exporting folds it into fc.
        self.register_buffer("feature_scale", torch.ones(config.feature_size), persistent=False)

    def code(self, tokens: Tensor) -> Tensor:
        """sqrt(r) * C[token]: (...,) -> (..., r), the predecessor a known token makes."""
        return float(self.config.transfer_rank**0.5) * F.embedding(tokens, self.transfer_codes)

    def layer(self, index: int) -> Layer:
        """One transformer layer."""
        return cast(Layer, self.layers[index])

    def context(self, features: Tensor, positions: Tensor) -> list[LayerKV]:
        """Context K/V of every layer from features (N, T * H) at absolute positions (N,)."""
        state = self.hidden_norm(self.fc(features * self.feature_scale))
        cos, sin = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        every = (self.layer(i) for i in range(self.config.num_layers))
        return [layer.self_attn.context_kv(state, cos, sin) for layer in every]

    def forward(
        self,
        block: Tensor,
        anchor_codes: Tensor,
        anchor_positions: Tensor,
        context: Sequence[LayerKV],
        context_positions: Tensor,
        views: Sequence[SequenceView],
        true_codes: Tensor | None = None,
        replaced: Tensor | None = None,
        replacement_layers: int = 0,
    ) -> BlockOutput:
        """One pass over A blocks of several sequences.

        block (A, B, H): embedding of the anchor, then of the mask token. anchor_codes (A, r).
        context_positions (N,), anchor_positions (A,): absolute. Blocks lie grouped by sequence, as
        `views` says. Where `replaced` (A,) is set, layers below `replacement_layers` take
        `true_codes` (A, B - 1, r) as predecessors (teacher replacement in training).
        """
        if not bool(self.transfer_ready):
            raise TrainingError(
                "the drafter has no transfer codes yet: make them from the target's head first"
            )
        width = block.shape[1]
        offsets = torch.arange(width, device=block.device)
        cos, sin = rotary_tables(
            anchor_positions[:, None] + offsets, self.config.head_dim, self.config.rope_theta
        )
        biases = self._biases(anchor_positions, context_positions, width, views)
        h = block
        states: list[Tensor] = []
        last = self.config.num_layers - 1
        for i in range(self.config.num_layers):
            # Slot 0 of the last layer feeds nothing: only its keys and values are needed.
            first_slot = 1 if i == last else 0
            window = self.config.windows[i]
            h = self.layer(i)(h, context[i], views, biases[window], cos, sin, first_slot)
            slots = h if i == last else h[:, 1:]
            feature = self.injection.feature(i, slots)
            predecessor = torch.cat([anchor_codes[:, None], feature[:, :-1]], dim=1)
            if replaced is not None and true_codes is not None and i < replacement_layers:
                predecessor = torch.where(replaced[:, None, None], true_codes, predecessor)
            written = self.injection.write(i, slots, feature, predecessor)
            states.append(written)
            if i < last:
                h = torch.cat([h[:, :1], written], dim=1)
        return BlockOutput(self.norm(states[-1]), h, feature, tuple(states))

    def _biases(
        self,
        anchor_positions: Tensor,
        context_positions: Tensor,
        width: int,
        views: Sequence[SequenceView],
    ) -> dict[int | None, list[Tensor]]:
        return {
            window: [
                context_bias(
                    anchor_positions[v.first : v.last],
                    context_positions[v.start : v.end],
                    width,
                    window,
                )
                for v in views
            ]
            for window in set(self.config.windows)
        }

    def refine(self, last_state: Tensor, last_feature: Tensor, codes: Tensor) -> Tensor:
        """norm(write_L(q, f_L(q), code)): the last write redone for given predecessors."""
        out: Tensor = self.norm(
            self.injection.write(self.config.num_layers - 1, last_state, last_feature, codes)
        )
        return out

    def transition_table(
        self, output: BlockOutput, anchors: Tensor, tokens: Tensor, rows: Tensor, head: Tensor
    ) -> Tensor:
        """S (A, B - 1, K, K): score of candidate j of slot i given candidate k of slot i - 1.

        tokens (A, B - 1, K) are the candidates' target ids, rows the same as rows of head (D, H).
        For slot 1 every row of the table uses the anchor (A,).
        """
        first = anchors[:, None, None].expand(-1, 1, tokens.shape[-1])
        previous = torch.cat([first, tokens[:, :-1]], dim=1)
        z = self.refine(
            output.last_state[:, :, None], output.last_feature[:, :, None], self.code(previous)
        )
        return z @ F.embedding(rows, head).transpose(-1, -2)


def block_embedding(embedding: Tensor, anchors: Tensor, mask_token: int, width: int) -> Tensor:
    """Block input (A, B, H): the anchor's row of `embedding` (V, H), then the mask token's."""
    block = embedding[mask_token].repeat(len(anchors), width, 1)
    block[:, 0] = F.embedding(anchors, embedding)
    return block


def walk_chain(table: Tensor) -> Tensor:
    """Greedy walk of S (A, slots, K, K): index of the chosen candidate per slot, (A, slots)."""
    row = torch.zeros(table.shape[0], dtype=torch.long, device=table.device)
    everyone = torch.arange(table.shape[0], device=table.device)
    chosen = []
    for slot in range(table.shape[1]):
        row = table[everyone, slot, row].argmax(dim=-1)
        chosen.append(row)
    return torch.stack(chosen, dim=1)


def top_candidates(hidden: Tensor, head: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Scores and row ids (..., K) of the best `count` head rows, best first."""
    best = (hidden @ head.transpose(0, 1)).topk(count, dim=-1)
    return best.values, best.indices


def draft_chain(
    module: DSpineModule,
    output: BlockOutput,
    anchors: Tensor,
    head: Tensor,
    rows: Tensor,
    tokens: Tensor,
) -> Tensor:
    """Chain of target ids (A, B - 1) from the candidates: transition table and greedy walk.

    rows (A, B - 1, K) are the candidates' rows of head (D, H), tokens their target ids.
    """
    chosen = walk_chain(module.transition_table(output, anchors, tokens, rows, head))
    return tokens.gather(-1, chosen[..., None])[..., 0]
