"""What a drafter consists of: its configuration by kind, its pair, and the exact tensor list.

Both file formats (SpecForge safetensors and our GGUF), the torch module and the ggml graph
take names and shapes from here, so they cannot drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dspine.errors import FileError
from dspine.ggml.types import row_bytes

ARCHITECTURE = "dspine"
DFLASH_ARCHITECTURE = "dflash"
"""llama.cpp's name for DFlash and DFlash2 alike."""
SCALES: Mapping[str, float | None] = {
    "embedding_scale": 1.0,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "value_scale": 1.0,
}
"""Fields of a configuration that some drafters of targets with such scales have, and the value that
changes nothing."""
VARIATIONS: Mapping[str, object] = {**SCALES, "rotary_size": None, "sink_layers": ()}
"""All fields in which drafters of DFlash and DFlash2 vary beyond their sizes, and the usual value.
DSpine has none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """What every drafter of the family has: the geometry of its backbone, taps and block.

    Sizes are counts; `rope_theta`, `rms_norm_eps` plain numbers.
    `taps` are 0-based target layer ids whose *output* is read, in concatenation order.
    `windows` has one entry per layer: the sliding window in tokens (the current one counted),
    or None for full attention. `causal` has one entry per layer (attention inside the block).
    `draft_vocab_size` is None for the target's full vocabulary, else the size of the reduced head.
    `embedding_scale` multiplies the block's embeddings; a logit x becomes `logit_scale` x, and
    with a `logit_softcap` c then c tanh(x / c). `value_scale` multiplies what attention reads.
    `rotary_size` is how many numbers of a head turn with the position, the first ones; None is all.
    `sink_layers` are those whose heads have an attention sink each: exp(sink) is added to the sum
    that a softmax divides by.
    """

    kind: ClassVar[str] = ""
    """The name that people know the kind by, as in `DSpine`."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    target_hidden_size: int
    block_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    windows: tuple[int | None, ...]
    causal: tuple[bool, ...]
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_positions: int = 8192
    draft_vocab_size: int | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    value_scale: float = 1.0
    rotary_size: int | None = None
    sink_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "target_hidden_size",
            "max_positions",
        ):
            _require_count(name, getattr(self, name), 1)
        _require_count("block_size", self.block_size, 2)
        if self.num_heads % self.num_kv_heads:
            raise FileError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}: the drafter's attention heads cannot be grouped, choose a "
                "multiple"
            )
        if self.head_dim % 2:
            raise FileError(
                f"head_dim {self.head_dim} is odd: rotary positions need pairs, choose an even "
                "number"
            )
        if self.rotary_size is not None:
            _require_count("rotary_size", self.rotary_size, 2)
            if self.rotary_size % 2 or self.rotary_size >= self.head_dim:
                raise FileError(
                    f"rotary_size {self.rotary_size} must be even and below head_dim "
                    f"{self.head_dim}: it says which part of a head turns with the position"
                )
        if list(self.sink_layers) != sorted(set(self.sink_layers) & set(range(self.num_layers))):
            raise FileError(
                f"sink_layers {list(self.sink_layers)} must be layers from 0 to "
                f"{self.num_layers - 1} in order"
            )
        for name in ("windows", "causal"):
            if len(getattr(self, name)) != self.num_layers:
                raise FileError(
                    f"{name} names {len(getattr(self, name))} layers, the drafter has "
                    f"{self.num_layers}: every layer must say its own"
                )
        if not self.taps or any(isinstance(t, bool) or t < 0 for t in self.taps):
            raise FileError(f"taps {list(self.taps)} must be one or more target layer ids from 0")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise FileError(
                f"mask_token_id {self.mask_token_id} is outside the vocabulary of "
                f"{self.vocab_size}: name one of its tokens"
            )
        for name in ("rope_theta", "rms_norm_eps", *SCALES):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise FileError(f"{name} {value} must be a positive number")

    @property
    def feature_size(self) -> int:
        """Width of one token's feature: all taps concatenated."""
        return len(self.taps) * self.target_hidden_size

    @property
    def context_window(self) -> int | None:
        """Largest window of any layer, or None when one layer sees everything."""
        known = [w for w in self.windows if w is not None]
        return None if len(known) < self.num_layers else max(known)

    @property
    def scales(self) -> dict[str, float]:
        """Those of SCALES that change something."""
        stated = {name: getattr(self, name) for name in SCALES}
        return {name: value for name, value in stated.items() if value != SCALES[name]}

    @property
    def variations(self) -> dict[str, object]:
        """Those of VARIATIONS that are not the usual."""
        stated = {name: getattr(self, name) for name in VARIATIONS}
        return {name: value for name, value in stated.items() if value != VARIATIONS[name]}

    def first_visible(self, anchor_position: int) -> int:
        """First context position that any slot of a block anchored there can see."""
        window = self.context_window
        return 0 if window is None else max(0, anchor_position - window + 1)

    def _require_candidates(self, name: str, count: int) -> None:
        _require_count(name, count, 1)
        if count > (self.draft_vocab_size or self.vocab_size):
            raise FileError(
                f"{name} {count} is larger than the vocabulary it chooses from: choose a smaller "
                "number"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DSpineConfig(DrafterConfig):
    """The backbone with adjacent injection and a transition table over `top_k` candidates."""

    kind: ClassVar[str] = "DSpine"
    transfer_rank: int
    message_size: int
    top_k: int = 16

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        for name in ("transfer_rank", "message_size"):
            _require_count(name, getattr(self, name), 1)
        if self.transfer_rank > min(self.hidden_size, self.vocab_size - 1):
            raise FileError(
                f"transfer_rank {self.transfer_rank} is above "
                f"{min(self.hidden_size, self.vocab_size - 1)}, the smaller of hidden_size and "
                "vocab_size - 1: choose a smaller one"
            )
        self._require_candidates("top_k", self.top_k)
        for name, value in self.variations.items():
            raise FileError(
                f"{name} is {value}: DSpine scales nothing, has no attention sinks and turns whole "
                f"heads"
            )
        if not all(self.causal):
            raise FileError(
                "causal is false for a layer: DSpine needs causal attention inside the block"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(DrafterConfig):
    """The backbone alone: the arg-max of each slot's logits is its draft."""

    kind: ClassVar[str] = "DFlash"


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Config(DrafterConfig):
    """The backbone with grouped dynamic convolutions around each sublayer and a selector.

    `conv_kernel_size` T counts the current row; `conv_group_size` channels share a coefficient;
    the selector scores each of `top_k` candidates given each candidate of the slot before through
    codebooks of `selector_rank` numbers a token.
    """

    kind: ClassVar[str] = "DFlash2"
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    top_k: int = 16

    def __post_init__(self) -> None:
        DrafterConfig.__post_init__(self)
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank"):
            _require_count(name, getattr(self, name), 1)
        if self.hidden_size % self.conv_group_size:
            raise FileError(
                f"conv_group_size {self.conv_group_size} does not divide hidden_size "
                f"{self.hidden_size}: the channels cannot be grouped, choose a divisor"
            )
        self._require_candidates("top_k", self.top_k)

    @property
    def conv_groups(self) -> int:
        """Groups of channels that share their coefficients."""
        return self.hidden_size // self.conv_group_size


@dataclass(frozen=True, slots=True)
class Sketch:
    """Pieces of some of a target's tensors, as they are stored (`dspine.files.sketch`)."""

    names: tuple[str, ...]
    types: tuple[str, ...]
    """Names of ggml types."""
    sizes: tuple[int, ...]
    """Values of each piece, whole blocks of its type."""
    data: bytes
    """All pieces, one after the other."""

    def lengths(self) -> list[int]:
        """Bytes of each piece."""
        return [row_bytes(*pair) for pair in zip(self.types, self.sizes, strict=True)]

    def piece(self, number: int) -> bytes:
        """One piece."""
        lengths = self.lengths()
        start = sum(lengths[:number])
        return self.data[start : start + lengths[number]]


@dataclass(frozen=True, slots=True)
class Pair:
    """Which target a drafter belongs to; compared with the target at load."""

    name: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    vocab_hash: str
    """sha256 (hex) over the token texts, each preceded by its length; see pairing.vocab_hash."""
    fingerprint: str
    """sha256 (hex) of the target's `output_norm.weight` as float32 bytes."""
    thinking: bool = False
    """Whether the drafter was trained on text with reasoning switched on."""
    sketch: Sketch | None = None
    """Pieces of the target's weights; None in files from before there were any."""


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """What travels in a drafter file beside the weights, for people and for width choice."""

    acceptance_curve: tuple[float, ...] = ()
    """P(slot i accepted | all earlier slots accepted), i = 1 ... block_size - 1."""
    provenance: Mapping[str, object] = field(default_factory=dict)
    """Command, data counts, commit, package versions, curves; stored as JSON."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its name in each format and its shape in PyTorch order (out, in)."""

    torch_name: str
    gguf_name: str
    shape: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        """Only matrices are quantised; vectors stay F32 in our GGUF."""
        return len(self.shape) == 2


SINK_TENSORS = TensorSpec("self_attn.attention_sink_bias", "attn_sinks.weight", ())
"""Names of a layer's attention sinks without the layer; one number for each query head."""


def tensor_specs(config: DrafterConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of a drafter, in file order: the backbone's, then what its kind adds.

    Names: SpecForge's in safetensors; llama.cpp's `dflash` names in GGUF, and ours (`inj_*`,
    `transfer_codes`) where it has none.
    """
    specs = _backbone_specs(config)
    if isinstance(config, DSpineConfig):
        specs += _dspine_specs(config)
    elif isinstance(config, DFlash2Config):
        specs += _dflash2_specs(config)
    return tuple(specs)


def _backbone_specs(c: DrafterConfig) -> list[TensorSpec]:
    hidden, queries, keys = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    specs = [
        TensorSpec("fc.weight", "fc.weight", (hidden, c.feature_size)),
        TensorSpec("hidden_norm.weight", "enc.output_norm.weight", (hidden,)),
        TensorSpec("norm.weight", "output_norm.weight", (hidden,)),
    ]
    for i in range(c.num_layers):
        t, g = f"layers.{i}.", f"blk.{i}."
        specs += [
            TensorSpec(t + "input_layernorm.weight", g + "attn_norm.weight", (hidden,)),
            TensorSpec(t + "self_attn.q_proj.weight", g + "attn_q.weight", (queries, hidden)),
            TensorSpec(t + "self_attn.k_proj.weight", g + "attn_k.weight", (keys, hidden)),
            TensorSpec(t + "self_attn.v_proj.weight", g + "attn_v.weight", (keys, hidden)),
            TensorSpec(t + "self_attn.o_proj.weight", g + "attn_output.weight", (hidden, queries)),
            TensorSpec(t + "self_attn.q_norm.weight", g + "attn_q_norm.weight", (c.head_dim,)),
            TensorSpec(t + "self_attn.k_norm.weight", g + "attn_k_norm.weight", (c.head_dim,)),
            TensorSpec(t + "post_attention_layernorm.weight", g + "ffn_norm.weight", (hidden,)),
            TensorSpec(
                t + "mlp.gate_proj.weight", g + "ffn_gate.weight", (c.intermediate_size, hidden)
            ),
            TensorSpec(
                t + "mlp.up_proj.weight", g + "ffn_up.weight", (c.intermediate_size, hidden)
            ),
            TensorSpec(
                t + "mlp.down_proj.weight", g + "ffn_down.weight", (hidden, c.intermediate_size)
            ),
        ]
        if i in c.sink_layers:
            sinks = SINK_TENSORS
            specs.append(TensorSpec(t + sinks.torch_name, g + sinks.gguf_name, (c.num_heads,)))
    return specs


def _dspine_specs(c: DSpineConfig) -> list[TensorSpec]:
    hidden, rank, message = c.hidden_size, c.transfer_rank, c.message_size
    specs = [
        TensorSpec("injection.message.weight", "inj_message.weight", (message, rank)),
        TensorSpec("injection.receiver_gate.weight", "inj_receiver_gate.weight", (message, rank)),
        TensorSpec(
            "injection.predecessor_gate.weight", "inj_predecessor_gate.weight", (message, rank)
        ),
        TensorSpec("injection.bias", "inj_bias", (message,)),
        TensorSpec("transfer_codes", "transfer_codes.weight", (c.vocab_size, rank)),
    ]
    for i in range(c.num_layers):
        g = f"blk.{i}."
        specs += [
            TensorSpec(f"injection.readouts.{i}.weight", g + "inj_readout.weight", (rank, hidden)),
            TensorSpec(f"injection.writes.{i}.weight", g + "inj_write.weight", (hidden, message)),
        ]
    return specs


def _dflash2_specs(c: DFlash2Config) -> list[TensorSpec]:
    hidden, taps, rank = c.hidden_size, c.conv_kernel_size, c.selector_rank
    specs = []
    for i in range(c.num_layers):
        for torch_part, gguf_part in (("attention_conv", "attn_conv"), ("mlp_conv", "ffn_conv")):
            t, g = f"layers.{i}.{torch_part}.", f"blk.{i}.{gguf_part}_"
            specs += [
                TensorSpec(t + "base_kernel", g + "base", (2, taps, hidden)),
                TensorSpec(
                    t + "kernel_projection.weight",
                    g + "proj.weight",
                    (2 * taps * c.conv_groups, hidden),
                ),
            ]
    name = "candidate_selector."
    return [
        *specs,
        TensorSpec(
            name + "predecessor_codebook", "selector_predecessor.weight", (c.vocab_size, rank)
        ),
        TensorSpec(name + "successor_codebook", "selector_successor.weight", (c.vocab_size, rank)),
        TensorSpec(name + "hidden_projection.weight", "selector_hidden.weight", (rank, hidden)),
    ]


def default_taps(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """SpecForge's rule: `num_layers` taps spread evenly over target layers 1 ... N - 3."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


def _require_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FileError(f"{name} is {value!r}: it must be a whole number of at least {least}")
