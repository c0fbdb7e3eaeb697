"""Compares the CPU kernels with ggml's own on small operations; run in a child process.

    python -m dspine.kernels.selftest KERNELS LIBRARY_FOLDER auto|FAMILY [WITHOUT ...]

The first line names the family that is tested: the one asked for, or the fastest here. The last
line says what is wrong, or, with exit status 0, what to use and why, as one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dspine.errors import DspineError
from dspine.ggml import Backend, Graph, HostTensor, WeightStore, kernels, library
from dspine.kernels import rivals
from dspine.kernels.verdict import ANY, Verdict

Floats = npt.NDArray[np.float32]

TYPES = ("q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q5_k", "q6_k", "f16", "bf16")
LOOKED_UP = "token_embd.weight"
"""The one matrix whose rows the kernels look up."""
_INPUTS, _OUTPUTS = 256, 40
_ROWS = 7
_TOLERANCE = 0.02
"""Relative to the largest result; ggml rounds inputs to 8 bits, and so do we."""
_ATTENTION_TOLERANCE = 1e-2
"""ggml sums values in 16-bit floats."""


class MismatchError(DspineError):
    """Our kernels and ggml's disagree."""


def main(arguments: list[str]) -> int:
    try:
        path, folder, wanted, *without = Path(arguments[0]), Path(arguments[1]), *arguments[2:]
        library.load(folder)
        here = [family for family in kernels.families(path) if family not in without]
        kernels.choose(here, None if wanted == ANY else wanted)
        family, note = rivals.fastest(path, here) if wanted == ANY else (wanted, "")
        sys.stdout.write(f"family {family}\n")
        sys.stdout.flush()  # whatever happens next, it happens to this one
        found = kernels.install(path, family)
        with Backend(n_threads=2) as backend:
            for type_name in TYPES:
                if found.takes(type_name, (_INPUTS, _OUTPUTS)):
                    check_product(backend, found, type_name)
                    check_lookup(backend, found, type_name)
            check_attention(backend, found)
            check_top_k(backend, found)
        verdict = _against_ggml(family, note, found) if wanted == ANY else Verdict(family)
    except DspineError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(asdict(verdict)) + "\n")
    return 0


def _against_ggml(family: str, note: str, found: kernels.Kernels) -> Verdict:
    """Where ggml has wider kernels than those that ours were measured against, ours must win."""
    if not rivals.wide_vectors():
        return Verdict(family, note)
    with Backend(n_threads=1) as backend:
        ratio = rivals.against_ggml(backend, found)
    if ratio > 1:
        others = f" ({note})" if note else ""
        return Verdict(None, f"ggml's own kernels are {ratio:.2f} times as fast here{others}")
    compared = f"{1 / ratio:.2f} times as fast as ggml's own"
    return Verdict(family, f"{note}; {compared}" if note else compared)


def check_product(backend: Backend, found: kernels.Kernels, type_name: str) -> None:
    """One matrix, several rows: near ggml's result, and the same bits for one row alone."""
    rng = np.random.default_rng(1)
    weight = HostTensor.quantised(
        rng.standard_normal((_OUTPUTS, _INPUTS), dtype=np.float32), type_name
    )
    x = rng.standard_normal((_ROWS, _INPUTS), dtype=np.float32)
    stock = product(backend, None, weight, x)
    ours = product(backend, found, weight, x)
    alone = product(backend, found, weight, x[3:4])
    _compare(f"{type_name} product", ours, stock, _TOLERANCE)
    if not np.array_equal(alone.reshape(-1), ours[3]):
        raise MismatchError(f"{type_name} product: a row alone differs from the row among others")


def product(
    backend: Backend, found: kernels.Kernels | None, weight: HostTensor, x: Floats
) -> Floats:
    """Matrix (outputs, inputs) times rows x, by our kernels or by ggml's: (rows, outputs)."""
    store = WeightStore(backend, buffer_type=found.buffer_type if found else None)
    tensor = store.declare("weight", weight.type.name, weight.ne)
    store.allocate()
    store.write("weight", weight.data)
    with Graph(backend) as graph:
        rows = graph.input("x", "f32", x.shape[::-1])
        result = graph.output(tensor @ rows, "result")
        graph.allocate()
        graph.set(rows, x)
        graph.compute()
        out = graph.get(result).reshape(x.shape[0], -1)
    store.close()
    return out


def check_lookup(backend: Backend, found: kernels.Kernels, type_name: str) -> None:
    """Rows looked up in a packed matrix are those that ggml finds in the plain one."""
    values = np.random.default_rng(3).standard_normal((_OUTPUTS, _INPUTS), dtype=np.float32)
    weight = HostTensor.quantised(values, type_name)
    wanted = [0, _OUTPUTS - 1, 17, 17]
    ours = lookup(backend, found, weight, wanted)
    if not np.array_equal(ours, lookup(backend, None, weight, wanted)):
        raise MismatchError(f"{type_name} rows: looked up they differ from ggml's")


def lookup(
    backend: Backend,
    found: kernels.Kernels | None,
    weight: HostTensor,
    rows: Sequence[int],
    first: int = 0,
) -> Floats:
    """Rows `rows` of the matrix from its row `first` on, (len(rows), inputs), looked up in packed
    memory or by ggml in its own.
    """
    store = WeightStore(backend, buffer_type=found.buffer_type if found else None)
    tensor = store.declare(LOOKED_UP, weight.type.name, weight.ne)
    store.allocate()
    store.write(LOOKED_UP, weight.data)
    with Graph(backend) as graph:
        ids = graph.input("ids", "i32", (len(rows),))
        table = graph.rows(tensor, first, weight.ne[1] - first) if first else tensor
        result = graph.output(graph.get_rows(table, ids), "result")
        graph.allocate()
        graph.set(ids, np.array(rows, dtype=np.int32))
        graph.compute()
        out = graph.get(result).reshape(len(rows), -1)
    store.close()
    return out


def check_attention(backend: Backend, found: kernels.Kernels) -> None:
    """Several rows over a cache with a causal mask, near ggml's result."""
    rng = np.random.default_rng(2)
    rows, heads, shared, keys, width = 5, 6, 3, 100, 64
    q = rng.standard_normal((heads, rows, width), dtype=np.float32)
    k, v = rng.standard_normal((2, heads // shared, keys, width)).astype(np.float16)
    mask = np.zeros((rows, keys), dtype=np.float16)
    for row in range(rows):
        mask[row, keys - rows + row + 1 :] = -np.inf
    found.take_attention(False)
    stock = attention(backend, q, k, v, mask)
    found.take_attention(True)
    _compare("attention", attention(backend, q, k, v, mask), stock, _ATTENTION_TOLERANCE)


def attention(
    backend: Backend,
    q: Floats,
    k: npt.NDArray[np.float16],
    v: npt.NDArray[np.float16],
    mask: npt.NDArray[np.float16] | None,
) -> Floats:
    """softmax(q k^T / sqrt(width) + mask) v. q (heads, rows, width), k and v (key/value heads,
    keys, width), mask (rows, keys); the result is (rows, heads, width).
    """
    with Graph(backend) as graph:
        query = graph.input("q", "f32", q.shape[::-1])
        key = graph.input("k", "f16", k.shape[::-1])
        value = graph.input("v", "f16", v.shape[::-1])
        masked = None if mask is None else graph.input("mask", "f16", mask.shape[::-1])
        node = graph.attention(query, key, value, masked, q.shape[-1] ** -0.5)
        result = graph.output(node, "result")
        graph.allocate()
        graph.set(query, q)
        graph.set(key, k)
        graph.set(value, v)
        if masked is not None and mask is not None:
            graph.set(masked, mask)
        graph.compute()
        return graph.get(result).reshape(q.shape[1], q.shape[0], v.shape[-1])


def check_top_k(backend: Backend, found: kernels.Kernels) -> None:
    """The largest values of several rows are those that ggml chooses."""
    values = np.random.default_rng(4).standard_normal((3, 1000), dtype=np.float32)
    found.take_top_k(False)
    stock = top_k(backend, values, 32)
    found.take_top_k(True)
    # In another order: ggml's own is none.
    if not np.array_equal(np.sort(top_k(backend, values, 32)), np.sort(stock)):
        raise MismatchError("top k: other values are chosen than by ggml")


def top_k(backend: Backend, values: Floats, k: int) -> npt.NDArray[np.int32]:
    """Indices of the k largest of each row (rows, count): (rows, k)."""
    with Graph(backend) as graph:
        rows = graph.input("values", "f32", values.shape[::-1])
        result = graph.output(graph.top_k(rows, k), "result")
        graph.allocate()
        graph.set(rows, values)
        graph.compute()
        return graph.get(result).reshape(-1, k)


def _compare(what: str, ours: Floats, stock: Floats, tolerance: float) -> None:
    worst = float(np.max(np.abs(ours - stock)) / np.max(np.abs(stock)))
    if not worst <= tolerance:  # also for NaN
        raise MismatchError(f"{what}: differs from ggml's by {worst:.2g} of its largest value")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
