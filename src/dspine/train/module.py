"""The DSpine drafter in torch: what training optimises and what the ggml graph is checked against.

Shapes below use A anchors (blocks), B block width, H hidden size, r transfer rank, m message
size, K candidates per slot. Formulas follow the published DSpine drafter (SpecForge's modeling
code).
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
from dspine.train.attend import SequenceView
from dspine.train.backbone import Backbone, BlockOutput, LayerKV


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


@dataclass(frozen=True, slots=True)
class DSpineOutput(BlockOutput):
    """`hidden` is that with predicted predecessors."""

    last_state: Tensor
    """(A, B - 1, H): state q of the last layer before its injection."""
    last_feature: Tensor
    """(A, B - 1, r): readout of `last_state`, the receiver of a refined last write."""
    states: tuple[Tensor, ...]
    """Per layer (A, B - 1, H): state after the layer's write; alignment reads it."""


class DSpineModule(Backbone):
    """The backbone with an injection after every layer and a refined last write."""

    config: DSpineConfig
    transfer_codes: Tensor
    transfer_ready: Tensor

    def __init__(self, config: DSpineConfig) -> None:
        super().__init__(config)
        self.injection = Injection(config)
        self.register_buffer("transfer_codes", torch.zeros(config.vocab_size, config.transfer_rank))
        self.register_buffer("transfer_ready", torch.tensor(False))

    def code(self, tokens: Tensor) -> Tensor:
        """sqrt(r) * C[token]: (...,) -> (..., r), the predecessor a known token makes."""
        return float(self.config.transfer_rank**0.5) * F.embedding(tokens, self.transfer_codes)

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
    ) -> DSpineOutput:
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
        place = self.place(block.shape[1], anchor_positions, context_positions, views)
        h = block
        states: list[Tensor] = []
        last = self.config.num_layers - 1
        for i in range(self.config.num_layers):
            h = self.run_layer(i, h, context[i], place)
            slots = h if i == last else h[:, 1:]
            feature = self.injection.feature(i, slots)
            predecessor = torch.cat([anchor_codes[:, None], feature[:, :-1]], dim=1)
            if replaced is not None and true_codes is not None and i < replacement_layers:
                predecessor = torch.where(replaced[:, None, None], true_codes, predecessor)
            written = self.injection.write(i, slots, feature, predecessor)
            states.append(written)
            if i < last:
                h = torch.cat([h[:, :1], written], dim=1)
        return DSpineOutput(self.norm(states[-1]), h, feature, tuple(states))

    def refine(self, last_state: Tensor, last_feature: Tensor, codes: Tensor) -> Tensor:
        """norm(write_L(q, f_L(q), code)): the last write redone for given predecessors."""
        out: Tensor = self.norm(
            self.injection.write(self.config.num_layers - 1, last_state, last_feature, codes)
        )
        return out

    def transition_table(
        self, output: DSpineOutput, anchors: Tensor, tokens: Tensor, rows: Tensor, head: Tensor
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
