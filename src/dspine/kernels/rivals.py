"""Which kernel family is the fastest on this machine, and whether it is faster than ggml's kernels.

Families compute the same bits, so the choice changes no logits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dspine.ggml import Backend, Graph, HostTensor, WeightStore, kernels
from dspine.machine import cpu_flags

Timed = tuple[float, npt.NDArray[np.float32]]
"""Seconds and the result."""
Trial = Callable[[Path, str, str, tuple[int, int], int, int], Timed]
AttentionTrial = Callable[[Path, str, str, kernels.AttentionShape, int], Timed]
_OLDEST = "avx2"
"""Every other family must compute its bits."""
_TYPES = ("q4_k", "q4_1", "q6_k", "q8_0")
_STOCK_TYPES = ("q4_0", "q4_k")
"""Types that ggml lays out anew for its kernels wherever it has such ones."""
_STOCK_MEMORY = ("_Z28ggml_backend_amx_buffer_typev", "_Z35ggml_backend_cpu_repack_buffer_typev")
_ROWS = (1, 8)
_INPUTS, _OUTPUTS = 1024, 512
_CACHES = ("f16", "q8_0")
_HEADS, _SHARED, _KEYS, _WIDTH = 6, 3, 256, 64
_REPEATS = 8


def fastest(
    path: Path,
    here: Sequence[str],
    trial: Trial = kernels.trial,
    attention: AttentionTrial = kernels.attention_trial,
) -> tuple[str, str]:
    """The fastest of the families `here` and a note that says how it compares with AVX2's.

    A family whose results differ from AVX2's in any bit is no choice.
    """
    if len(here) == 1 or _OLDEST not in here:
        return here[0], ""
    ratios, differing = {_OLDEST: 1.0}, []
    for family in here:
        if family != _OLDEST:
            ratio = _ratio(path, family, trial, attention)
            if ratio is None:
                differing.append(kernels.FAMILIES[family])
            else:
                ratios[family] = ratio
    best = min(ratios, key=lambda family: ratios[family])
    notes = [
        f"{kernels.FAMILIES[family]} {1 / ratio:.2f} times as fast as {kernels.FAMILIES[_OLDEST]}"
        for family, ratio in ratios.items()
        if family != _OLDEST
    ]
    notes += [f"{name} left out: its results differ" for name in differing]
    return best, ", ".join(notes)


def _ratio(path: Path, family: str, trial: Trial, attention: AttentionTrial) -> float | None:
    """Time of a family in times of AVX2's, over types and rows; None where results differ."""
    logs = []
    for (theirs, expected), (ours, found) in _pairs(path, family, trial, attention):
        if not np.array_equal(found, expected):
            return None
        logs.append(math.log(ours / theirs))
    return math.exp(sum(logs) / len(logs))


def _pairs(
    path: Path, family: str, trial: Trial, attention: AttentionTrial
) -> Iterator[tuple[Timed, Timed]]:
    """The same work by AVX2 and by the family."""
    for rows in _ROWS:
        for type_name in _TYPES:
            case = (type_name, (_INPUTS, _OUTPUTS), rows, _REPEATS)
            yield trial(path, _OLDEST, *case), trial(path, family, *case)
        shape = kernels.AttentionShape(_HEADS, _SHARED, rows, _KEYS, _WIDTH)
        for cache in _CACHES:
            over = (cache, shape, _REPEATS)
            yield attention(path, _OLDEST, *over), attention(path, family, *over)


def wide_vectors(flags: frozenset[str] | None = None) -> bool:
    """Whether ggml has kernels for 512 bits or AMX here: ours were measured against others."""
    return "avx512f" in (cpu_flags() if flags is None else flags)


def against_ggml(backend: Backend, found: kernels.Kernels) -> float:
    """Our time in times of ggml's, in the memory that suits ggml best, over types and rows."""
    stock = [memory for name in _STOCK_MEMORY if (memory := kernels.repacked_buffer_type(name))]
    values = np.random.default_rng(5).standard_normal((_OUTPUTS, _INPUTS), dtype=np.float32)
    logs = []
    for type_name in _STOCK_TYPES:
        weight = HostTensor.quantised(values, type_name)
        for rows in _ROWS:
            theirs = min(_seconds(backend, weight, memory, rows) for memory in (None, *stock))
            logs.append(math.log(_seconds(backend, weight, found.buffer_type, rows) / theirs))
    return math.exp(sum(logs) / len(logs))


def _seconds(backend: Backend, weight: HostTensor, memory: int | None, rows: int) -> float:
    """Best processor time of a product with the matrix in this memory (None: as in the file)."""
    store = WeightStore(backend, buffer_type=memory)
    tensor = store.declare("weight", weight.type.name, weight.ne)
    store.allocate()
    store.write("weight", weight.data)
    best = math.inf
    with Graph(backend) as graph:
        x = graph.input("x", "f32", (weight.ne[0], rows))
        graph.output(tensor @ x, "result")
        graph.allocate()
        graph.set(x, np.ones((rows, weight.ne[0]), dtype=np.float32))
        for _ in range(_REPEATS):
            began = time.process_time()
            graph.compute()
            best = min(best, time.process_time() - began)
    store.close()
    return best
