"""Answers for a pair: memory and largest context of each way to run it, and what would help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dspine.files.schema import tensor_specs
from dspine.plan.geometry import Geometry, Weight
from dspine.plan.largest import Advice, Budget, advise, largest_context, require_room
from dspine.plan.memory import DrafterGeometry, MemoryPlan, Mode, Setup, plan_memory
from dspine.plan.mixes import mixed_types
from dspine.plan.presets import drafter_preset

QUANT_STEPS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k")
"""Mixes worth naming as the next smaller one."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "weights": ("target's weights",),
    "drafter": ("drafter's weights", "drafter's context", "drafter's graphs"),
    "cache": ("keys and values",),
    "states": ("recurrent state", "copies for rollback", "states of earlier turns"),
    "buffers": ("compute buffers", "logits", "taps"),
    "other": ("program and tokenizer", "n-gram table", "driver and reserve"),
}
"""Columns of the table, and the items that each adds up."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked. `setup` is the plain one; `drafts` None is each drafter's whole block."""

    target: Geometry
    drafters: tuple[DrafterGeometry, ...]
    setup: Setup
    budget: Budget
    rollback: str = "auto"
    drafts: int | None = None
    n_ctx: int | None = None
    """A context to plan for, beside the largest one."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to run the pair."""

    label: str
    setup: Setup
    context: int
    """The largest that fits, 0 when none does."""
    plan: MemoryPlan
    """At the context that was asked for, else at the largest (or the smallest, if none fits)."""
    fits: bool
    advice: tuple[Advice, ...]


def answer(question: Question) -> list[Row]:
    """A row for plain decoding and for each drafter and way of rolling back.

    CapacityError when not even plain decoding fits the budget.
    """
    q = question
    require_room(q.target, None, q.setup, q.budget)
    rows = [_row(q, "plain", None, q.setup)]
    for drafter in q.drafters:
        most = drafter.config.block_size - 1
        drafts = most if q.drafts is None else min(q.drafts, most)
        for mode in _modes(q):
            setup = replace(q.setup, mode=mode, drafts=drafts)
            label = f"{drafter.config.kind}, {drafts} drafts"
            rows.append(_row(q, label if mode == "trim" else f"{label}, {mode}", drafter, setup))
    return rows


def preset_drafter(name: str, quant: str) -> DrafterGeometry:
    """A published drafter in one of llama.cpp's mixes; UsageError for an unknown name or mix."""
    config = drafter_preset(name)
    shapes = [(spec.gguf_name, spec.shape[::-1]) for spec in tensor_specs(config)]
    types = mixed_types(shapes, quant, gqa=config.num_heads // config.num_kv_heads, tied=False)
    weights = tuple(Weight(n, kind, ne) for (n, ne), kind in zip(shapes, types, strict=True))
    return DrafterGeometry(f"{name} {quant.upper()}", config, weights)


def smaller_target(target: Geometry) -> tuple[str, Geometry] | None:
    """The target in the next of QUANT_STEPS that is at least a tenth smaller: (mix, geometry)."""
    shapes = [(w.name, w.ne) for w in target.weights]
    keys = max((layer.keys for layer in target.layers), default=0)
    head = keys and max(1, target.queries // max(1, target.heads))
    gqa = max(1, target.heads * head // keys) if keys else 1
    for quant in QUANT_STEPS:
        types = mixed_types(shapes, quant, gqa=gqa)
        weights = tuple(Weight(n, kind, ne) for (n, ne), kind in zip(shapes, types, strict=True))
        if sum(w.n_bytes for w in weights) < 0.9 * target.weight_bytes:
            return quant, replace(target, weights=weights)
    return None


def grouped(plan: MemoryPlan, device: str) -> dict[str, int]:
    """Bytes on a device by column."""
    known = {label: group for group, labels in GROUPS.items() for label in labels}
    sums = dict.fromkeys(GROUPS, 0)
    for item in plan.items:
        if item.device == device:
            sums[known[item.label]] += item.n_bytes
    return sums


def parameters(target: Geometry | DrafterGeometry) -> int:
    """Number of values in all weights."""
    return sum(math.prod(weight.ne) for weight in target.weights)


def _modes(q: Question) -> Sequence[Mode]:
    if not q.target.state_bytes:
        return ("trim",)
    if q.rollback == "snapshots":
        return ("snapshots",)
    if q.rollback == "checkpoint":
        return ("checkpoint",)
    return ("snapshots", "checkpoint")


def _row(q: Question, label: str, drafter: DrafterGeometry | None, setup: Setup) -> Row:
    largest = largest_context(q.target, drafter, setup, q.budget)
    shown = q.n_ctx or largest or 256
    plan = plan_memory(q.target, drafter, setup, shown)
    advice = advise(q.target, drafter, setup, q.budget, smaller_target(q.target))
    limit = q.target.context_train
    enough = limit and largest >= limit // 256 * 256
    return Row(label, setup, largest, plan, q.budget.holds(plan), () if enough else tuple(advice))
