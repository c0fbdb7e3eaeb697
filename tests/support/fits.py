"""Training runs of a second or two: a tiny target, patterned shards, and what a run wrote."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from dspine.files.checkpoint import read_checkpoint
from dspine.train.options import FitOptions, Geometry
from dspine.train.schedules import LossSchedule
from tests.support.tiny_models import tiny_llama
from tests.support.training import pattern_shards

TAPS = (0, 2)


def tiny_data(folder: Path) -> Path:
    """A tiny target and shards of a repeated pattern; `train` and `held` differ in phase."""
    target = tiny_llama(folder / "target.gguf", hidden_size=32, num_heads=2, num_kv_heads=1)
    pattern_shards(folder / "train", target, taps=TAPS, sequences=24, seed=1)
    pattern_shards(folder / "held", target, taps=TAPS, sequences=6, seed=2)
    return folder


def options(data: Path, output: Path, **changes: Any) -> FitOptions:
    base = FitOptions(
        target=data / "target.gguf",
        shards=(data / "train",),
        output=output,
        steps=8,
        geometry=Geometry(
            num_layers=2,
            block_size=5,
            transfer_rank=16,
            message_size=16,
            top_k=4,
            window=32,
            intermediate_size=64,
            mask_token_id=3,
        ),
        draft_vocab_size=160,
        copy_layers=False,
        anchors_per_step=32,
        anchors_per_sequence=8,
        threads=1,
        schedule=LossSchedule(alignment_warmup_steps=10),
        checkpoint_minutes=1000,
        evaluate_minutes=1000,
        log_steps=1,
    )
    return dataclasses.replace(base, **changes)


def losses(folder: Path) -> dict[int, float]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return {e["step"]: e["loss"] for e in entries if "loss" in e}


def weights(checkpoint: Path) -> dict[str, np.ndarray[Any, Any]]:
    return {k: np.asarray(v) for k, v in read_checkpoint(checkpoint).tensors.items()}
