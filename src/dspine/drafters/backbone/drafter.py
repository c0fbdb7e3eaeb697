"""A drafter of any kind: context K/V per sequence, cached graphs, and the base contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dspine.drafters.backbone.block import BlockGraph, DraftTrace
from dspine.drafters.backbone.context import CHUNKS, ContextCache, ContextGraph
from dspine.drafters.backbone.target import host_tensor, target_tensors
from dspine.drafters.backbone.weights import WeightBuilder
from dspine.drafters.base import ContextState, Draft, DraftAsk, Draw, Features
from dspine.errors import ClosedError, UsageError
from dspine.files.drafter_file import OWN_TABLES, DrafterFile, read_drafter
from dspine.files.schema import DrafterConfig
from dspine.ggml import Backend, Device, HostTensor, Tensor
from dspine.llama.model import Model

_FEW_ROWS = 1024
"""Context rows for which one graph serves every length of the context."""

_MAX_BLOCK_GRAPHS = 64
"""Block graphs kept; the one unused for longest goes first."""

_MAX_SHARED_GRAPHS = 24
"""The same for graphs of several sequences, which need more memory each."""

_GraphKey: TypeAlias = tuple[tuple[int, ...], int, int]
"""Sequences, width, context rows."""

ConfigT = TypeVar("ConfigT", bound=DrafterConfig)
BlockT = TypeVar("BlockT", bound=BlockGraph)


class BackboneDrafter(ABC, Generic[ConfigT, BlockT]):
    """One drafter for every sequence. See dspine.drafters.base.Drafter for the contract.

    When `truncate` goes back further than the ring can serve, `first_held(seq)` lies above
    `first_visible(anchor)`: the caller then adds the rows from there on again. A cache is made
    at the first use of a sequence number and kept until `close` or `forget`.
    """

    name: str
    """The kind, as reports name its proposals."""
    config_type: type[ConfigT]
    follows = False
    """Whether the kind can follow a lead."""
    _serves_several = True
    """Whether one graph can make blocks of several sequences."""

    def __init__(
        self,
        config: ConfigT,
        tensors: Mapping[str, npt.NDArray[Any] | HostTensor],
        *,
        embedding: Tensor | HostTensor,
        head: Tensor | HostTensor,
        n_ctx: int,
        n_threads: int = 1,
        device: Device | None = None,
        draft_vocab: npt.NDArray[np.int32] | None = None,
        reduced_head: bool = False,
        cache_type: str = "f16",
    ) -> None:
        if n_ctx < 1:
            raise UsageError(f"n_ctx is {n_ctx}: at least 1 is needed")
        if cache_type not in ("f32", "f16"):
            raise UsageError(f"cache_type is {cache_type!r}: the drafter keeps f32 or f16")
        self.config = config
        self.block_size = config.block_size
        self.taps = config.taps
        self.n_ctx = n_ctx
        self._cache_type = cache_type
        self._window = config.context_window
        self._closed = False
        self._caches: dict[int, ContextCache] = {}
        self._context_graphs: dict[tuple[int, int], ContextGraph] = {}
        self._block_graphs: OrderedDict[_GraphKey, BlockT] = OrderedDict()
        self._shared_graphs: OrderedDict[_GraphKey, BlockT] = OrderedDict()
        self._backend = Backend(device, n_threads)
        try:
            builder = WeightBuilder(self._backend, config, tensors)
            self._weights = builder.backbone(
                embedding, head, draft_vocab, reduced_head=reduced_head
            )
            self._declare(builder)
            builder.finish()
        except BaseException:
            self._backend.close()
            raise

    @abstractmethod
    def _declare(self, builder: WeightBuilder) -> None:
        """Declare the weights that this kind adds to the backbone's."""

    @abstractmethod
    def _make_block(self, caches: Sequence[ContextCache], width: int, rows: int) -> BlockT:
        """The kind's block graph of `width` slots over `rows` context rows, for these sequences."""

    @classmethod
    def load(
        cls,
        file: Path | DrafterFile,
        target: Model,
        *,
        n_ctx: int,
        n_threads: int = 1,
        device: Device | None = None,
        cache_type: str = "f16",
    ) -> Self:
        """Open a drafter file, or one that was read, for a loaded target, whose embedding and head
        it shares.

        Raises FileError for a damaged file or one of another shape, CapacityError when memory is
        short. That the two belong together is checked by dspine.files.pairing, not here.
        """
        if isinstance(file, Path):
            file = read_drafter(file)
        if type(file.config) is not cls.config_type:
            raise UsageError(
                f"{file.path} is a {file.config.kind} drafter, not a {cls.config_type.kind} one: "
                "open it with open_drafter"
            )
        embedding, head = target_tensors(target)
        own = {name: host_tensor(tensor) for name, tensor in file.own_tables.items()}
        if OWN_TABLES[0] in own:
            embedding = own[OWN_TABLES[0]]
        if OWN_TABLES[1] in own:
            head = own[OWN_TABLES[1]]
        elif OWN_TABLES[0] in own and file.draft_vocab is None:
            head = own[OWN_TABLES[0]]
        return cls(
            file.config,
            {name: host_tensor(tensor) for name, tensor in file.tensors.items()},
            embedding=embedding,
            head=head,
            n_ctx=n_ctx,
            n_threads=n_threads,
            device=device,
            draft_vocab=file.draft_vocab,
            reduced_head=OWN_TABLES[1] in own,
            cache_type=cache_type,
        )

    # -- the base contract ---------------------------------------------------------------------

    def first_visible(self, anchor_position: int) -> int:
        """First context position that a block anchored at `anchor_position` can see."""
        return 0 if self._window is None else max(0, anchor_position - self._window + 1)

    def covered(self, seq: int) -> int:
        """Context positions up to here are present as far as a block can see them."""
        self._check_open()
        cache = self._caches.get(seq)
        return 0 if cache is None else cache.length

    def first_held(self, seq: int) -> int:
        """First context position that is present; equals `covered(seq)` when none is."""
        self._check_open()
        cache = self._caches.get(seq)
        return 0 if cache is None else cache.start

    def add_context(self, seq: int, position: int, features: Features) -> None:
        """Turn confirmed rows at `position`, `position + 1`, ... into context K/V.

        Rows from `position` on that were present are replaced. With full attention a gap raises
        UsageError here; with windows the rows after a gap are taken as a new beginning, and
        `draft` raises if a block would see into the gap.
        """
        self._check_open()
        if features.ndim != 2 or features.shape[1] != self.config.feature_size:
            raise UsageError(
                f"features have shape {features.shape}, the drafter needs rows of "
                f"{self.config.feature_size} ({len(self.taps)} taps of "
                f"{self.config.target_hidden_size})"
            )
        if not len(features):
            return
        cache = self._cache(seq)
        first = cache.prepare(position, len(features))
        end = position + len(features)
        while first < end:
            size = _chunk(end - first)
            count = min(size, end - first)
            rows = features[first - position : first - position + count]
            self._context_graph(seq, size).run(first, rows)
            first += count

    def draft(
        self,
        seq: int,
        anchor: int,
        width: int,
        draw: Draw | None = None,
        lead: tuple[int, ...] = (),
    ) -> Draft:
        """Propose width - 1 tokens after `anchor`, which sits at position `covered(seq)`, and
        what follows a lead.

        They are the best ones, or picked as `draw` says.
        """
        graph = self._block_graph(seq, anchor, width, lead)
        try:
            return graph.draft(anchor, draw, lead)
        except FloatingPointError as error:
            raise self._spoilt((seq,), error) from error

    def draft_many(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """The same drafts for several sequences, where the kind can do that in one graph.

        Where attention is causal a narrower block is the beginning of the widest one; else only
        blocks of one width are made together.
        """
        groups: dict[int, list[int]] = {}
        for index, ask in enumerate(asks):
            groups.setdefault(0 if all(self.config.causal) else ask.width, []).append(index)
        drafts: dict[int, Draft] = {}
        for group in groups.values():
            together = [asks[index] for index in group]
            drafts.update(zip(group, self._draft_together(together), strict=True))
        return [drafts[index] for index in range(len(asks))]

    def _draft_together(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        if len(asks) == 1 or not self._serves_several:
            return [self.draft(*ask) for ask in asks]
        caches = [self._check_ask(ask.seq, ask.anchor, ask.width, ask.lead) for ask in asks]
        # As many context rows as the longest of them needs.
        rows = max(_padded(cache.used_rows, cache.capacity) for cache in caches)
        seqs = tuple(ask.seq for ask in asks)
        graph = self._graph(seqs, max(ask.width for ask in asks), rows)
        try:
            drafts = graph.draft_all(
                [ask.anchor for ask in asks],
                [ask.draw for ask in asks],
                [ask.lead for ask in asks],
            )
        except FloatingPointError as error:
            raise self._spoilt(seqs, error) from error
        return [_cut(draft, ask) for draft, ask in zip(drafts, asks, strict=True)]

    def _spoilt(self, seqs: Sequence[int], error: FloatingPointError) -> UsageError:
        """One feature that is not a number would spoil every later block: all are forgotten."""
        for seq in seqs:
            self._cache(seq).empty()
        return UsageError(
            f"{error}: the target's features or the drafter's weights are not: copy or make the "
            "drafter's file again"
        )

    def truncate(self, seq: int, length: int) -> None:
        """Forget context positions from `length` on."""
        self._check_open()
        if length < 0:
            raise UsageError(f"length is {length}: it cannot be negative")
        if seq in self._caches:
            self._caches[seq].truncate(length)

    def prepare(self, seq: int, widths: Sequence[int]) -> None:
        """Build the graphs of such blocks over a short context, and of the rows that they give."""
        self._check_open()
        cache = self._cache(seq)
        for count in range(1, max(widths, default=0) + 1):
            self._context_graph(seq, _chunk(count))
        for width in widths:
            self._graph((seq,), width, _padded(1, cache.capacity))

    def save_context(self, seq: int) -> ContextState | None:
        """Copy of the context K/V that is present, None when nothing is."""
        self._check_open()
        cache = self._caches.get(seq)
        if cache is None or cache.start == cache.length:
            return None
        return ContextState(cache.start, cache.length, cache.read())

    def load_context(self, seq: int, state: ContextState) -> bool:
        """Replace the context of `seq`; False, with nothing present, where it does not fit."""
        self._check_open()
        cache = self._cache(seq)
        cache.truncate(0)
        return cache.fill(state.start, state.length, state.data)

    def close(self) -> None:
        """Free graphs, caches, weights and backend; later calls raise ClosedError."""
        if self._closed:
            return
        self._closed = True
        for block in (*self._block_graphs.values(), *self._shared_graphs.values()):
            block.graph.close()
        for context in self._context_graphs.values():
            context.graph.close()
        for cache in self._caches.values():
            cache.close()
        self._weights.store.close()
        self._backend.close()

    # -- beyond the contract -------------------------------------------------------------------

    def draft_trace(self, seq: int, anchor: int, width: int) -> DraftTrace:
        """A draft with hidden states and tables, for comparison with other implementations."""
        return self._block_graph(seq, anchor, width).trace(anchor)

    def set_threads(self, n_threads: int) -> None:
        """CPU threads of the next calls."""
        self._check_open()
        self._backend.set_threads(n_threads)

    def forget(self, seq: int) -> None:
        """Free a sequence's cache and graphs."""
        self._check_open()
        for key in [k for k in self._block_graphs if seq in k[0]]:
            self._block_graphs.pop(key).graph.close()
        for shared_key in [k for k in self._shared_graphs if seq in k[0]]:
            self._shared_graphs.pop(shared_key).graph.close()
        for context_key in [k for k in self._context_graphs if k[0] == seq]:
            self._context_graphs.pop(context_key).graph.close()
        cache = self._caches.pop(seq, None)
        if cache is not None:
            cache.close()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the drafter's own weights (the target's tensors not counted)."""
        self._check_open()
        return self._weights.store.byte_size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the drafter was used after it was closed: open it again")

    def _cache(self, seq: int) -> ContextCache:
        cache = self._caches.get(seq)
        if cache is None:
            if seq < 0:
                raise UsageError(f"sequence {seq} is negative: sequences start at 0")
            cache = ContextCache(self._backend, self.config, self.n_ctx, self._cache_type)
            self._caches[seq] = cache
        return cache

    def _context_graph(self, seq: int, size: int) -> ContextGraph:
        key = (seq, size)
        graph = self._context_graphs.get(key)
        if graph is None:
            graph = ContextGraph(self._backend, self.config, self._weights, self._cache(seq), size)
            self._context_graphs[key] = graph
        return graph

    def _block_graph(self, seq: int, anchor: int, width: int, lead: tuple[int, ...] = ()) -> BlockT:
        cache = self._check_ask(seq, anchor, width, lead)
        rows = _padded(cache.used_rows, cache.capacity)
        return self._graph((seq,), width, rows)

    def _graph(self, seqs: tuple[int, ...], width: int, rows: int) -> BlockT:
        graphs, most = self._block_graphs, _MAX_BLOCK_GRAPHS
        if len(seqs) > 1:
            graphs, most = self._shared_graphs, _MAX_SHARED_GRAPHS
        key = (seqs, width, rows)
        graph = graphs.get(key)
        if graph is None:
            graph = self._make_block([self._caches[seq] for seq in seqs], width, rows)
            graphs[key] = graph
            if len(graphs) > most:
                graphs.popitem(last=False)[1].graph.close()
        else:
            graphs.move_to_end(key)
        return graph

    def _check_ask(self, seq: int, anchor: int, width: int, lead: tuple[int, ...]) -> ContextCache:
        """The sequence's cache; UsageError for a draft that cannot be made of it."""
        self._check_open()
        if not 2 <= width <= self.block_size:
            raise UsageError(f"width is {width}: this drafter drafts 2 to {self.block_size}")
        if not 0 <= anchor < self.config.vocab_size:
            raise UsageError(
                f"anchor {anchor} is outside of the vocabulary of {self.config.vocab_size}: give "
                "a token of its target"
            )
        if lead:
            self._check_lead(lead, width)
        cache = self._cache(seq)
        needed = self.first_visible(cache.length)
        if cache.start > needed:
            raise UsageError(
                f"a block at position {cache.length} sees context from {needed} on, but rows "
                f"before {cache.start} were never added: add them first"
            )
        return cache

    def _check_lead(self, lead: tuple[int, ...], width: int) -> None:
        if not self.follows:
            raise UsageError(
                f"a {self.name} drafter cannot follow a lead: ask it for a draft without one"
            )
        if len(lead) > width - 2:
            raise UsageError(
                f"the lead has {len(lead)} tokens, a block of width {width} has no slot after it: "
                f"give at most {width - 2}"
            )
        if not all(0 <= token < self.config.vocab_size for token in lead):
            raise UsageError(
                f"the lead {lead} goes outside of the vocabulary of {self.config.vocab_size}: "
                "give tokens of its target"
            )


def _cut(draft: Draft, ask: DraftAsk) -> Draft:
    """As much of it as was asked for."""
    led = draft.led and _first(draft.led, ask.width - 1 - len(ask.lead))
    return _first(draft, ask.width - 1)._replace(led=led)


def _first(draft: Draft, count: int) -> Draft:
    """Its first `count` tokens."""
    return Draft(draft.tokens[:count], draft.scores[:count], draft.drawn[:count])


def _chunk(count: int) -> int:
    """Graph size for the next of `count` rows: the smallest that holds them, or the largest."""
    return CHUNKS[min(bisect_left(CHUNKS, count), len(CHUNKS) - 1)]


def _padded(rows: int, capacity: int) -> int:
    """Context rows a graph covers: all where they are few, else `rows` rounded up in steps of a
    quarter of its power of two, so that a growing context meets few graphs. Attention passes over
    what no row holds yet.
    """
    if capacity <= _FEW_ROWS:
        return capacity
    step = max(512, (1 << (rows - 1).bit_length()) // 4)
    return min(-(-rows // step) * step, capacity)
