"""A tiny random target with a tiny random drafter made for it, as files."""

from __future__ import annotations

from pathlib import Path

from dspine.files.drafter_file import write_drafter
from dspine.files.pairing import describe_target
from dspine.files.schema import DSpineConfig, TrainingRecord, tensor_specs
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
