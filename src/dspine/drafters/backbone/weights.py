"""The backbone's weights on a backend: checked against the configuration, and stacked so that
products which share an input become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.errors import FileError
from dspine.files.dtypes import decode_rows
from dspine.files.schema import SINK_TENSORS, DrafterConfig, tensor_specs
from dspine.ggml import Backend, Graph, HostTensor, Tensor, WeightStore
from dspine.ggml.types import choosing_type

_READ_ROWS = 4096
"""Rows of the target's head copied at a time."""
_CHOOSING_ROWS = 1024
"""Rows of it made coarser at a time."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices with a common input, rows one after the other. They are one tensor when their
    types agree, else one each.
    """

    tensors: tuple[Tensor, ...]
    rows: tuple[int, ...]

    def product(self, graph: Graph, x: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Parts first ... last - 1 times x, results one after the other in dimension 0."""
        last = len(self.rows) if last is None else last
        if len(self.tensors) == 1:
            start, count = sum(self.rows[:first]), sum(self.rows[first:last])
            return graph.rows(self.tensors[0], start, count) @ x
        result = self.tensors[first] @ x
        for tensor in self.tensors[first + 1 : last]:
            result = graph.concat(result, tensor @ x, 0)
        return result


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Shapes in ggml order: H hidden, Q query, G key width, F feed-forward."""

    attn_norm: Tensor
    qkv: Stack
    """H -> Q, G, G."""
    qk_norm: Tensor
    """(head_dim, heads + kv heads): each head's norm weight."""
    attn_output: Tensor
    sinks: Tensor | None
    """(heads,): one more score for each head, where the layer has them."""
    ffn_norm: Tensor
    gate_up: Stack
    """H -> F, F."""
    ffn_down: Tensor


@dataclass(frozen=True, slots=True)
class BackboneWeights:
    """What the graphs of every kind read; `store` owns those that are not the target's."""

    store: WeightStore
    layers: tuple[LayerWeights, ...]
    fc: Tensor
    hidden_norm: Tensor
    output_norm: Tensor
    embedding: Tensor
    """(H, vocabulary): the target's."""
    head: Tensor
    """Chooses candidates: (H, vocabulary), the target's, or (H, draft vocabulary), a copy."""
    target_ids: Tensor | None
    """(1, draft vocabulary) i32: target id of each row of a reduced head."""
    scoring: Tensor
    """Head rows that score candidates, exactly as the target stores them."""
    scoring_by_id: bool
    """Whether `scoring` is indexed by target id rather than by row of `head`."""


class WeightBuilder:
    """Declares a drafter's tensors in a store and remembers what to write once it is allocated.

    `tensors` has GGUF names; every one that the configuration asks for is checked here. Raises
    FileError naming the tensor.
    """

    def __init__(
        self,
        backend: Backend,
        config: DrafterConfig,
        tensors: Mapping[str, npt.NDArray[Any] | HostTensor],
    ) -> None:
        self._host = _checked(config, tensors)
        self._config = config
        self._backend = backend
        self._store = WeightStore(backend, capacity=32 + 16 * config.num_layers)
        self._writes: list[tuple[str, npt.NDArray[np.uint8], int]] = []
        self._copied: dict[int, Tensor] = {}

    def backbone(
        self,
        embedding: Tensor | HostTensor,
        head: Tensor | HostTensor,
        draft_vocab: npt.NDArray[np.int32] | None = None,
        *,
        reduced_head: bool = False,
    ) -> BackboneWeights:
        """Declare what every kind has.

        `embedding` and `head` are the target's, or the drafter's own: a Tensor that the backend
        can use is used where it lies, anything else is copied. With `reduced_head` the head has
        the rows of `draft_vocab` alone, in its order.
        """
        c = self._config
        _check_table("token embedding", c, embedding, c.vocab_size)
        vocab = _checked_vocab(c, draft_vocab)
        reduced_head = reduced_head and vocab is not None
        rows = c.draft_vocab_size if reduced_head else None
        _check_table("output head", c, head, rows or c.vocab_size)
        layers = tuple(self._layer(i) for i in range(c.num_layers))
        embedding_tensor = self.target("embedding", embedding)
        if vocab is None:
            head_tensor = scoring = self.target("head", head)
            target_ids, by_id = None, False
        else:
            reduced = _host(head) if reduced_head else _select_rows(head, vocab)
            head_tensor = self.add("head", _choosing(reduced, self._backend), only_product=True)
            target_ids = self.add("d2t", HostTensor.from_numpy(vocab.reshape(-1, 1)))
            by_id = not reduced_head and self.is_present(head)
            scoring = self.target("head", head) if by_id else self.add("scoring", reduced)
        return BackboneWeights(
            store=self._store,
            layers=layers,
            fc=self.matrix("fc.weight"),
            hidden_norm=self.norm("enc.output_norm.weight"),
            output_norm=self.norm("output_norm.weight"),
            embedding=embedding_tensor,
            head=head_tensor,
            target_ids=target_ids,
            scoring=scoring,
            scoring_by_id=by_id,
        )

    def _layer(self, index: int) -> LayerWeights:
        c, name = self._config, f"blk.{index}."
        q_norm = np.tile(self.vector(name + "attn_q_norm.weight"), (c.num_heads, 1))
        k_norm = np.tile(self.vector(name + "attn_k_norm.weight"), (c.num_kv_heads, 1))
        return LayerWeights(
            attn_norm=self.norm(name + "attn_norm.weight"),
            qkv=self.stack(name + "qkv", [f"{name}attn_{part}.weight" for part in ("q", "k", "v")]),
            qk_norm=self.add(
                name + "qk_norm", HostTensor.from_numpy(np.concatenate((q_norm, k_norm)))
            ),
            attn_output=self.matrix(name + "attn_output.weight"),
            sinks=self.norm(name + SINK_TENSORS.gguf_name) if index in c.sink_layers else None,
            ffn_norm=self.norm(name + "ffn_norm.weight"),
            gate_up=self.stack(
                name + "gate_up", [f"{name}ffn_{part}.weight" for part in ("gate", "up")]
            ),
            ffn_down=self.matrix(name + "ffn_down.weight"),
        )

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A vector as float32."""
        tensor = self._host[name]
        return decode_rows(tensor.data.reshape(1, -1), tensor.type.name, name).reshape(-1)

    def norm(self, name: str) -> Tensor:
        """A vector, stored as f32: norms and biases are added to f32 results."""
        return self.add(name, HostTensor.from_numpy(self.vector(name)))

    def matrix(self, name: str) -> Tensor:
        """A matrix that graphs multiply by."""
        return self.add(name, self._host[name], only_product=True)

    def table(self, name: str) -> Tensor:
        """A matrix whose rows graphs look up."""
        return self.add(name, self._host[name])

    def stack(self, name: str, parts: Sequence[str]) -> Stack:
        """Matrices of one input, in one tensor when their types agree."""
        hosts = [self._host[part] for part in parts]
        rows = tuple(h.ne[1] for h in hosts)
        if len({h.type.name for h in hosts}) > 1:
            return Stack(tuple(self.matrix(part) for part in parts), rows)
        tensor = self._store.declare(
            name, hosts[0].type.name, (hosts[0].ne[0], sum(rows)), only_product=True
        )
        first = 0
        for host_tensor, count in zip(hosts, rows, strict=True):
            self._writes.append((name, host_tensor.data, first))
            first += count
        return Stack((tensor,), rows)

    def add(self, name: str, tensor: HostTensor, *, only_product: bool = False) -> Tensor:
        """Declare `tensor` under `name`; see WeightStore.declare."""
        declared = self._store.declare(name, tensor.type.name, tensor.ne, only_product=only_product)
        self._writes.append((name, tensor.data, 0))
        return declared

    def is_present(self, tensor: Tensor | HostTensor) -> bool:
        """Whether graphs can look rows up in a tensor of the target without another copy."""
        if isinstance(tensor, Tensor) and tensor.is_readable and self._backend.can_use(tensor):
            return True
        return id(tensor) in self._copied

    def target(self, name: str, tensor: Tensor | HostTensor) -> Tensor:
        """A tensor of the target: used in place, or copied once when it is out of reach."""
        if id(tensor) in self._copied:
            return self._copied[id(tensor)]
        if isinstance(tensor, Tensor) and self.is_present(tensor):
            return tensor
        self._copied[id(tensor)] = self.add(name, _host(tensor))
        return self._copied[id(tensor)]

    def finish(self) -> None:
        """Allocate and write everything."""
        self._store.allocate()
        for name, data, first in self._writes:
            self._store.write(name, data, first)


def _checked(
    config: DrafterConfig, tensors: Mapping[str, npt.NDArray[Any] | HostTensor]
) -> dict[str, HostTensor]:
    host: dict[str, HostTensor] = {}
    for spec in tensor_specs(config):
        if spec.gguf_name not in tensors:
            raise FileError(
                f"the drafter has no tensor {spec.gguf_name}: the file is incomplete, copy or "
                "convert it again"
            )
        given = tensors[spec.gguf_name]
        tensor = given if isinstance(given, HostTensor) else HostTensor.from_numpy(given)
        expected = spec.shape[::-1]
        if _trimmed(tensor.ne) != _trimmed(expected):
            raise FileError(
                f"drafter tensor {spec.gguf_name} has shape {tensor.ne}, its configuration says "
                f"{expected}: copy or convert it again"
            )
        host[spec.gguf_name] = tensor
    return host


def _host(tensor: Tensor | HostTensor) -> HostTensor:
    """The same tensor in host memory."""
    if isinstance(tensor, HostTensor):
        return tensor
    return HostTensor(tensor.type, tensor.ne[:2], tensor.read_rows(0, tensor.ne[1]))


def _check_table(what: str, config: DrafterConfig, tensor: Tensor | HostTensor, rows: int) -> None:
    hidden, vocab = tensor.ne[0], tensor.ne[1]
    if hidden != config.hidden_size or vocab < rows:
        raise FileError(
            f"the target's {what} has {vocab} rows of {hidden}, the drafter needs {rows} rows of "
            f"{config.hidden_size}: it belongs to another target, name the target that it was "
            "trained for"
        )


def _checked_vocab(
    config: DrafterConfig, vocab: npt.NDArray[np.int32] | None
) -> npt.NDArray[np.int32] | None:
    if vocab is None:
        if config.draft_vocab_size is not None:
            raise FileError(
                "the drafter has a reduced vocabulary but no d2t tensor: convert it again"
            )
        return None
    ids = np.ascontiguousarray(vocab, dtype=np.int32).reshape(-1)
    if ids.size != config.draft_vocab_size:
        raise FileError(
            f"d2t names {ids.size} tokens, the configuration says {config.draft_vocab_size}: "
            "convert it again"
        )
    if ids.min() < 0 or ids.max() >= config.vocab_size or np.unique(ids).size != ids.size:
        raise FileError(
            f"d2t must name different tokens from 0 to {config.vocab_size - 1}: it is damaged, "
            "copy or convert it again"
        )
    return ids


def _select_rows(head: Tensor | HostTensor, ids: npt.NDArray[np.int32]) -> HostTensor:
    """Raw rows `ids` of the head, in that order."""
    row = head.type.row_bytes(head.ne[0])
    out = np.empty((ids.size, row), dtype=np.uint8)
    for first, block in _row_blocks(head, row):
        inside = np.nonzero((ids >= first) & (ids < first + len(block)))[0]
        out[inside] = block[ids[inside] - first]
    return HostTensor(head.type, (head.ne[0], ids.size), out.reshape(-1))


def _row_blocks(head: Tensor | HostTensor, row: int) -> Iterable[tuple[int, npt.NDArray[np.uint8]]]:
    if isinstance(head, HostTensor):
        yield 0, head.data.reshape(-1, row)
        return
    for first in range(0, head.ne[1], _READ_ROWS):
        yield first, head.read_rows(first, min(_READ_ROWS, head.ne[1] - first))


def _choosing(head: HostTensor, backend: Backend) -> HostTensor:
    """A copied head in the type that chooses candidates."""
    wanted = choosing_type(head.type.name, head.ne[0])
    if backend.device.kind != "cpu" or wanted == head.type.name:
        return head
    raw = head.data.reshape(head.ne[1], -1)
    # A part at a time: all rows as numbers would take more memory than the drafter.
    parts = [
        HostTensor.quantised(
            decode_rows(raw[first : first + _CHOOSING_ROWS], head.type.name, "output head"), wanted
        )
        for first in range(0, len(raw), _CHOOSING_ROWS)
    ]
    data = np.concatenate([part.data.reshape(-1) for part in parts])
    return HostTensor(parts[0].type, head.ne, data)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
