"""The DFlash and DFlash2 drafters in torch.

DFlash is the backbone alone. DFlash2 puts a grouped dynamic convolution around each sublayer and
scores candidates given the candidate before them. Formulas follow the published drafters (z-lab's
modeling code, and vLLM's and SGLang's implementations of DFlash2). Shapes: A anchors (blocks), B
block width, H hidden size, T kernel size, G groups of channels, r selector rank, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspine.files.schema import DFlash2Config, DFlashConfig, DrafterConfig
from dspine.train.attend import SequenceView
from dspine.train.backbone import Backbone, BlockOutput, Layer, LayerKV


class DFlashModule(Backbone):
    """The best candidate of each slot is its draft; slots hear of each other by attention alone."""

    config: DFlashConfig | DFlash2Config

    def __init__(self, config: DFlashConfig | DFlash2Config) -> None:
        super().__init__(config)

    def forward(
        self,
        block: Tensor,
        anchor_positions: Tensor,
        context: Sequence[LayerKV],
        context_positions: Tensor,
        views: Sequence[SequenceView],
    ) -> BlockOutput:
        """One pass over A blocks of several sequences.

        block (A, B, H): embedding of the anchor, then of the mask token. context_positions (N,),
        anchor_positions (A,): absolute. Blocks lie grouped by sequence, as `views` says.
        """
        place = self.place(block.shape[1], anchor_positions, context_positions, views)
        h = block
        for i in range(self.config.num_layers):
            h = self.run_layer(i, h, context[i], place)
        return BlockOutput(self.norm(h))


class DynamicConv(nn.Module):
    """A convolution over the slots of a block before a sublayer and one after it.

    The coefficients of both are a learned kernel plus a change per slot and group of channels,
    which one projection of the input makes. It starts as the identity.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        size, hidden = config.conv_kernel_size, config.hidden_size
        self.size, self.groups, self.channels = size, config.conv_groups, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, size, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * size * self.groups, bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def coefficients(self, x: Tensor) -> Tensor:
        """From x (A, B, H) to (2, T, A, B, H): side 0 before the sublayer, side 1 after it."""
        shape = (*x.shape[:2], 2, self.size, self.groups)
        change = self.kernel_projection(x).view(shape).repeat_interleave(self.channels, dim=-1)
        kernel: Tensor = self.base_kernel + change
        return kernel.permute(2, 3, 0, 1, 4)

    @staticmethod
    def convolve(x: Tensor, coefficients: Tensor) -> Tensor:
        """Sum over tau of coefficients[tau] * x at slot t - tau; zero before the block.

        x (A, B, H), coefficients (T, A, B, H).
        """
        out = coefficients[0] * x
        for tau in range(1, min(len(coefficients), x.shape[1])):
            out = out + coefficients[tau] * F.pad(x, (0, 0, tau, 0))[:, : x.shape[1]]
        return out


class ConvLayer(Layer):
    """A layer whose two sublayers stand between convolutions; context rows bypass them."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert isinstance(config, DFlash2Config)
        self.attention_conv = DynamicConv(config)
        self.mlp_conv = DynamicConv(config)

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
        x = self.input_layernorm(h)
        before, after = self.attention_conv.coefficients(x)
        y = self.attention_conv.convolve(x, before)
        z = self.self_attn(y, context, views, biases, cos, sin, first_slot)
        h = h + self.attention_conv.convolve(z, after)
        x = self.post_attention_layernorm(h)
        before, after = self.mlp_conv.coefficients(x)
        z = self.mlp(self.mlp_conv.convolve(x, before))
        return h + self.mlp_conv.convolve(z, after)


class CandidateSelector(nn.Module):
    """How well a token follows another one in a given slot.

    The successors' codebook starts at zero, so that scores start as the head's logits.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        vocab, rank = config.vocab_size, config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def forward(self, hidden: Tensor, previous: Tensor, following: Tensor) -> Tensor:
        """Scores (..., P, K): sum_j P[p]_j (W h)_j S[c]_j of hidden (..., H) and the token ids
        previous (..., P) and following (..., K)."""
        gate = self.hidden_projection(hidden)[..., None, :]
        left = F.embedding(previous, self.predecessor_codebook) * gate
        scores: Tensor = left @ F.embedding(following, self.successor_codebook).transpose(-1, -2)
        return scores


class DFlash2Module(DFlashModule):
    """DFlash with dynamic convolutions and a selector that chooses along the block."""

    layer_type: ClassVar[type[Layer]] = ConvLayer
    # The convolutions after the last sublayers bring slot 0 to slot 1.
    needs_slot_0: ClassVar[bool] = True
    config: DFlash2Config

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)

    def transition_table(
        self, output: BlockOutput, anchors: Tensor, tokens: Tensor, rows: Tensor, head: Tensor
    ) -> Tensor:
        """S (A, B - 1, K, K): logit of candidate j of slot i plus its score after candidate k of
        slot i - 1.

        tokens (A, B - 1, K) are the candidates' target ids, rows the same as rows of head (D, H).
        For slot 1 every row of the table uses the anchor (A,).
        """
        first = anchors[:, None, None].expand(-1, 1, tokens.shape[-1])
        previous = torch.cat([first, tokens[:, :-1]], dim=1)
        unary = (F.embedding(rows, head) @ output.hidden[..., None])[..., 0]
        scores: Tensor = self.candidate_selector(output.hidden, previous, tokens)
        return unary[:, :, None] + scores
