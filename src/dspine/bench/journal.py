"""Keeps measurements as they come: a line each, so that a run can be broken off and continued."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
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
        self._measurements: dict[Cell, Measurement] = {}
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
                    one = Measurement.from_json(row)
                    self._measurements[one.cell] = one
            except (ValueError, KeyError, TypeError) as error:
                raise FileError(
                    f"line {number} of {self.path} is damaged: begin anew with --anew"
                ) from error
        self.provenance = [*earlier, *self.provenance]
        return kept

    @property
    def measurements(self) -> list[Measurement]:
        """All so far; what was measured again counts once."""
        return list(self._measurements.values())

    @property
    def done(self) -> set[Cell]:
        """What need not be measured again."""
        return set(self._measurements)

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Keep what was measured at once; it is on disk when this returns."""
        self._measurements |= {one.cell: one for one in measurements}
        self._write(*(one.to_json() for one in measurements))

    def _write(self, *rows: Mapping[str, Any]) -> None:
        lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
        try:
            self._stream.write("".join(f"{line}\n" for line in lines))
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
