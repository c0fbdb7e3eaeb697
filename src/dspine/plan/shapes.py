"""The tensors of a target from a few numbers, by llama.cpp's names, for targets without a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dspine.plan.geometry import Geometry, Layer, Weight
from dspine.plan.mixes import mixed_types

HYBRID = "qwen35"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A published model. Architectures: llama, qwen2, qwen3, and qwen35 (Gated DeltaNet layers,
    of which every `attention_interval`-th attends instead).
    """

    name: str
    architecture: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    source: str
    """Where the numbers come from."""
    tied: bool = False
    attention_interval: int = 1
    state_size: int = 0
    state_key_heads: int = 0
    state_value_heads: int = 0
    convolution: int = 0

    def attends(self, layer: int) -> bool:
        return (layer + 1) % self.attention_interval == 0

    @property
    def convolved(self) -> int:
        """Channels that the convolution of a recurrent layer sees: queries, keys and values."""
        return self.state_size * (2 * self.state_key_heads + self.state_value_heads)

    @property
    def state(self) -> int:
        """32-bit numbers that a recurrent layer keeps: a matrix for each value head, and the rows
        that the convolution looks back at.
        """
        matrices = self.state_value_heads * self.state_size * self.state_size
        return matrices + (self.convolution - 1) * self.convolved


def geometry_of(sizes: Sizes, quant: str) -> Geometry:
    """The geometry of a published model in one of llama.cpp's mixes."""
    s = sizes
    kv = s.kv_heads * s.head_size
    layers = tuple(
        Layer(keys=kv, values=kv) if s.attends(index) else Layer(state=s.state)
        for index in range(s.layers)
    )
    shapes = tuple(tensor_shapes(s))
    types = mixed_types(shapes, quant, gqa=s.heads // s.kv_heads)
    inner = s.state_value_heads * s.state_size
    return Geometry(
        name=f"{s.name} {quant.upper()}",
        architecture=s.architecture,
        hidden=s.hidden,
        feed_forward=s.feed_forward,
        heads=s.heads,
        queries=s.heads * s.head_size * (2 if s.architecture == HYBRID else 1),
        vocabulary=s.vocabulary,
        context_train=s.context,
        layers=layers,
        weights=tuple(
            Weight(name, type_name, ne) for (name, ne), type_name in zip(shapes, types, strict=True)
        ),
        recurrent_width=3 * s.convolved + inner + s.hidden if s.attention_interval > 1 else 0,
        block_count=s.layers,
        merges=s.vocabulary,
    )


def tensor_shapes(s: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape in ggml order) of every tensor, in the order of a file."""
    hidden, queries, kv = s.hidden, s.heads * s.head_size, s.kv_heads * s.head_size
    hybrid = s.architecture == HYBRID
    yield "token_embd.weight", (hidden, s.vocabulary)
    yield "output_norm.weight", (hidden,)
    if not s.tied:
        yield "output.weight", (hidden, s.vocabulary)
    for index in range(s.layers):
        b = f"blk.{index}."
        yield b + "attn_norm.weight", (hidden,)
        if s.attends(index):
            yield b + "attn_q.weight", (hidden, queries * (2 if hybrid else 1))
            yield b + "attn_k.weight", (hidden, kv)
            yield b + "attn_v.weight", (hidden, kv)
            yield b + "attn_output.weight", (queries, hidden)
            if s.architecture in ("qwen3", HYBRID):
                yield b + "attn_q_norm.weight", (s.head_size,)
                yield b + "attn_k_norm.weight", (s.head_size,)
            if s.architecture == "qwen2":
                yield b + "attn_q.bias", (queries,)
                yield b + "attn_k.bias", (kv,)
                yield b + "attn_v.bias", (kv,)
        else:
            inner = s.state_value_heads * s.state_size
            yield b + "attn_qkv.weight", (hidden, s.convolved)
            yield b + "attn_gate.weight", (hidden, inner)
            yield b + "ssm_conv1d.weight", (s.convolution, s.convolved)
            yield b + "ssm_dt.bias", (s.state_value_heads,)
            yield b + "ssm_a", (s.state_value_heads,)
            yield b + "ssm_beta.weight", (hidden, s.state_value_heads)
            yield b + "ssm_alpha.weight", (hidden, s.state_value_heads)
            yield b + "ssm_norm.weight", (s.state_size,)
            yield b + "ssm_out.weight", (inner, hidden)
        yield b + ("post_attention_norm.weight" if hybrid else "ffn_norm.weight"), (hidden,)
        yield b + "ffn_gate.weight", (hidden, s.feed_forward)
        yield b + "ffn_up.weight", (hidden, s.feed_forward)
        yield b + "ffn_down.weight", (s.feed_forward, hidden)
