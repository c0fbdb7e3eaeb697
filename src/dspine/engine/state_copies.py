"""What copies of a recurrent state take here, and whether one for every draft is kept."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from dspine.engine.llama_target import LlamaTarget
from dspine.engine.waiting import Copies
from dspine.errors import CapacityError
from dspine.llama.cache_size import free_state_bytes
from dspine.llama.context import Context
from dspine.llama.model import Model

SHARE = 0.05
"""Of the free memory, snapshots take at most this much where nobody asked for them."""

_TOKENS = (1, 2, 3, 4)
_POSITIONS = 64


@dataclass(frozen=True, slots=True)
class StateCopies:
    """`size` is the bytes of one copy, `times` what making and putting back one takes, `kept`
    how many snapshots the library keeps of as many as there may be drafts, `free` the bytes of
    memory for them (None: unknown).
    """

    size: int
    times: Copies
    kept: int
    free: int | None


def measure_copies(model: Model, drafts: int, *, n_threads: int) -> StateCopies:
    """Of a recurrent target, in small contexts of its own; the best of three times count."""
    saves, restores, free = [], [], free_state_bytes(model)
    with Context(model, n_ctx=_POSITIONS, n_threads=n_threads) as context:
        target = LlamaTarget(context)
        target.decode(_TOKENS, 0, "none")
        target.wait()
        size = context.state.bytes_per_copy(0)
        for _ in range(3):
            started = perf_counter()
            try:
                target.checkpoint()
            except CapacityError:
                # Not even one fits: drafting ends when it is first needed, with that reason.
                return StateCopies(size, Copies(0.0, 0.0), drafts, min(free or 0, size))
            saved = perf_counter()
            target.restore()
            saves.append((saved - started) * 1000.0)
            restores.append((perf_counter() - saved) * 1000.0)
    kept = 0
    if drafts:
        with Context(
            model, n_ctx=drafts + _POSITIONS, n_threads=n_threads, snapshots=drafts
        ) as context:
            kept = context.snapshots
    return StateCopies(size, Copies(min(saves), min(restores)), kept, free)


def snapshots_or_not(
    copies: StateCopies, drafts: int, n_batch: int, sequences: int = 1
) -> tuple[bool, str]:
    """Whether to keep a snapshot for each of `drafts` drafts, and the reason in words.

    Every sequence has snapshots of its own.

    Snapshots spare the copies and the repeated rows of a checkpoint, for memory that is taken all
    the time: so where they are small beside what is free, and not where that is unknown.
    """
    if not drafts:
        return False, "nothing is drafted"
    if copies.kept < drafts:
        return False, "this library keeps no snapshots of this architecture"
    if n_batch < drafts + 2:
        return False, f"{drafts} snapshots need batches of {drafts + 2} tokens (-b)"
    needed = drafts * copies.size * sequences
    each = f" for each of {sequences} slots" if sequences > 1 else ""
    told = f"{drafts} snapshots{each} take {needed / 2**20:.1f} MiB"
    if copies.free is None:
        return False, f"{told}, and how much memory is free is unknown"
    fits = needed <= SHARE * copies.free
    word = "at most" if fits else "more than"
    return fits, f"{told}, {word} {SHARE:.0%} of the {copies.free / 2**20:.0f} MiB that are free"
