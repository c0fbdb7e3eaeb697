"""How many drafts are accepted, task by task, from a file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine.errors import FileError
from dspine.plan.bounds import Bounds

_FIXED = re.compile(r"(?:dspine|dflash2?), (\d+) drafts")
"""Names of settings with a fixed number of drafts in `benchmarks/results/demo_pair.json`."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance on one task. Either `chances`, that slot 1, 2, ... is accepted if all before it
    are, or only acceptance lengths (tokens a step, bonus included) by width.
    """

    task: str
    chances: tuple[float, ...] = ()
    lengths: Mapping[int, float] | None = None

    @property
    def widest(self) -> int:
        """The largest width that tokens can be told for."""
        if self.chances:
            return len(self.chances) + 1
        return max(self.lengths or {1: 1.0})

    def tokens(self, width: int) -> Bounds:
        """Tokens of a step of `width`, at most `widest`.

        With chances it is 1 + p1 + p1 p2 + ... With lengths L at known widths W it is exact there.
        At a smaller width w a step gives min(A, w) tokens, where A has the mean L: at most
        min(L, w), when all steps are alike, and at least 1 + (w - 1)(L - 1)/(W - 1), when they
        give 1 or W. With several known widths: a slot is never reached more often than the one
        before it, so that the tokens lie between the line through the neighbours and the line that
        continues from the width before.
        """
        if not 1 <= width <= self.widest:
            raise ValueError(f"width {width} of {self.widest}")
        if self.chances:
            total, reached = 1.0, 1.0
            for chance in self.chances[: width - 1]:
                reached *= chance
                total += reached
            return Bounds.known(total)
        known = {1: 1.0, **(self.lengths or {})}
        if width in known:
            return Bounds.known(known[width])
        upper = min(w for w in known if w > width)
        lower = max(w for w in known if w < width)
        # Gains of later slots are never larger: the line between two known widths is the least.
        share = (width - lower) / (upper - lower)
        least = known[lower] + share * (known[upper] - known[lower])
        before = max((w for w in known if w < lower), default=None)
        gain = 1.0 if before is None else (known[lower] - known[before]) / (lower - before)
        most = min(known[upper], known[lower] + gain * (width - lower))
        return Bounds(min(least, most), most)


def read_acceptance(path: Path, width: int) -> list[Acceptance]:
    """Acceptance by task from one of these JSON files:

    - `{"task": 7.66, ...}`: acceptance lengths at `width`;
    - `{"task": [0.8, 0.7, ...], ...}`: the chance of each slot;
    - `{"task": {"acceptance_length": 7.66, "width": 16}, ...}` (width may be left out);
    - a result of `dspine eval` or `dspine bench`: of the configuration with most slots;
    - what `dspine train eval --json` prints: chances by source;
    - a result of `benchmarks/demo_pair.py`: lengths of the settings with a fixed number of drafts.

    FileError for anything else, with the entry that is wrong.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise FileError(f"{path} is not JSON: give acceptance by task, as in {_EXAMPLE}") from error
    if not isinstance(document, dict) or not document:
        raise FileError(f"{path} is no JSON object: give acceptance by task, as in {_EXAMPLE}")
    if isinstance(document.get("summary"), list):
        return _of_summary(path, document["summary"])
    if isinstance(document.get("results"), dict):
        return _of_pair(path, document["results"])
    if isinstance(document.get("acceptance_curve"), list):
        sources = document.get("by_source")
        tasks = {**(sources if isinstance(sources, dict) else {}), "all": document}
        return [_entry(path, name, value, width) for name, value in tasks.items()]
    return [_entry(path, name, value, width) for name, value in document.items()]


_EXAMPLE = '{"code": 7.66, "chat": [0.8, 0.6, 0.5]}'


def _entry(path: Path, task: str, value: object, width: object) -> Acceptance:
    if isinstance(value, dict):
        curve = value.get("acceptance_curve")
        if isinstance(curve, list) and curve:
            return _entry(path, task, curve, width)
        width = value.get("width", width)
        value = value.get("acceptance_length")
    if isinstance(value, list) and value:
        return Acceptance(task, tuple(_number(path, task, item, 0.0, 1.0) for item in value))
    if not isinstance(width, int) or width < 2:
        raise FileError(f"{path}: the width of {task} is {width!r}: it must be at least 2")
    return Acceptance(task, lengths={width: _number(path, task, value, 1.0, float(width))})


def _of_summary(path: Path, rows: Sequence[object]) -> list[Acceptance]:
    """Chances by task, at the lowest temperature and the shortest context."""
    usable = [row for row in rows if isinstance(row, dict) and row.get("slot_acceptance")]
    if not usable:
        raise FileError(f"{path} has no configuration that drafted: measure one with `dspine eval`")
    chosen: dict[str, dict[str, Any]] = {}
    for row in sorted(usable, key=lambda r: (r.get("temperature", 0), r.get("depth", 0))):
        task = str(row.get("task"))
        slots = len(row["slot_acceptance"])
        if task not in chosen or slots > len(chosen[task]["slot_acceptance"]):
            chosen[task] = row
    return [_entry(path, task, row["slot_acceptance"], 0) for task, row in chosen.items()]


def _of_pair(path: Path, results: Mapping[str, Any]) -> list[Acceptance]:
    lengths: dict[str, dict[int, float]] = {}
    for setting, tasks in results.items():
        match = _FIXED.fullmatch(setting)
        if match is None or not isinstance(tasks, dict):
            continue
        width = int(match[1]) + 1
        for task, facts in tasks.items():
            value = facts.get("acceptance_length") if isinstance(facts, dict) else None
            lengths.setdefault(task, {})[width] = _number(path, task, value, 1.0, float(width))
    if not lengths:
        raise FileError(
            f"{path} has no setting with a fixed number of drafts: measure again with "
            f"`python benchmarks/demo_pair.py`, or give acceptance by task, as in {_EXAMPLE}"
        )
    return [Acceptance(task, lengths=widths) for task, widths in lengths.items()]


def _number(path: Path, task: str, value: object, least: float, most: float) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not least <= value <= most
    ):
        what = "a chance from 0 to 1" if most == 1.0 else f"tokens a step from 1 to {most:g}"
        raise FileError(f"{path}: {task} is {value!r}: it must be {what}")
    return float(value)
