"""Times the target for n rows at once: the number that decides how wide a block may be."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from dspine.errors import CapacityError, UsageError
from dspine.llama.batch import Batch
from dspine.llama.checks import require_count
from dspine.llama.context import Context
from dspine.llama.model import Model

ROWS = (1, 2, 4, 8, 16)
DEPTH = 256


def measure_rows(
    context: Context,
    rows: Sequence[int] = ROWS,
    depth: int = DEPTH,
    repeats: int = 5,
) -> dict[int, float]:
    """Median milliseconds of one decode of n rows (logits for each) after `depth` tokens.

    The counts are timed in turn, `repeats` times over, so that a disturbance of the machine does
    not fall on one of them; the arg-max of every row is part of the time, as in a verify. Uses
    and clears the whole memory of the context. Raises CapacityError when the context is too
    small for `depth` and the largest count.
    """
    require_count("repeats", repeats)
    require_count("depth", depth)
    counts = sorted(set(rows))
    if not counts:
        raise UsageError("rows is empty: name the row counts to measure")
    require_count("rows", counts[0])
    if depth + counts[-1] > context.n_ctx or counts[-1] > context.n_batch:
        raise CapacityError(
            f"{counts[-1]} rows after {depth} tokens do not fit a context of {context.n_ctx} "
            f"tokens that decodes {context.n_batch} rows at once"
        )
    batch = Batch(context.n_batch)
    memory, state = context.memory, context.state
    tokens = _sample_tokens(context.model, depth + counts[-1])
    memory.clear()
    for start in range(0, depth, context.n_batch):
        batch.clear()
        batch.add_tokens(tokens[start : min(start + context.n_batch, depth)], start, logits="none")
        context.decode(batch)
    state.checkpoint(0)
    times: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(repeats + 1):
        for count in counts:
            batch.clear()
            batch.add_tokens(tokens[depth : depth + count], depth)
            began = time.perf_counter()
            context.decode(batch)
            for row in range(count):
                context.argmax(row)
            spent = time.perf_counter() - began
            if turn:  # the first turn builds graphs and wakes threads
                times[count].append(spent * 1000)
            state.restore(0)
    memory.clear()
    return {count: statistics.median(times[count]) for count in counts}


def measure_flash_attention(
    model: Model,
    *,
    rows: Sequence[int] = ROWS,
    depth: int = DEPTH,
    repeats: int = 5,
    n_threads: int | None = None,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
) -> dict[bool, dict[int, float]]:
    """`measure_rows` without (False) and with (True) flash attention, on contexts of its own.

    Without it is left out where the cache type needs flash attention.
    """
    quantised = cache_type_v not in ("f32", "f16", "bf16")
    found = {}
    for flash_attention in (True,) if quantised else (False, True):
        with Context(
            model,
            n_ctx=min(model.context_train, depth + max(rows, default=1)),
            n_threads=n_threads,
            flash_attention=flash_attention,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            max_outputs=max(rows, default=1),
        ) as context:
            found[flash_attention] = measure_rows(context, rows, depth, repeats)
    return found


def _sample_tokens(model: Model, count: int) -> list[int]:
    """`count` different ordinary tokens, the same on every run (contents hardly matter)."""
    step = max(1, model.vocab_size // (count + 1))
    return [index * step % model.vocab_size for index in range(1, count + 1)]
