"""The folder of a training run: its checkpoints, and which of them is meant by its name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from dspine.errors import TrainingError

BEST_FILE = "best.json"
_NAME = re.compile(r"checkpoint-(\d{8})")


@dataclass(frozen=True, slots=True)
class Best:
    """The checkpoint with the greatest held-out acceptance length so far."""

    name: str
    acceptance_length: float


def choose_checkpoint(folder: Path) -> Path:
    """`folder` itself, or of a training run its best checkpoint, else the newest."""
    known = list_checkpoints(folder)
    if not known:
        return folder
    best = read_best(folder)
    return known[-1] if best is None else folder / best.name


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir())


def read_best(folder: Path) -> Best | None:
    """The best checkpoint so far, or None when none was evaluated or it is gone."""
    path = folder / BEST_FILE
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        best = Best(str(data["checkpoint"]), float(data["acceptance_length"]))
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise TrainingError(f"{path} is damaged ({error}): remove it and continue") from error
    return best if (folder / best.name).is_dir() else None
