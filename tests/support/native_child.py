"""Exercises the CPU kernels in a process of its own (they stay plugged in until it ends) and
prints what came out as one JSON object.

    python -m tests.support.native_child products|attention|rival KERNELS LIBRARY_FOLDER [FAMILY]
    python -m tests.support.native_child logits TARGET
    python -m tests.support.native_child model TARGET
    python -m tests.support.native_child status
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from dspine.ggml import Backend, Graph, HostTensor, WeightStore, kernels, library
from dspine.kernels.rivals import against_ggml
from dspine.kernels.selftest import TYPES, attention, lookup, product

Floats = npt.NDArray[np.float32]

SHAPES = ((256, 1), (512, 16), (768, 37), (256, 200))
"""(inputs, outputs): neither multiples of 512 nor of a panel of 16."""
SMALL_SHAPES = ((32, 5), (96, 17), (576, 48))
"""For types with blocks of 32."""
ODD_SHAPES = ((1, 3), (33, 18))
"""For types without blocks."""
ROWS = (1, 2, 3, 5, 8, 13)
MANY_ROWS = 512
LARGE = (1024, 1037)
"""Packed by several threads, in a mapping of its own for types of 16 bits."""
EXPECTED = (0.4, 1.0, 4.0)
"""Shares of its size that the memory is told to expect before."""


def main(arguments: list[str]) -> int:
    found: dict[str, Any]
    if arguments[0] == "status":
        found = status()
    elif arguments[0] == "model":
        found = model(Path(arguments[1]))
    elif arguments[0] == "logits":
        found = logits_of(Path(arguments[1]))
    else:
        library.load(Path(arguments[2]))
        plug_in = kernels.install(Path(arguments[1]), *arguments[3:])
        found = {"products": products, "attention": attentions, "rival": rival}[arguments[0]](
            plug_in
        )
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def products(plug_in: kernels.Kernels) -> dict[str, Any]:
    """Per type: relative errors against float64, ours and ggml's, whether rows are the same bits
    alone, in any batch, with any number of threads, and as part of a view of the matrix, and a
    digest of all results.
    """
    found = {}
    with Backend(n_threads=1) as one, Backend(n_threads=3) as three:
        for type_name in TYPES:
            if plug_in.takes(type_name, (256, 1)):
                found[type_name] = _product_facts(plug_in, type_name, one, three)
    return found


def _product_facts(
    plug_in: kernels.Kernels, type_name: str, one: Backend, three: Backend
) -> dict[str, Any]:
    shapes = [*SHAPES]
    if not type_name.endswith("_k"):
        shapes += SMALL_SHAPES
    if type_name in ("f16", "bf16"):
        shapes += ODD_SHAPES
    rng = np.random.default_rng(3)
    ours, stock, same, digest = [], [], [], hashlib.sha256()
    for inputs, outputs in shapes:
        weight = _weights(rng, type_name, inputs, outputs)
        # Rows of a single block scatter: their mean error shows in many.
        rows = MANY_ROWS if inputs == 32 or (inputs, outputs) == SHAPES[1] else max(ROWS)
        x = rng.standard_normal((rows, inputs), dtype=np.float32)
        x[0] *= 1e4
        x[1, :] = 0.0
        matrix = _exact(weight)
        exact = x.astype(np.float64) @ matrix.T
        # What a result is expected to be in size: a lone exact result may happen to be near zero.
        scale = np.linalg.norm(x, axis=1) * np.sqrt(np.mean(matrix**2))
        whole = product(one, plug_in, weight, x)
        digest.update(whole.tobytes())
        ours.append(_error(whole, exact, scale))
        stock.append(_error(product(one, None, weight, x), exact, scale))
        for count in ROWS:
            part = product(three, plug_in, weight, x[2 : 2 + count])
            same.append(bool(np.array_equal(part, whole[2 : 2 + count])))
        if outputs > 16:
            same.append(_view_agrees(one, plug_in, weight, x[:3], whole[:3]))
        same.append(_reads_back(one, plug_in, weight))
        same.append(_rows_are_found(three, plug_in, weight))
    large = _weights(rng, type_name, *LARGE)
    same.append(_reads_back(one, plug_in, large))
    for share in EXPECTED:
        with plug_in.expecting({large.type.number: int(share * large.data.nbytes)}):
            same.append(_reads_back(one, plug_in, large))
    errors = {"error": max(ours), "stock_error": max(stock)}
    return {**errors, "same": same, "digest": digest.hexdigest()}


def _weights(rng: np.random.Generator, type_name: str, inputs: int, outputs: int) -> HostTensor:
    values = rng.standard_normal((outputs, inputs), dtype=np.float32)
    return HostTensor.quantised(values, type_name)


def _exact(weight: HostTensor) -> npt.NDArray[np.float64]:
    raw = weight.data.reshape(weight.ne[1], -1)
    kind = GGMLQuantizationType(weight.type.number)
    if weight.type.name == "f16":
        return raw.view(np.float16).astype(np.float64)
    return np.asarray(dequantize(raw, kind)).astype(np.float64)


def _error(found: Floats, exact: npt.NDArray[np.float64], scale: npt.NDArray[np.float64]) -> float:
    """Root mean square over rows and outputs of (found - exact), `scale` (rows,) counting as 1."""
    if not np.array_equal(found[scale == 0], exact[scale == 0]):
        return float("inf")
    errors = (found - exact)[scale > 0] / scale[scale > 0, None]
    return float(np.sqrt(np.mean(errors**2)))


def _view_agrees(
    backend: Backend, plug_in: kernels.Kernels, weight: HostTensor, x: Floats, whole: Floats
) -> bool:
    """Rows 5 to 16 of the matrix as a view give the same bits as in the whole product."""
    store = WeightStore(backend, buffer_type=plug_in.buffer_type)
    tensor = store.declare("weight", weight.type.name, weight.ne)
    store.allocate()
    store.write("weight", weight.data)
    with Graph(backend) as graph:
        rows = graph.input("x", "f32", x.shape[::-1])
        result = graph.output(graph.rows(tensor, 5, 12) @ rows, "result")
        graph.allocate()
        graph.set(rows, x)
        graph.compute()
        part = graph.get(result)
    store.close()
    return bool(np.array_equal(part, whole[:, 5:17]))


def _reads_back(backend: Backend, plug_in: kernels.Kernels, weight: HostTensor) -> bool:
    """Packing loses nothing: the bytes of the file come back, also when written in pieces."""
    store = WeightStore(backend, buffer_type=plug_in.buffer_type)
    tensor = store.declare("weight", weight.type.name, weight.ne)
    store.allocate()
    row = weight.type.row_bytes(weight.ne[0])
    half = weight.ne[1] // 2
    store.write("weight", weight.data[half * row :], half)
    store.write("weight", weight.data[: half * row], 0)
    out = np.empty_like(weight.data)
    library.functions().ggml_backend_tensor_get(tensor.pointer, out.ctypes.data, 0, out.nbytes)
    store.close()
    return bool(np.array_equal(out, weight.data))


def _rows_are_found(backend: Backend, plug_in: kernels.Kernels, weight: HostTensor) -> bool:
    """Rows looked up in the packed matrix, and in a part of it, are the bits of its rows."""
    exact = _exact(weight).astype(np.float32)
    count = weight.ne[1]
    wanted = [count - 1, 0, count // 2, 0, count // 3]
    found = [np.array_equal(lookup(backend, plug_in, weight, wanted), exact[wanted])]
    if count > 5:
        part = lookup(backend, plug_in, weight, [count - 6, 0], first=5)
        found.append(np.array_equal(part, exact[[count - 1, 5]]))
        # ggml would end the process.
        outside = lookup(backend, plug_in, weight, [-1, count])
        found.append(bool(np.isnan(outside).all()))
    return all(found)


def attentions(plug_in: kernels.Kernels) -> dict[str, Any]:
    """Per case: error against float64 relative to the largest result, and whether rows are the
    same bits alone, with other threads and with more cells in the cache.
    """
    rng = np.random.default_rng(4)
    found = {}
    plug_in.take_attention(True)
    with Backend(n_threads=1) as one, Backend(n_threads=3) as three:
        for heads, shared, rows, keys, width in (
            (9, 3, 1, 257, 64),
            (6, 3, 7, 130, 64),
            (4, 1, 20, 64, 128),
            (8, 8, 5, 31, 80),
            (6, 3, 33, 300, 64),
            (2, 2, 130, 200, 32),
        ):
            q = rng.standard_normal((heads, rows, width), dtype=np.float32)
            k, v = rng.standard_normal((2, heads // shared, keys, width)).astype(np.float16)
            mask = np.zeros((rows, keys), dtype=np.float16)
            for row in range(rows):
                mask[row, max(1, keys - rows + row + 1) :] = -np.inf
                mask[row, : row % 3] = -np.inf
            whole = attention(one, q, k, v, mask)
            exact = _exact_attention(q, k, v, mask)
            same = []
            for row in {0, rows // 2, rows - 1}:
                at = slice(row, row + 1)
                alone = attention(three, np.ascontiguousarray(q[:, at]), k, v, mask[at])
                same.append(bool(np.array_equal(alone, whole[at])))
            unused = np.full((heads // shared, 70, width), 7, dtype=np.float16)
            more = attention(
                three,
                q,
                np.concatenate((k, unused), axis=1),
                np.concatenate((v, unused), axis=1),
                np.concatenate((mask, np.full((rows, 70), -np.inf, dtype=np.float16)), axis=1),
            )
            same.append(bool(np.array_equal(more, whole)))
            error = float(np.max(np.abs(whole - exact)) / np.max(np.abs(exact)))
            found[f"{heads}/{shared} heads, {rows} rows, {keys} keys, {width} wide"] = {
                "error": error,
                "same": same,
            }
    return found


def rival(plug_in: kernels.Kernels) -> dict[str, Any]:
    """Time of our products in times of ggml's."""
    with Backend(n_threads=1) as backend:
        return {"ratio": against_ggml(backend, plug_in)}


def _exact_attention(
    q: Floats,
    k: npt.NDArray[np.float16],
    v: npt.NDArray[np.float16],
    mask: npt.NDArray[np.float16],
) -> npt.NDArray[np.float64]:
    shared = q.shape[0] // k.shape[0]
    keys, values = (np.repeat(t.astype(np.float64), shared, axis=0) for t in (k, v))
    scores = np.einsum("hrd,hkd->hrk", q.astype(np.float64), keys) / np.sqrt(q.shape[-1])
    scores = scores + mask.astype(np.float64)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out: npt.NDArray[np.float64] = np.einsum("hrk,hkd->rhd", weights, values)
    return out


def status() -> dict[str, Any]:
    """What the library reports about the kernels."""
    from dspine.llama.library import find_library

    found = find_library().kernels
    return {"active": found.active, "text": found.text}


def logits_of(target: Path) -> dict[str, Any]:
    """The kernels in use and a digest of the target's logits for a few rows."""
    from dspine.llama.batch import Batch
    from dspine.llama.context import Context
    from dspine.llama.model import Model

    found, digest = status(), hashlib.sha256()
    with (
        Model.load(target) as loaded,
        Context(loaded, n_ctx=64, n_threads=1, flash_attention=True) as context,
    ):
        batch, position = Batch(32), 0
        for size in (7, 1, 4):
            batch.clear()
            tokens = [(17 * i * i + 5 * i + 100) % 40000 for i in range(position, position + size)]
            batch.add_tokens(tokens, position)
            context.decode(batch)
            for row in range(size):
                digest.update(context.logits(row).tobytes())
            position += size
    return {**found, "digest": digest.hexdigest()}


def _mapped_mib() -> float:
    """Resident pages of files in this process, in MiB (proc_pid_status(5))."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").split("\n")
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssFile"))


def model(target: Path) -> dict[str, Any]:
    """Logits of the target for the same tokens in several batch shapes and thread counts, and
    those of ggml's own kernels.
    """
    from dspine.llama.batch import Batch
    from dspine.llama.context import Context
    from dspine.llama.model import Model

    found = status()
    plug_in = kernels.installed()
    tokens = [(17 * i * i + 5 * i + 100) % 40000 for i in range(12)]

    def logits(loaded: Model, sizes: list[int], n_threads: int, cache: str = "f16") -> Floats:
        rows = []
        with Context(
            loaded,
            n_ctx=64,
            n_threads=n_threads,
            flash_attention=True,
            cache_type_k=cache,
            cache_type_v=cache,
        ) as context:
            batch, position = Batch(32), 0
            for size in sizes:
                batch.clear()
                batch.add_tokens(tokens[position : position + size], position)
                context.decode(batch)
                rows += [context.logits(row).copy() for row in range(size)]
                position += size
        return np.stack(rows)

    mapped = _mapped_mib()
    with Model.load(target) as loaded:
        found["mapped_mib"] = _mapped_mib() - mapped
        embedding = loaded.tensor("token_embd.weight")
        found["embedding_in"] = embedding.buffer_name if embedding else "none"
        whole = logits(loaded, [12], 1)
        found["same"] = [
            bool(np.array_equal(logits(loaded, sizes, n_threads), whole))
            for sizes, n_threads in (([1] * 12, 1), ([4, 8], 2), ([9, 1, 2], 1))
        ]
        found["caches"] = {}
        for cache in ("q8_0", "bf16", "f32"):
            other = logits(loaded, [12], 1, cache)
            found["caches"][cache] = {
                "same": bool(np.array_equal(logits(loaded, [5, 7], 1, cache), other)),
                "difference": float(np.abs(other - whole).max() / np.abs(whole).max()),
            }
    if plug_in is not None:
        plug_in.take_attention(False)
    with Model.load(target, use_extra_buffers=False) as loaded:
        stock = logits(loaded, [12], 1)
    found["same_arg_max"] = int(np.sum(stock.argmax(axis=1) == whole.argmax(axis=1)))
    found["rows"] = len(tokens)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
