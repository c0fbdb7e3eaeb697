"""Writes targets of real sizes with random weights, for times and memory; their text is noise.

    python benchmarks/geometries.py qwen2.5-0.5b q4_k_m

prints the path of the file, which is made at the first call (seconds) and kept in the cache folder.
Every run gives the same bytes. The tokenizer knows single bytes only, the vocabulary has its real
size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dspine.files.gguf_writer import TensorToWrite, WritableValue, write_gguf
from dspine.ggml.types import type_by_name
from dspine.ggml.weights import quantise
from dspine.llama.library import find_library
from dspine.machine import cache_folder

MIXTURES = ("q4_k_m", "q8_0")
FORMAT = 1
"""Part of the file's name: a change of this script must not meet older files."""

_POOL = 1 << 14
_CHUNK = 1 << 16
"""Blocks that are quantised for a type, and blocks that are put together at once."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a published model."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    rope_base: float
    context: int
    attention_interval: int = 1
    """1 layer in so many attends; the others are Gated DeltaNet."""


GEOMETRIES: Mapping[str, Geometry] = {
    "qwen2.5-0.5b": Geometry("qwen2", 24, 896, 14, 2, 64, 4864, 151936, 1e6, 32768),
    "qwen2.5-1.5b": Geometry("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, 1e6, 32768),
    "qwen3.5-0.8b": Geometry("qwen35", 24, 1024, 8, 2, 256, 3584, 248320, 1e7, 262144, 4),
}
_STATE, _STATE_HEADS, _CONVOLUTION = 128, 16, 4
"""Of Qwen3.5-0.8B's Gated DeltaNet layers: head size, key heads and value heads, kernel."""
_ROTATED = 64

Shape = tuple[int, ...]


def model(name: str, mixture: str, folder: Path | None = None) -> Path:
    """The file of geometry `name` in `mixture`, made where it is missing."""
    folder = folder or cache_folder() / "geometries"
    path = folder / f"{name}-{mixture}-random-{FORMAT}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write(path, GEOMETRIES[name], mixture)
    return path


def write(path: Path, geometry: Geometry, mixture: str) -> None:
    """Write random weights of `geometry`, with the types that llama.cpp's quantiser chooses."""
    find_library()  # has the quantisers
    pool = _Pool()
    tensors = []
    for index, (name, shape) in enumerate(_shapes(geometry)):
        ne = shape[::-1]
        if name.endswith("norm.weight"):
            chunks: Callable[[], Iterator[memoryview]] = partial(_constant, shape, 1.0)
            type_name = "f32"
        elif name.endswith("ssm_a"):
            chunks, type_name = partial(_constant, shape, -0.5), "f32"
        elif len(shape) == 1 or "conv1d" in name:
            chunks, type_name = partial(_floats, shape, index), "f32"
        else:
            type_name = type_of(name, ne[0], geometry, mixture)
            chunks = partial(pool.blocks, type_name, shape, index)
        tensors.append(TensorToWrite(name, type_by_name(type_name), ne, chunks))
    write_gguf(path, _metadata(geometry, path.stem), tensors)


def type_of(name: str, inputs: int, geometry: Geometry, mixture: str) -> str:
    """The type of a matrix: more bits for the head, and in some layers for values and the way
    down; rows that are no multiple of 256 get the next type with blocks of 32.
    """
    if mixture == "q8_0":
        return "q8_0"
    if name == "token_embd.weight":
        return "q6_k" if inputs % 256 == 0 else "q8_0"
    _, layer, part, _ = name.split(".")
    careful = part in ("attn_v", "attn_qkv", "ffn_down")
    more = careful and _more_bits(int(layer), geometry.layers)
    if inputs % 256:
        return "q8_0" if more else "q5_0"
    return "q6_k" if more else "q4_k"


def _more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _shapes(g: Geometry) -> Iterator[tuple[str, Shape]]:
    """Tensors by name, rows before columns."""
    yield "token_embd.weight", (g.vocabulary, g.hidden)
    yield "output_norm.weight", (g.hidden,)
    queries, values = g.heads * g.head_size, g.kv_heads * g.head_size
    hybrid = g.architecture == "qwen35"
    for layer in range(g.layers):
        block: list[tuple[str, Shape]] = [("attn_norm.weight", (g.hidden,))]
        if (layer + 1) % g.attention_interval == 0:
            block += [
                ("attn_q.weight", (queries * (2 if hybrid else 1), g.hidden)),
                ("attn_k.weight", (values, g.hidden)),
                ("attn_v.weight", (values, g.hidden)),
                ("attn_output.weight", (g.hidden, queries)),
            ]
            if hybrid:
                block += [(f"attn_{x}_norm.weight", (g.head_size,)) for x in "qk"]
            else:
                block += [("attn_q.bias", (queries,))]
                block += [(f"attn_{x}.bias", (values,)) for x in "kv"]
        else:
            inner = _STATE * _STATE_HEADS
            block += [
                ("attn_qkv.weight", (3 * inner, g.hidden)),
                ("attn_gate.weight", (inner, g.hidden)),
                ("ssm_conv1d.weight", (3 * inner, _CONVOLUTION)),
                ("ssm_dt.bias", (_STATE_HEADS,)),
                ("ssm_a", (_STATE_HEADS,)),
                ("ssm_beta.weight", (_STATE_HEADS, g.hidden)),
                ("ssm_alpha.weight", (_STATE_HEADS, g.hidden)),
                ("ssm_norm.weight", (_STATE,)),
                ("ssm_out.weight", (g.hidden, inner)),
            ]
        block += [
            ("post_attention_norm.weight" if hybrid else "ffn_norm.weight", (g.hidden,)),
            ("ffn_gate.weight", (g.feed_forward, g.hidden)),
            ("ffn_up.weight", (g.feed_forward, g.hidden)),
            ("ffn_down.weight", (g.hidden, g.feed_forward)),
        ]
        yield from ((f"blk.{layer}.{name}", shape) for name, shape in block)


def _metadata(g: Geometry, name: str) -> dict[str, WritableValue]:
    numbers = {
        "block_count": g.layers,
        "context_length": g.context,
        "embedding_length": g.hidden,
        "feed_forward_length": g.feed_forward,
        "attention.head_count": g.heads,
        "attention.head_count_kv": g.kv_heads,
    }
    if g.architecture == "qwen35":
        numbers |= {
            "attention.key_length": g.head_size,
            "attention.value_length": g.head_size,
            "rope.dimension_count": _ROTATED,
            "ssm.conv_kernel": _CONVOLUTION,
            "ssm.inner_size": _STATE * _STATE_HEADS,
            "ssm.state_size": _STATE,
            "ssm.time_step_rank": _STATE_HEADS,
            "ssm.group_count": _STATE_HEADS,
            "full_attention_interval": g.attention_interval,
        }
    found: dict[str, WritableValue] = {
        "general.architecture": g.architecture,
        "general.name": name,
        f"{g.architecture}.attention.layer_norm_rms_epsilon": np.float32(1e-6),
        f"{g.architecture}.rope.freq_base": np.float32(g.rope_base),
    }
    found |= {f"{g.architecture}.{key}": np.uint32(value) for key, value in numbers.items()}
    if g.architecture == "qwen35":
        found["qwen35.rope.dimension_sections"] = np.array((11, 11, 10, 0), dtype=np.int32)
    return found | _tokenizer(g.vocabulary)


def _tokenizer(size: int) -> dict[str, WritableValue]:
    """The 256 bytes, an end token, and spare tokens up to `size`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    texts = [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
    texts += ["<|endoftext|>"]
    normal, control, unused = 1, 3, 5
    kinds = [normal] * 256 + [control] + [unused] * (size - 257)
    texts += [f"<|spare_{index}|>" for index in range(size - 257)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.merges": [f"{texts[ord('t')]} {texts[ord('h')]}"],
        "tokenizer.ggml.eos_token_id": np.uint32(256),
        "tokenizer.ggml.add_bos_token": False,
    }


class _Pool:
    """Matrices put together from quantised blocks of normal values, drawn at random.

    Quantising every weight would take minutes, and times do not depend on the values.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], npt.NDArray[np.uint8]] = {}

    def blocks(self, type_name: str, shape: Shape, seed: int) -> Iterator[memoryview]:
        """The bytes of a matrix of `shape`, of variance 1 / inputs."""
        rng = np.random.default_rng((1, seed))
        made = self._blocks_of(type_name, shape[-1])
        left = prod(shape) // type_by_name(type_name).block
        while left:
            count = min(left, _CHUNK)
            yield made[rng.integers(len(made), size=count)].reshape(-1).data
            left -= count

    def _blocks_of(self, type_name: str, inputs: int) -> npt.NDArray[np.uint8]:
        key = (type_name, inputs)
        if key not in self._made:
            size = (_POOL, type_by_name(type_name).block)
            values = np.random.default_rng(inputs).standard_normal(size, dtype=np.float32)
            self._made[key] = quantise(values * np.float32(inputs**-0.5), type_name)
        return self._made[key]


def _constant(shape: Shape, value: float) -> Iterator[memoryview]:
    yield np.full(shape, value, dtype=np.float32).data.cast("B")


def _floats(shape: Shape, seed: int) -> Iterator[memoryview]:
    values = np.random.default_rng((2, seed)).standard_normal(shape, dtype=np.float32)
    yield (values * np.float32(0.5)).data.cast("B")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("mixture", choices=MIXTURES)
    args = parser.parse_args()
    print(model(args.geometry, args.mixture))


if __name__ == "__main__":
    main()
