"""Random products, attentions and decodes with the CPU kernels: do rows depend on their batch? And
random lookups and choices of the largest values: do they find what those of Python find?

    python -m tests.support.native_random products|attention|lookups|top_k|rows_of_top_k KERNELS \
        LIBRARY_FOLDER SEED COUNT
    python -m tests.support.native_random model TARGET SEED COUNT

prints the cases that differ, as one JSON list of sentences that is empty when all is well.
Cases are drawn from SEED alone.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dspine.ggml import Backend, Graph, HostTensor, WeightStore, kernels, library
from dspine.ggml.tensor import Tensor
from dspine.ggml.types import type_by_name
from dspine.kernels.selftest import TYPES, product
from tests.support import native_top_k
from tests.support.native_lookups import random_differences

Floats = npt.NDArray[np.float32]
MOST_THREADS = 4
CACHES = ("f16", "bf16", "f32")
MOST_TOKENS = 600


def main(arguments: list[str]) -> int:
    seed, count = (int(text) for text in arguments[-2:])
    rng = np.random.default_rng(seed)
    if arguments[0] == "model":
        found = list(models(Path(arguments[1]), rng, count))
    elif arguments[0] == "lookups":
        found = list(random_differences(ctypes.CDLL(arguments[1]), rng, count))
    elif arguments[0] == "top_k":
        found = list(native_top_k.differences(ctypes.CDLL(arguments[1]), rng, count))
    else:
        library.load(Path(arguments[2]))
        plug_in = kernels.install(Path(arguments[1]))
        with ExitStack() as stack:
            backends = [
                stack.enter_context(Backend(n_threads=1 + index)) for index in range(MOST_THREADS)
            ]
            cases = {
                "products": products,
                "attention": attentions,
                "rows_of_top_k": native_top_k.operations,
            }[arguments[0]]
            found = list(cases(plug_in, backends, rng, count))
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def products(
    plug_in: kernels.Kernels, backends: list[Backend], rng: np.random.Generator, count: int
) -> Iterator[str]:
    """`count` matrices of each type, each with rows in two partitions of two thread counts."""
    for type_name in TYPES:
        block = type_by_name(type_name).block
        for _ in range(count):
            inputs = block * int(rng.integers(1, 1 + max(2, 1024 // block)))
            outputs, rows = int(rng.integers(1, 90)), int(rng.integers(1, 40))
            if not plug_in.takes(type_name, (inputs, outputs)):
                yield f"{type_name} {inputs} x {outputs} is not taken"
                continue
            values = rng.standard_normal((outputs, inputs), dtype=np.float32)
            weight = HostTensor.quantised(values, type_name)
            x = rng.standard_normal((rows, inputs), dtype=np.float32)
            x *= np.exp(rng.uniform(-8, 8, (rows, 1))).astype(np.float32)
            results = []
            for sizes in (_partition(rng, rows), _partition(rng, rows)):
                backend = backends[rng.integers(MOST_THREADS)]
                parts = [product(backend, plug_in, weight, part) for part in _cut(x, sizes)]
                results.append((sizes, np.concatenate(parts)))
            (first, one), (second, other) = results
            if not np.array_equal(one, other):
                yield f"{type_name} {inputs} x {outputs}: {first} and {second} rows differ"


def attentions(
    plug_in: kernels.Kernels, backends: list[Backend], rng: np.random.Generator, count: int
) -> Iterator[str]:
    """`count` attentions of each cache type; a second time with other batches, threads and unused
    cells of the cache behind the last.
    """
    plug_in.take_attention(True)
    for cache in CACHES:
        for _ in range(count):
            shared, kv_heads = int(rng.integers(1, 10)), int(rng.integers(1, 4))
            rows, keys = int(rng.integers(1, 40)), int(rng.integers(1, 1500))
            width, value_width = (8 * int(n) for n in rng.integers(1, 33, 2))
            q = rng.standard_normal((shared * kv_heads, rows, width), dtype=np.float32)
            k = rng.standard_normal((kv_heads, keys, width), dtype=np.float32)
            v = rng.standard_normal((kv_heads, keys, value_width), dtype=np.float32)
            mask = _mask(rng, rows, keys)
            results = []
            for unused in (0, int(rng.integers(0, 300))):
                backend, sizes = backends[rng.integers(MOST_THREADS)], _partition(rng, rows)
                keys_now, values_now = _with_unused(k, unused), _with_unused(v, unused)
                seen = np.pad(mask, ((0, 0), (0, unused)), constant_values=-np.inf)
                parts, start = [], 0
                for size in sizes:
                    at = slice(start, start + size)
                    parts.append(
                        _attention(
                            backend,
                            cache,
                            np.ascontiguousarray(q[:, at]),
                            keys_now,
                            values_now,
                            seen[at],
                        )
                    )
                    start += size
                results.append((sizes, np.concatenate(parts)))
            (first, one), (second, other) = results
            if not (np.isfinite(one).all() and np.array_equal(one, other)):
                yield (
                    f"{cache}, {kv_heads} x {shared} heads, {width} and {value_width} wide, "
                    f"{keys} keys: {first} and {second} rows differ"
                )


def models(target: Path, rng: np.random.Generator, count: int) -> Iterator[str]:
    """`count` texts up to MOST_TOKENS long, each decoded in two random partitions with random
    thread counts; logits of the last rows must agree.
    """
    from dspine.llama.batch import Batch
    from dspine.llama.context import Context
    from dspine.llama.model import Model

    compared = 16
    with ExitStack() as stack:
        model = stack.enter_context(Model.load(target))
        if not model.library.kernels.active:
            yield f"not our kernels: {model.library.kernels.text}"
            return
        context = stack.enter_context(
            Context(
                model,
                n_ctx=MOST_TOKENS,
                n_threads=1,
                flash_attention=True,
                max_outputs=compared,
            )
        )
        batch = Batch(context.n_batch)
        for _ in range(count):
            length = int(rng.integers(compared + 1, MOST_TOKENS))
            tokens = rng.integers(0, model.vocab_size, length).tolist()
            results = []
            for _ in range(2):
                context.memory.clear()
                context.set_threads(int(rng.integers(1, 3)))
                head = length - compared
                sizes = [*_partition(rng, head, 256), *_partition(rng, compared)]
                start, logits = 0, []
                for size in sizes:
                    batch.clear()
                    wanted = start >= head
                    batch.add_tokens(
                        tokens[start : start + size], start, 0, "all" if wanted else "none"
                    )
                    context.decode(batch)
                    if wanted:
                        logits += [context.logits(row).copy() for row in range(size)]
                    start += size
                results.append((sizes, np.array(logits)))
            (first, one), (second, other) = results
            if not np.array_equal(one, other):
                yield f"{length} tokens: the logits of {first} and {second} rows differ"


def _partition(rng: np.random.Generator, rows: int, most: int = 40) -> list[int]:
    """Random batch sizes that add up to `rows`, small ones as often as large ones."""
    sizes: list[int] = []
    while (left := rows - sum(sizes)) > 0:
        size = int(np.exp(rng.uniform(0, np.log(most + 1))))
        sizes.append(min(left, max(1, size)))
    return sizes


def _cut(x: Floats, sizes: list[int]) -> list[Floats]:
    return [np.ascontiguousarray(part) for part in np.split(x, np.cumsum(sizes)[:-1])]


def _mask(rng: np.random.Generator, rows: int, keys: int) -> npt.NDArray[np.float16]:
    """Causal, with a sliding window for half of the cases and holes for a third."""
    at = np.arange(keys)[None, :]
    last = np.maximum(0, keys - rows + np.arange(rows))[:, None]
    hidden = at > last
    if rng.random() < 0.5:
        hidden |= at < last - int(rng.integers(1, 400))
    if rng.random() < 0.3:
        hidden |= (rng.random((1, keys)) < 0.5) & (at != last)
    return np.where(hidden, -np.inf, 0.0).astype(np.float16)


def _with_unused(cells: Floats, count: int) -> Floats:
    """`count` more cells with values that nobody may see."""
    return np.pad(cells, ((0, 0), (0, count), (0, 0)), constant_values=7.0)


def _attention(
    backend: Backend, cache: str, q: Floats, k: Floats, v: Floats, mask: npt.NDArray[np.float16]
) -> Floats:
    """Attention over a cache of any type: (rows, heads, value width)."""
    store = WeightStore(backend)
    cells: list[Tensor] = []
    written = {name: HostTensor.quantised(x, cache) for name, x in (("k", k), ("v", v))}
    for name, values in written.items():
        cells.append(store.declare(name, cache, values.ne))
    store.allocate()
    for name, values in written.items():
        store.write(name, values.data)
    with Graph(backend) as graph:
        query = graph.input("q", "f32", q.shape[::-1])
        masked = graph.input("mask", "f16", mask.shape[::-1])
        node = graph.attention(query, cells[0], cells[1], masked, q.shape[-1] ** -0.5)
        result = graph.output(node, "result")
        graph.allocate()
        graph.set(query, q)
        graph.set(masked, np.ascontiguousarray(mask))
        graph.compute()
        out = graph.get(result).reshape(q.shape[1], q.shape[0], v.shape[-1])
    store.close()
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
