"""What a step costs on a device: from published figures, or from what was measured here."""

from __future__ import annotations

import difflib
import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspine.errors import FileError, UsageError
from dspine.measured import Calibration, CostTable, interpolate
from dspine.plan.bounds import Bounds


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Costs on a device, for one target and drafter.

    Either `table` was measured: target rows and drafts apart, at two depths. Or only whole steps
    are known: `steps_ms[w]` is draft and verify of width w together, width 1 a plain token.
    """

    name: str
    source: str
    steps_ms: Mapping[int, float] = field(default_factory=dict)
    table: CostTable | None = None

    @property
    def widest(self) -> int:
        """The largest width that something is known of."""
        if self.table is not None:
            return max(self.table.draft_ms, default=1)
        return max(self.steps_ms)

    def step(self, width: int, depth: int = 0) -> Bounds:
        """Milliseconds of draft and verify of `width` rows after `depth` tokens of context (0: as
        measured).

        Between known whole steps the cost is bounded by them: more rows never cost less.
        UsageError beyond the widest one that is known.
        """
        if self.table is not None:
            ms = self._rows(width, depth)
            ms += interpolate(self.table.draft_ms, width) if width > 1 else 0.0
            return Bounds.known(ms)
        if not 1 <= width <= self.widest:
            raise UsageError(
                f"width {width} is not known on {self.name}: there are figures for widths "
                f"{', '.join(str(w) for w in sorted(self.steps_ms))}"
            )
        known = sorted(self.steps_ms)
        upper = known[bisect_left(known, width)]
        lower = width if upper == width else known[bisect_left(known, width) - 1]
        return Bounds(self.steps_ms[lower], self.steps_ms[upper])

    def plain_ms(self, depth: int = 0) -> float:
        """A token without drafts."""
        return self.step(1, depth).most

    def _rows(self, width: int, depth: int) -> float:
        assert self.table is not None
        base = interpolate(self.table.rows_ms, width)
        if not depth or not self.table.slope_ms:
            return base
        slope = interpolate(self.table.slope_ms, width)
        return max(base + slope * (depth - self.table.depth), 0.5 * base)


DEVICES: Mapping[str, DeviceModel] = {
    "rtx-3090": DeviceModel(
        name="rtx-3090",
        source="figures published by aj9o9 for Qwen3.8-27B Q4_K_M with its DSpine drafter on "
        "one RTX 3090: 28.2 tokens/s plainly, and 59.5 ms a step of 15 drafts, which follows from "
        "the speed and the tokens a step on code",
        steps_ms={1: 1000.0 / 28.2, 16: 59.5},
    ),
}


def device_model(
    name: str, folder: Path, target: Path | None = None, drafter: Path | None = None
) -> DeviceModel:
    """A preset by name, a calibration by its file, or `here`: the newest that is kept in `folder`
    for the pair (any pair, where `target` is None).

    UsageError for an unknown name, FileError for a file that is no calibration.
    """
    preset = DEVICES.get(name.lower())
    if preset is not None:
        return preset
    if name.lower() == "here":
        return _kept(folder, target, drafter)
    path = Path(name).expanduser()
    if path.suffix == ".json":
        return read_calibration(path)
    known = (*DEVICES, "here")
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise UsageError(
        f"--device is {name!r}, which is not known{hint}: choose one of {', '.join(known)}, or "
        f"name a calibration file"
    )


def read_calibration(path: Path) -> DeviceModel:
    """The costs in a file that a start of dspine has kept; FileError for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        calibration = Calibration.from_json(document)
        key = json.loads(document["key"])
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(
            f"{path} is not a calibration that dspine kept: name a file of the folder calibration "
            f"in its cache folder"
        ) from error
    return _model(path, calibration, key if isinstance(key, dict) else {})


def _kept(folder: Path, target: Path | None, drafter: Path | None) -> DeviceModel:
    found: list[tuple[float, Path]] = []
    for path, key in _keys(folder):
        wanted = target is None or _named(key.get("target")) == target.name
        wanted &= drafter is None or _named(key.get("drafter")) == drafter.name
        if wanted:
            found.append((path.stat().st_mtime, path))
    if not found:
        what = f" of {target.name}" if target is not None else ""
        raise FileError(
            f"no measurement{what} is kept in {folder / 'calibration'}: run `dspine doctor` or "
            f"`dspine run` with this pair first"
        )
    return read_calibration(max(found)[1])


def _keys(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Kept calibrations and what they belong to; damaged ones are passed over."""
    for path in sorted((folder / "calibration").glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            key = json.loads(document["key"])
            Calibration.from_json(document)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if isinstance(key, dict):
            yield path, key


def _model(path: Path, calibration: Calibration, key: Mapping[str, Any]) -> DeviceModel:
    flash = min(
        calibration.rows_ms, key=lambda on: calibration.rows_ms[on][max(calibration.rows_ms[on])]
    )
    pair = " and ".join(filter(None, (_named(key.get("target")), _named(key.get("drafter")))))
    return DeviceModel(
        name=str(key.get("cpu") or path.name),
        source=f"measured by dspine: {pair or path.name}, flash attention "
        f"{'on' if flash else 'off'}, {calibration.n_threads or 'all'} threads",
        table=calibration.costs(flash),
    )


def _named(identity: object) -> str:
    return str(identity[0]) if isinstance(identity, list) and identity else ""
