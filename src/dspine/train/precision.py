"""The number format of the products in training.

Weights, optimiser, norms, softmax and losses are float32 in either; bf16 rounds what goes into and
comes out of matrix products, which processors with bf16 matrix units multiply several times faster.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import torch

from dspine.machine import cpu_flags

PRECISIONS = ("auto", "f32", "bf16")
FORMATS = {"f32": torch.float32, "bf16": torch.bfloat16}
_UNITS = "amx_bf16"


def resolve(precision: str, flags: Collection[str] | None = None) -> str:
    """f32 or bf16: what `precision` means on a processor with these flags, or on this one.

    auto is bf16 only with matrix units: without them bf16 products are slower than float32 ones.
    """
    if precision != "auto":
        return precision
    return "bf16" if _UNITS in (cpu_flags() if flags is None else flags) else "f32"


def products(precision: str) -> torch.autocast:
    """A context in which the products of a forward pass, and later of its gradient, are made so.

    `precision` is f32 or bf16.
    """
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16")


def product_dtype() -> torch.dtype:
    """The format of products here: bfloat16 inside `products("bf16")`."""
    return torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32


def apart(threads: int) -> ThreadPoolExecutor:
    """A thread for everything that has such products, with so many threads of torch to help it.

    They leave the tile registers of their thread in another state. ggml sets that up once a thread
    and never again: in a thread that it uses, its next product would end the process.
    """
    return ThreadPoolExecutor(1, "products", torch.set_num_threads, (threads,))


def row_multiple(precision: str) -> int:
    """What numbers of rows should be multiples of: products in bf16 are compiled for each shape,
    which takes longer than a product, so that shapes have to return."""
    return 64 if precision == "bf16" else 1
