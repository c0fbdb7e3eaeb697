"""A tiny random target with a tiny random drafter made for it, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.files.drafter_file import OWN_TABLES, read_drafter, write_drafter
from dspine.files.gguf_writer import TensorToWrite
from dspine.files.pairing import describe_target
from dspine.files.schema import DSpineConfig, TrainingRecord, tensor_specs
from dspine.ggml.types import type_by_name
from tests.support.rewritten import foreign, rewritten
from tests.support.tiny_dflash import TinyDFlash
from tests.support.tiny_dflash import tiny_config as dflash_config
from tests.support.tiny_drafter import TinyPair, tiny_config


def config_for(target: Path, **changes: object) -> DSpineConfig:
    """Two layers, one of them windowed, reading the target's layers 0 and 1."""
    pair = describe_target(target)
    sizes = {
        "vocab_size": pair.vocab_size,
        "target_hidden_size": pair.hidden_size,
        "hidden_size": pair.hidden_size,
        "taps": (0, 1),
    }
    return tiny_config((None, 16), **{**sizes, **changes})


def write_dflash_drafter(
    path: Path, target: Path, kind: str, *, dtype: str = "f32", seed: int = 4, **changes: object
) -> Path:
    """A DFlash or DFlash2 GGUF with random weights for the GGUF `target`, with its tokenizer."""
    pair = describe_target(target)
    sizes = {
        "vocab_size": pair.vocab_size,
        "target_hidden_size": pair.hidden_size,
        "hidden_size": pair.hidden_size,
        "taps": (0, 1),
        "windows": (None, 16),
    }
    made = TinyDFlash(dflash_config(kind, **{**sizes, **changes}), seed=seed)
    names = {spec.gguf_name: spec.torch_name for spec in tensor_specs(made.config)}
    write_drafter(
        path,
        made.config,
        pair,
        TrainingRecord(acceptance_curve=(0.9,) * (made.config.block_size - 1)),
        {names[name]: value for name, value in made.tensors.items()},
        dtype,
        made.draft_vocab,
        target=target,
    )
    return path


def write_pair_drafter(path: Path, target: Path, **changes: object) -> Path:
    """A drafter GGUF with random weights for the GGUF `target`."""
    made = TinyPair(config_for(target, **changes), seed=4)
    names = {spec.gguf_name: spec.torch_name for spec in tensor_specs(made.config)}
    write_drafter(
        path,
        made.config,
        describe_target(target),
        TrainingRecord(acceptance_curve=(0.9, 0.9, 0.9, 0.9, 0.9)),
        {names[name]: value for name, value in made.tensors.items()},
        "f32",
        made.draft_vocab,
    )
    return path


def as_others_write_it(path: Path) -> Path:
    """Without our keys, with tables of its own and the positions of a drafter for M-RoPE."""
    config = read_drafter(path).config
    random = np.random.default_rng(8)
    values = random.standard_normal((config.vocab_size, config.hidden_size)).astype(np.float32)

    def change(metadata: dict[str, Any], tensors: dict[str, TensorToWrite]) -> None:
        foreign(metadata, tensors)
        sections = [config.head_dim // 2, 0, 0, 0]
        metadata["dflash.rope.dimension_sections"] = np.array(sections, np.int32)

    return with_tables(rewritten(path, change), values)


def with_tables(path: Path, values: npt.NDArray[np.float32]) -> Path:
    """With an embedding and a head of its own, both `values` (vocabulary, H)."""

    def change(_: dict[str, Any], tensors: dict[str, TensorToWrite]) -> None:
        for name in OWN_TABLES:
            ne, kind = values.shape[::-1], type_by_name("f32")
            tensors[name] = TensorToWrite(
                name, kind, ne, lambda: [values.reshape(-1).data.cast("B")]
            )

    return rewritten(path, change)
