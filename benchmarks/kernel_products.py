"""CPU time of weight products, ggml's kernels and ours in turn, by weight type and row count.

    python benchmarks/kernel_products.py [--inputs 1536] [--outputs 1536] [--types q4_1,q8_0]

One thread and CPU time rather than the clock, so that other work on the machine disturbs little.
The last line is the result as one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time

import common
import numpy as np

from dspine.ggml import Backend, Graph, HostTensor, Tensor, WeightStore, kernels
from dspine.kernels import prepare
from dspine.kernels.selftest import TYPES
from dspine.llama.library import find_library

ROWS = (1, 2, 4, 8, 16, 32, 512)
REPACKED = ("q4_0", "q4_k")
"""Types that ggml repacks for its own kernels on AVX2; compared in that, faster, form."""


class Timer:
    """Products of one matrix, by our kernels (`plug_in`) or by ggml's."""

    def __init__(
        self, backend: Backend, weight: HostTensor, plug_in: kernels.Kernels | None, copies: int
    ) -> None:
        self._backend = backend
        buffer_type = plug_in.buffer_type if plug_in else None
        if plug_in is None and weight.type.name in REPACKED and weight.ne[1] % 8 == 0:
            buffer_type = kernels.repacked_buffer_type()
        self._store = WeightStore(backend, buffer_type=buffer_type)
        names = [f"weight{i}" for i in range(copies)]
        self._weights: list[Tensor] = [
            self._store.declare(name, weight.type.name, weight.ne) for name in names
        ]
        self._store.allocate()
        for name in names:
            self._store.write(name, weight.data)

    def seconds(self, rows: int, repeats: int) -> float:
        """Best CPU time of one product with `rows` rows."""
        inputs = self._weights[0].ne[0]
        with Graph(self._backend) as graph:
            x = graph.input("x", "f32", (inputs, rows))
            for weight in self._weights:
                graph.expand(weight @ x)
            graph.allocate()
            graph.set(x, np.random.default_rng(0).standard_normal((rows, inputs), dtype=np.float32))
            graph.compute()
            best = float("inf")
            for _ in range(repeats):
                began = time.process_time()
                graph.compute()
                best = min(best, time.process_time() - began)
        return best / len(self._weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1536)
    parser.add_argument("--outputs", type=int, default=1536)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--copies", type=int, default=8, help="matrices read one after the other")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    status = prepare(find_library().path)
    plug_in = kernels.installed()
    print(f"CPU kernels: {status.text}")
    if plug_in is None:
        raise SystemExit(1)
    rows = [int(text) for text in args.rows.split(",")]
    rng = np.random.default_rng(1)
    values = rng.standard_normal((args.outputs, args.inputs), dtype=np.float32)
    found: dict[str, dict[str, list[float]]] = {}
    print(f"{'':8}" + "".join(f"{f'{n} rows':>24}" for n in rows))
    with Backend(n_threads=1) as backend:
        for name in args.types.split(","):
            weight = HostTensor.quantised(values, name)
            stock = Timer(backend, weight, None, args.copies)
            ours = Timer(backend, weight, plug_in, args.copies)
            line = ""
            found[name] = {}
            for count in rows:
                repeats = args.repeats if count < 100 else 1
                pair = [1e3 * t.seconds(count, repeats) for t in (stock, ours)]
                found[name][str(count)] = pair
                line += f"{pair[0]:9.3f}{pair[1]:8.3f} {pair[0] / pair[1]:5.2f}x"
            print(f"{name:8}{line}")
    result = {"inputs": args.inputs, "outputs": args.outputs, "kernels": status.text, "ms": found}
    common.save("kernel_products", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
