"""The largest context that fits a budget, and what would make it larger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dspine.errors import CapacityError
from dspine.ggml.types import type_by_name
from dspine.plan.geometry import Geometry
from dspine.plan.memory import PADDING, DrafterGeometry, MemoryPlan, Setup, plan_memory
from dspine.plan.sizes import shown

UNKNOWN_CONTEXT = 1 << 17
"""Positions taken for a target whose file does not say how many it was trained for."""

RESERVE_SHARE = 0.133
"""Share of a graphics card that is not the plan's: driver, buffers of its kernels, the desktop.

Calibrated on three published contexts of Qwen3.8-27B Q4_K_M on a card of 24 GiB (plain, with
DFlash2 and with DSpine), which leave 3.2 GiB over; see docs/planner.md.
"""

_SMALLER_CACHES = ("q8_0", "q4_0")
_BLOCK, _SMALL_BATCH = 256, 128


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes that may be used; None where nothing is known or nothing is needed."""

    gpu: int | None
    cpu: int | None

    def holds(self, plan: MemoryPlan) -> bool:
        return self.missing(plan) is None

    def missing(self, plan: MemoryPlan) -> tuple[str, int, int] | None:
        """(device, needed, given) of the first budget that a plan exceeds."""
        if self.gpu is not None and plan.total("gpu") > self.gpu:
            return "gpu", plan.total("gpu"), self.gpu
        if self.cpu is not None and plan.peak_host > self.cpu:
            return "cpu", plan.peak_host, self.cpu
        return None


@dataclass(frozen=True, slots=True)
class Advice:
    """A change and the largest context with it."""

    change: str
    flags: str
    context: int


def largest_context(
    target: Geometry, drafter: DrafterGeometry | None, setup: Setup, budget: Budget
) -> int:
    """The most positions, in steps of 256 and at most what the target was trained for, that fit;
    0 when not even the smallest context does.
    """
    limit = target.context_train or UNKNOWN_CONTEXT
    low, high = 0, max(1, limit // PADDING)
    while low < high:
        middle = (low + high + 1) // 2
        if budget.holds(plan_memory(target, drafter, setup, middle * PADDING)):
            low = middle
        else:
            high = middle - 1
    return low * PADDING


def require_room(
    target: Geometry, drafter: DrafterGeometry | None, setup: Setup, budget: Budget
) -> None:
    """CapacityError when a budget does not hold the weights and the smallest context."""
    missing = budget.missing(plan_memory(target, drafter, setup, PADDING))
    if missing is None:
        return
    device, needed, given = missing
    flag, where, remedy = (
        ("--vram", "on the graphics card", "keep fewer layers there (-ngl) or quantise it further")
        if device == "gpu"
        else ("--ram", "in main memory", "quantise it further")
    )
    raise CapacityError(
        f"{target.name} needs {shown(needed)} {where} with the smallest context of {PADDING} "
        f"tokens, and {flag} is {shown(given)}: {remedy}"
    )


def advise(
    target: Geometry,
    drafter: DrafterGeometry | None,
    setup: Setup,
    budget: Budget,
    smaller: tuple[str, Geometry] | None = None,
) -> Iterator[Advice]:
    """Changes that give a larger context, each alone, with the context that it gives.

    `smaller` is the target in the next smaller quantisation: its name and geometry.
    """
    now = largest_context(target, drafter, setup, budget)
    changes = [(change, flags, target, changed) for change, flags, changed in _changes(setup)]
    if smaller is not None:
        name = smaller[0].upper()
        changes.append((f"the target in {name}", f"--quant {name}", smaller[1], setup))
    for change, flags, changed_target, changed in changes:
        context = largest_context(changed_target, drafter, changed, budget)
        if context > now:
            yield Advice(change, flags, context)


def _changes(setup: Setup) -> Iterator[tuple[str, str, Setup]]:
    """(what changes, its flags, the changed setup)."""
    if setup.mode == "snapshots":
        changed = replace(setup, mode="checkpoint")
        yield "checkpoint instead of snapshots", "--rollback checkpoint", changed
        if fewer := setup.drafts // 2:
            text = f"{fewer} drafts instead of {setup.drafts}"
            yield text, f"--spec-draft-n-max {fewer}", replace(setup, drafts=fewer)
    for kind in _SMALLER_CACHES:
        sizes = [type_by_name(kind).row_bytes(_BLOCK)]
        sizes += [
            type_by_name(t).row_bytes(_BLOCK) for t in (setup.cache_type_k, setup.cache_type_v)
        ]
        if sizes[0] < max(sizes):
            changed = replace(setup, cache_type_k=kind, cache_type_v=kind)
            yield f"keys and values in {kind}", f"-ctk {kind} -ctv {kind}", changed
    if setup.slots > 1:
        yield "one slot", "--parallel 1", replace(setup, slots=1)
    if setup.n_batch > _SMALL_BATCH:
        changed = replace(setup, n_batch=_SMALL_BATCH)
        yield f"prompt batches of {_SMALL_BATCH}", f"-b {_SMALL_BATCH}", changed
