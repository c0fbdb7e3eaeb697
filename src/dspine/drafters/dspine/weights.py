"""What a DSpine drafter has beside the backbone: injection, and transfer codes of every token."""

from __future__ import annotations

from dataclasses import dataclass

from dspine.drafters.backbone.weights import Stack, WeightBuilder
from dspine.files.schema import DSpineConfig
from dspine.ggml import Tensor


@dataclass(frozen=True, slots=True)
class InjectionWeights:
    """Shapes in ggml order: H hidden, r transfer rank, m message size."""

    shared: Stack
    """rank -> message, predecessor gate, receiver gate (m each)."""
    bias: Tensor
    codes: Tensor
    """(r, vocabulary): unit rows."""
    readouts: tuple[Tensor, ...]
    """By layer: H -> r."""
    writes: tuple[Tensor, ...]
    """By layer: m -> H."""


def injection_weights(builder: WeightBuilder, config: DSpineConfig) -> InjectionWeights:
    """Declare what DSpine adds to the backbone."""
    layers = range(config.num_layers)
    return InjectionWeights(
        shared=builder.stack(
            "injection",
            [f"inj_{part}.weight" for part in ("message", "predecessor_gate", "receiver_gate")],
        ),
        bias=builder.norm("inj_bias"),
        codes=builder.table("transfer_codes.weight"),
        readouts=tuple(builder.matrix(f"blk.{i}.inj_readout.weight") for i in layers),
        writes=tuple(builder.matrix(f"blk.{i}.inj_write.weight") for i in layers),
    )
