"""What a target's memory depends on: its weights, and what each layer keeps of a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from dspine.ggml.types import type_by_name


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor: its name in the file, its type and its shape in ggml order (row length first)."""

    name: str
    type_name: str
    ne: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes as stored in a file."""
        return type_by_name(self.type_name).row_bytes(self.ne[0]) * math.prod(self.ne[1:])

    @property
    def layer(self) -> int | None:
        """Number of the layer that it belongs to, None for those outside of layers."""
        first, _, rest = self.name.partition(".")
        number = rest.partition(".")[0]
        return int(number) if first == "blk" and number.isdigit() else None


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer keeps. An attention layer: `keys` and `values` numbers of each position, of the
    last `window` positions only (0: of all). A recurrent layer: `state` 32-bit numbers.
    """

    keys: int = 0
    values: int = 0
    window: int = 0
    state: int = 0


@dataclass(frozen=True)
class Geometry:
    """A target, as far as memory is concerned."""

    name: str
    architecture: str
    hidden: int
    feed_forward: int
    """Inner width of a token's feed-forward part; with experts, of all that it passes."""
    heads: int
    queries: int
    """Numbers of a query over all heads, a gate of the same size included where there is one."""
    vocabulary: int
    context_train: int
    """Positions that it was trained for; 0 when the file does not say."""
    layers: tuple[Layer, ...]
    weights: tuple[Weight, ...]
    recurrent_width: int = 0
    """Numbers of a token that a recurrent layer has in memory at once."""
    block_count: int = 0
    """Layers by the file's count, built-in next-token (MTP) layers included."""
    merges: int = 0
    """Merges of its tokenizer."""

    @cached_property
    def weight_bytes(self) -> int:
        return sum(weight.n_bytes for weight in self.weights)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(weight.ne) for weight in self.weights)

    @property
    def state_bytes(self) -> int:
        """One copy of the recurrent state of one sequence; 0 for attention-only targets."""
        return 4 * sum(layer.state for layer in self.layers)

    @property
    def is_tied(self) -> bool:
        """Whether the output head is the embedding."""
        return all(weight.name != "output.weight" for weight in self.weights)
