"""The memory of a target, its caches, a drafter and their buffers, item by item and by device.

Every rule is llama.cpp's or this package's own, and stands beside its formula. Nothing is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dspine.files.schema import DrafterConfig
from dspine.ggml.types import choosing_type, type_by_name
from dspine.plan.geometry import Geometry, Layer, Weight
from dspine.plan.packing import Kernels, copied_bytes, host_weights, is_product, packed_bytes

Device = Literal["gpu", "cpu"]
Mode = Literal["plain", "trim", "checkpoint", "snapshots"]

PADDING = 256
"""llama.cpp rounds the positions of every cache up to a multiple of this."""

MOST_ROWS = 16
"""Rows of the widest verify without a drafter, and waiting rows that a checkpoint adds at most."""

HELD_STATES = 2
"""Recurrent states of earlier positions that one answer keeps in main memory: around the end of its
prompt."""

PROGRAM_BYTES = 61 << 20
"""Python, NumPy, the libraries and the engine's own objects, measured on Linux."""

TOKEN_BYTES, MERGE_BYTES = 282, 235
"""Memory of the tokenizer for each token and each merge, measured on Linux."""

TABLE_ENTRY_BYTES, HASHED_ENTRY_BYTES = 13, 32
"""Of the n-gram table as it is read, and of the kernels' copy, half of whose places are free."""

MEASURED_CONTEXT = 528
"""Positions of the context that is measured at the start."""

_CONTEXT_ROWS = 554
"""Rows of all the drafter's context graphs together: one graph for each number of rows."""

_RING_SLACK, _RING_ALIGN = 128, 32
"""The drafter's ring of context rows, as `dspine.drafters.dspine.context` makes it."""


@dataclass(frozen=True, slots=True)
class DrafterGeometry:
    """A drafter, as far as memory is concerned."""

    name: str
    config: DrafterConfig
    weights: tuple[Weight, ...]
    file_bytes: int = 0
    """Size of its file, which is mapped while it is read; 0 without one."""
    table_entries: int = 0
    """Of the n-gram table beside it."""

    @property
    def weight_bytes(self) -> int:
        return sum(weight.n_bytes for weight in self.weights)


@dataclass(frozen=True, slots=True)
class Setup:
    """How the pair is to run. `drafts` a step; `n_gpu_layers` as -ngl, -1 is all of them."""

    mode: Mode
    drafts: int = 0
    n_batch: int = 512
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    slots: int = 1
    n_gpu_layers: int = 0
    drafter_on_gpu: bool = False
    measured: bool = True
    """The machine is measured at the start (not with --no-calibrate)."""
    adaptive: bool = False
    """The width is chosen at each step, so that the drafter has a graph for each."""
    flash_attention: bool = True
    swa_full: bool = False
    kernels: Kernels = "ggml"
    reserve_bytes: int = 0
    """Kept free on the graphics card, for its driver and whatever else is there."""


_LATE = (
    "compute buffers",
    "logits",
    "taps",
    "copies for rollback",
    "states of earlier turns",
    "drafter's graphs",
)
"""What is filled by the first answer only, after the peak of loading."""


@dataclass(frozen=True, slots=True)
class Item:
    """One use of memory."""

    label: str
    device: Device
    n_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All of it for one setup and one context."""

    n_ctx: int
    items: tuple[Item, ...]
    loading_bytes: int
    """In main memory while the drafter is loaded, beside what stays."""
    reading_bytes: int
    """In main memory while the target is read or the machine is measured, before there are caches:
    weights, and the file that they are packed from or the short context that is measured."""

    def total(self, device: Device) -> int:
        """Bytes on a device while an answer is made."""
        return sum(item.n_bytes for item in self.items if item.device == device)

    @property
    def peak_host(self) -> int:
        """The most that the process ever has in main memory."""
        early = sum(
            item.n_bytes for item in self.items if item.device == "cpu" and item.label not in _LATE
        )
        return max(self.total("cpu"), early + self.loading_bytes, self.reading_bytes)


def plan_memory(
    target: Geometry, drafter: DrafterGeometry | None, setup: Setup, n_ctx: int
) -> MemoryPlan:
    """The memory of a context of `n_ctx` positions for each slot."""
    items = [
        *_weights(target, setup),
        *_caches(target, setup, n_ctx),
        *_states(target, setup),
        *_buffers(target, drafter, setup, n_ctx),
    ]
    loading = 0
    if drafter is not None and setup.mode != "plain":
        items += _drafter(target, drafter, setup, n_ctx)
        entry = TABLE_ENTRY_BYTES + (HASHED_ENTRY_BYTES if setup.kernels == "dspine" else 0)
        items.append(Item("n-gram table", "cpu", drafter.table_entries * entry))
        # The head's rows lie there as the target has them while they are made coarser.
        types = {_head(target).type_name, _kept_head_type(target, setup)}
        loading = drafter.file_bytes + sum(_reduced_head(target, drafter, kind) for kind in types)
    tokenizer = target.vocabulary * TOKEN_BYTES + target.merges * MERGE_BYTES
    items.append(Item("program and tokenizer", "cpu", PROGRAM_BYTES + tokenizer))
    if setup.n_gpu_layers and setup.reserve_bytes:
        items.append(Item("driver and reserve", "gpu", setup.reserve_bytes))
    known = ("target's weights", "program and tokenizer", "drafter's weights")
    sizes = {i.label: i.n_bytes for i in items if i.device == "cpu" and i.label in known}
    weights = sizes.get(known[0], 0) + sizes[known[1]]
    measuring = weights + sizes.get(known[2], 0) + loading
    measuring += _measuring(target, drafter, setup, n_ctx) if setup.measured else 0
    # The mapped file is given back when its weights are packed.
    mapped = setup.kernels == "dspine" and not setup.n_gpu_layers
    reading = weights + (target.weight_bytes if mapped else 0)
    reading = max(reading, measuring)
    return MemoryPlan(n_ctx, tuple(item for item in items if item.n_bytes), loading, reading)


def on_gpu(target: Geometry, setup: Setup, layer: int) -> bool:
    """Whether a layer lies on the graphics card: the last ones do, the output counting as one."""
    count = target.block_count + 1
    wanted = count if setup.n_gpu_layers < 0 else min(setup.n_gpu_layers, count)
    return layer >= count - wanted


def cache_positions(layer: Layer, setup: Setup, n_ctx: int) -> int:
    """Positions that a layer's cache has for one slot.

    A window is kept once, with room for a batch: n_swa + n_ubatch, rounded up to 256.
    """
    whole = _padded(n_ctx)
    if not layer.window or setup.swa_full:
        return whole
    return min(whole, _padded(min(whole, layer.window + min(setup.n_batch, n_ctx))))


def planes(setup: Setup) -> int:
    """Copies of the recurrent state of one slot: with snapshots one for each draft and the present
    one, with a checkpoint the present one and the saved one.
    """
    match setup.mode:
        case "snapshots":
            return 1 + setup.drafts
        case "checkpoint":
            return 2
    return 1


def output_rows(setup: Setup) -> int:
    """Rows with logits in one decode, for all slots together."""
    if setup.mode == "plain":
        return setup.slots
    waiting = MOST_ROWS if setup.mode == "checkpoint" else 0
    return setup.slots * (max(MOST_ROWS, setup.drafts + 1) + waiting)


def _weights(target: Geometry, setup: Setup) -> Iterator[Item]:
    """The embedding is looked up on the CPU, whatever -ngl says; a tied head is a second copy."""
    card: list[Weight] = []
    host: list[Weight] = []
    for weight in target.weights:
        if weight.name == "token_embd.weight":
            host.append(weight)
        elif weight.layer is None:
            (card if setup.n_gpu_layers else host).append(weight)
        else:
            (card if on_gpu(target, setup, weight.layer) else host).append(weight)
    on_card = sum(weight.n_bytes for weight in card)
    if setup.n_gpu_layers and target.is_tied:
        on_card += next(w.n_bytes for w in target.weights if w.name == "token_embd.weight")
    yield Item("target's weights", "gpu", on_card)
    kernels: Kernels = setup.kernels if not setup.n_gpu_layers else "ggml"
    tied = target.is_tied and not setup.n_gpu_layers
    yield Item("target's weights", "cpu", host_weights(host, kernels, tied_head=tied).n_bytes)


def _caches(target: Geometry, setup: Setup, n_ctx: int) -> Iterator[Item]:
    sizes: dict[Device, int] = {"gpu": 0, "cpu": 0}
    for index, layer in enumerate(target.layers):
        positions = cache_positions(layer, setup, n_ctx)
        one = _row(setup.cache_type_k, layer.keys) + _row(setup.cache_type_v, layer.values)
        device: Device = "gpu" if on_gpu(target, setup, index) else "cpu"
        sizes[device] += positions * one * setup.slots
    for device, size in sizes.items():
        yield Item("keys and values", device, size)


def _states(target: Geometry, setup: Setup) -> Iterator[Item]:
    sizes: dict[Device, int] = {"gpu": 0, "cpu": 0}
    for index, layer in enumerate(target.layers):
        device: Device = "gpu" if on_gpu(target, setup, index) else "cpu"
        sizes[device] += 4 * layer.state * setup.slots
    for device, size in sizes.items():
        yield Item("recurrent state", device, size)
        yield Item("copies for rollback", device, size * (planes(setup) - 1))
    yield Item("states of earlier turns", "cpu", HELD_STATES * target.state_bytes * setup.slots)


def _buffers(
    target: Geometry, drafter: DrafterGeometry | None, setup: Setup, n_ctx: int
) -> Iterator[Item]:
    rows = output_rows(setup)
    batch = min(setup.n_batch, n_ctx * setup.slots)
    taps = 0 if drafter is None or setup.mode == "plain" else len(drafter.config.taps)
    size = compute_bytes(target, setup, n_ctx, taps=taps)
    yield Item("compute buffers", "gpu" if setup.n_gpu_layers else "cpu", size)
    if setup.n_gpu_layers:
        some = any(not on_gpu(target, setup, index) for index in range(len(target.layers)))
        host = size if some else 4 * batch * target.hidden
        yield Item("compute buffers", "cpu", host)
    yield Item("logits", "cpu", 4 * rows * target.vocabulary)
    # Once in llama.cpp's buffers, once on their way to the drafter.
    yield Item("taps", "cpu", 2 * 4 * taps * batch * target.hidden)


def compute_bytes(target: Geometry, setup: Setup, n_ctx: int, *, taps: int = 0) -> int:
    """What llama.cpp reserves for intermediate results: the largest of its steps.

    For u rows at once (a batch, at most the context), with 32-bit numbers: the feed-forward part
    holds three times its inner width and four times the hidden size of each row; a recurrent layer
    `recurrent_width`; attention without flash attention a score of each head for each position;
    the head logits of the rows that have them and twice their hidden size. The mask of attention
    (16 bits with flash attention, else 32) and the taps lie beside them.
    """
    rows, hidden = min(setup.n_batch, n_ctx * setup.slots), target.hidden
    positions = _padded(n_ctx)
    widths = [3 * target.feed_forward + 4 * hidden, target.recurrent_width]
    mask = rows * positions * (2 if setup.flash_attention else 4)
    windows = {layer.window for layer in target.layers if layer.window and not setup.swa_full}
    mask += sum(
        rows * cache_positions(Layer(window=w), setup, n_ctx) * (2 if setup.flash_attention else 4)
        for w in windows
    )
    if not setup.flash_attention and any(layer.keys for layer in target.layers):
        widths.append(target.heads * positions + 3 * target.queries + 2 * hidden)
    outputs = min(output_rows(setup), rows)
    logits = 4 * outputs * (target.vocabulary + 2 * hidden)
    return max(4 * rows * max(widths), logits) + mask + 4 * rows * taps * hidden


def _drafter(
    target: Geometry, drafter: DrafterGeometry, setup: Setup, n_ctx: int
) -> Iterator[Item]:
    config = drafter.config
    device: Device = "gpu" if setup.drafter_on_gpu else "cpu"
    packs = setup.kernels == "dspine" and device == "cpu"
    size = 0
    for weight in drafter.weights:
        packed = packed_bytes(weight.type_name, weight.ne) if packs and is_product(weight) else None
        size += weight.n_bytes if packed is None else packed
    choices = config.draft_vocab_size or config.vocab_size
    size += _reduced_head(target, drafter, _kept_head_type(target, setup))
    if setup.n_gpu_layers:
        elsewhere = config.draft_vocab_size is None
    else:
        elsewhere = copied_bytes(_head(target), setup.kernels) > 0
    if device == "cpu" and elsewhere:
        size += _head(target).n_bytes  # the target's own is on the card, or not readable
    yield Item("drafter's weights", device, size)
    yield Item("drafter's context", device, setup.slots * drafter_context_bytes(config, n_ctx))
    widths = range(2 if setup.adaptive else setup.drafts + 1, setup.drafts + 2)
    # Logits and their order for each slot of a width, and the features of the context graphs.
    graphs = sum(8 * choices * width for width in widths)
    graphs += 4 * _CONTEXT_ROWS * (config.feature_size + 2 * config.hidden_size)
    yield Item("drafter's graphs", device, graphs)


def _head(target: Geometry) -> Weight:
    named = {weight.name: weight for weight in target.weights}
    return named.get("output.weight") or named["token_embd.weight"]


def _kept_head_type(target: Geometry, setup: Setup) -> str:
    """Of a copy of the head's rows, once it is loaded."""
    head = _head(target)
    if setup.drafter_on_gpu:
        return head.type_name
    return choosing_type(head.type_name, head.ne[0])


def _reduced_head(target: Geometry, drafter: DrafterGeometry, type_name: str) -> int:
    """A copy of the head's rows for a reduced vocabulary; 0 with the full one."""
    rows = drafter.config.draft_vocab_size
    return 0 if rows is None else type_by_name(type_name).row_bytes(_head(target).ne[0]) * rows


def _measuring(target: Geometry, drafter: DrafterGeometry | None, setup: Setup, n_ctx: int) -> int:
    """Main memory of the short context on which the machine is measured at the start."""
    if setup.n_gpu_layers:
        return 0
    mode: Mode = "checkpoint" if target.state_bytes else "trim"
    short = replace(setup, mode=mode, slots=1, n_batch=min(512, setup.n_batch))
    context = min(n_ctx, MEASURED_CONTEXT)
    items = [
        *_caches(target, short, context),
        *_states(target, short),
        *_buffers(target, drafter, short, context),
    ]
    return sum(item.n_bytes for item in items if item.label != "states of earlier turns")


def drafter_context_bytes(config: DrafterConfig, n_ctx: int) -> int:
    """Keys and values of one slot, 16 bits each: of the largest window, where all layers have one,
    with slack for going back, else of the whole context; and of a block.
    """
    window = config.context_window
    rows = n_ctx if window is None else min(n_ctx, window - 1 + max(_RING_SLACK, window // 4))
    block = math.ceil(config.block_size / _RING_ALIGN) * _RING_ALIGN
    rows = block + math.ceil(rows / _RING_ALIGN) * _RING_ALIGN + 1
    return rows * config.num_layers * 2 * config.num_kv_heads * config.head_dim * 2


def _row(cache_type: str, numbers: int) -> int:
    return type_by_name(cache_type).row_bytes(numbers) if numbers else 0


def _padded(positions: int) -> int:
    return math.ceil(positions / PADDING) * PADDING
