"""What a DFlash2 drafter has beside the backbone: convolutions and the selector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspine.drafters.backbone.weights import WeightBuilder
from dspine.files.schema import DFlash2Config
from dspine.ggml import HostTensor, Tensor


@dataclass(frozen=True, slots=True)
class ConvWeights:
    """A convolution around one sublayer: side 0 before it, side 1 after it."""

    base: Tensor
    """(H, T, 2): coefficients of channel, tap and side that do not depend on the row."""
    projection: Tensor
    """H -> 2 T G: what the row adds, for each group of channels."""


@dataclass(frozen=True, slots=True)
class DFlash2Weights:
    """Shapes in ggml order: H hidden, r selector rank, T taps, G groups."""

    attention: tuple[ConvWeights, ...]
    feed_forward: tuple[ConvWeights, ...]
    before_block: Tensor
    """(H, T): zeros, the values before the first slot."""
    predecessors: Tensor
    """(r, vocabulary)."""
    successors: Tensor
    """(r, vocabulary)."""
    selector: Tensor
    """H -> r."""


def dflash2_weights(builder: WeightBuilder, config: DFlash2Config) -> DFlash2Weights:
    """Declare what DFlash2 adds to the backbone."""

    def conv(name: str) -> ConvWeights:
        base = builder.vector(f"{name}_base")
        shape = (2, config.conv_kernel_size, config.hidden_size)
        return ConvWeights(
            base=builder.add(f"{name}_base", HostTensor.from_numpy(base.reshape(shape))),
            projection=builder.matrix(f"{name}_proj.weight"),
        )

    layers = range(config.num_layers)
    zeros = np.zeros((config.conv_kernel_size, config.hidden_size), np.float32)
    return DFlash2Weights(
        attention=tuple(conv(f"blk.{i}.attn_conv") for i in layers),
        feed_forward=tuple(conv(f"blk.{i}.ffn_conv") for i in layers),
        before_block=builder.add("before_block", HostTensor.from_numpy(zeros)),
        predecessors=builder.table("selector_predecessor.weight"),
        successors=builder.table("selector_successor.weight"),
        selector=builder.matrix("selector_hidden.weight"),
    )
