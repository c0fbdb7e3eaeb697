"""A run's checkpoints: complete folders under final names, the last two and the best kept.

Each holds the drafter in SpecForge's layout and beside it `trainer.pt`, what resuming needs.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dspine.errors import FileError, TrainingError
from dspine.files.atomic import atomic_write, reason
from dspine.files.checkpoint import write_checkpoint
from dspine.files.run_folder import BEST_FILE, Best, list_checkpoints, read_best
from dspine.files.schema import Pair, TrainingRecord, tensor_specs
from dspine.train.kinds import DrafterModule

STATE = "trainer.pt"
_PARTIAL = ".partial"
_REPLACED = ".replaced"


def prepare(folder: Path) -> None:
    """Make the folder of a run, and put it right after a kill in the middle of a save.

    Raises TrainingError where no checkpoint could be written, before any work is done.
    """
    probe = folder / f".writable{_PARTIAL}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        for old in folder.glob(f"checkpoint-*{_REPLACED}"):
            final = old.with_suffix("")
            if final.exists():
                shutil.rmtree(old)
            else:
                old.rename(final)
    except OSError as error:
        raise TrainingError(
            f"{folder} cannot be used for a run ({reason(error)}): choose another folder"
        ) from error


def export_tensors(module: DrafterModule) -> dict[str, NDArray[np.float32]]:
    """Every tensor of the schema by torch name; the features' scale is folded into fc."""
    state = module.state_dict()
    tensors = {}
    for spec in tensor_specs(module.config):
        value = state[spec.torch_name].detach().float()
        if spec.torch_name == "fc.weight":
            value = value * module.feature_scale[None]
        tensors[spec.torch_name] = value.contiguous().numpy()
    return tensors


def save(
    folder: Path,
    step: int,
    module: DrafterModule,
    pair: Pair,
    record: TrainingRecord,
    draft_vocab: list[int] | None,
    state: Mapping[str, object],
) -> Path:
    """Write `checkpoint-<step>` whole or not at all; raises TrainingError, the old ones stay."""
    final = folder / f"checkpoint-{step:08d}"
    partial = folder / f"{final.name}{_PARTIAL}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        write_checkpoint(partial, module.config, pair, record, export_tensors(module), draft_vocab)
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        with (partial / STATE).open("wb") as file:
            file.write(buffer.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        if final.exists():
            # Never a moment without either: `prepare` takes the old one back.
            final.rename(folder / f"{final.name}{_REPLACED}")
        partial.rename(final)
        _sync(folder)
        shutil.rmtree(folder / f"{final.name}{_REPLACED}", ignore_errors=True)
    except (OSError, FileError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise TrainingError(
            f"checkpoint {final} could not be written ({why}): the checkpoints before it are "
            f"complete, run the same command again once there is room"
        ) from error
    return final


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The content of `trainer.pt`."""
    try:
        # Our own file of tensors, numbers and lists; weights_only refuses anything else.
        state: dict[str, Any] = torch.load(checkpoint / STATE, weights_only=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise TrainingError(
            f"{checkpoint / STATE} cannot be read ({error}): remove that checkpoint to continue "
            f"from the one before"
        ) from error
    return state


def write_best(folder: Path, best: Best) -> None:
    """Record the best checkpoint."""
    text = json.dumps({"checkpoint": best.name, "acceptance_length": best.acceptance_length})
    try:
        with atomic_write(folder / BEST_FILE, overwrite=True) as file:
            file.write(f"{text}\n".encode())
    except FileError as error:
        raise TrainingError(f"{error}; the checkpoints are complete") from error


def prune(folder: Path, keep: int = 2) -> None:
    """Remove all but the newest `keep` checkpoints and the best one, and partial leftovers."""
    best = read_best(folder)
    checkpoints = list_checkpoints(folder)
    for old in checkpoints[:-keep]:
        if best is None or old.name != best.name:
            with suppress(OSError):
                old.rename(folder / f"{old.name}{_PARTIAL}")
    for left in folder.glob(f"checkpoint-*{_PARTIAL}"):
        shutil.rmtree(left, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
