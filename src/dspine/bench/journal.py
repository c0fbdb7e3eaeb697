"""Keeps measurements as they come: a line each, so that a run can be broken off and continued."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from dspine.bench.measurement import FORMAT, BenchPlan, Cell, Measurement
from dspine.errors import FileError
from dspine.files.atomic import reason


class Journal:
    """A file of JSON lines: the plan and its provenance first, then one line a measurement."""

    def __init__(self, path: Path, plan: BenchPlan, provenance: Mapping[str, Any]) -> None:
        """Begin, or continue what is there when it is of the same plan.

        Raises FileError when the file is of another plan, damaged, or cannot be written. The
        last line may be cut off, as a kill leaves it; it is measured again.
        """
        self.path = path
        self.measurements: list[Measurement] = []
        self.provenance: list[Mapping[str, Any]] = [provenance]
        """One for each sitting of the run."""
        complete = self._read(plan) if path.exists() else ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = path.open("w", encoding="utf-8")
            self._stream.write(complete)
        except OSError as error:
            raise FileError(f"cannot write {path}: {reason(error)}") from error
        self._write({"format": FORMAT, "plan": plan.key, "provenance": provenance})

    def _read(self, plan: BenchPlan) -> str:
        """Take over what is there; returns its complete lines."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"cannot read {self.path}: {error}: move it away") from error
        kept = text[: text.rfind("\n") + 1]
        earlier: list[Mapping[str, Any]] = []
        for number, line in enumerate(kept.split("\n")[:-1], 1):
            try:
                row = json.loads(line)
                if "plan" in row:
                    if row["plan"] != plan.key or row["format"] != FORMAT:
                        raise FileError(
                            f"{self.path} holds measurements of another plan: name another "
                            f"output, or begin anew with --anew"
                        )
                    earlier.append(row["provenance"])
                else:
                    self.measurements.append(Measurement.from_json(row))
            except (ValueError, KeyError, TypeError) as error:
                raise FileError(
                    f"line {number} of {self.path} is damaged: begin anew with --anew"
                ) from error
        self.provenance = [*earlier, *self.provenance]
        return kept

    @property
    def done(self) -> set[Cell]:
        """What need not be measured again."""
        return {measurement.cell for measurement in self.measurements}

    def add(self, measurement: Measurement) -> None:
        """Keep one measurement; it is on disk when this returns."""
        self.measurements.append(measurement)
        self._write(measurement.to_json())

    def _write(self, row: Mapping[str, Any]) -> None:
        try:
            self._stream.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise FileError(f"cannot write {self.path}: {reason(error)}") from error

    def finish(self) -> None:
        """The run is complete and its result is written elsewhere: remove the journal."""
        self.close()
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
