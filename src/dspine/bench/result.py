"""The document of a finished (or broken off) run: provenance, plan, measurements, summary."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dspine import machine
from dspine.bench.measurement import FORMAT, READABLE, BenchPlan, Measurement
from dspine.bench.summary import Row, summarise
from dspine.errors import FileError
from dspine.files.atomic import atomic_write, reason
from dspine.files.fingerprint import file_fingerprint

_PACKAGES = ("dspine", "llama-cpp-python", "numpy")


@dataclass(frozen=True, slots=True)
class BenchResult:
    """A run's result. `rows` follow from `measurements`, `plain` names what they compare with."""

    kind: str
    is_complete: bool
    plain: str | None
    plan: Mapping[str, Any]
    facts: Mapping[str, Mapping[str, Any]]
    """What each configuration turned out to be on this machine."""
    provenance: tuple[Mapping[str, Any], ...]
    """Of each sitting of the run."""
    measurements: tuple[Measurement, ...]

    @property
    def rows(self) -> list[Row]:
        """The figures, computed from the measurements."""
        return summarise(self.measurements, self.plain)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": self.kind,
            "complete": self.is_complete,
            "plain": self.plain,
            "provenance": [dict(one) for one in self.provenance],
            "plan": dict(self.plan),
            "configurations": {name: dict(facts) for name, facts in self.facts.items()},
            "summary": [row.to_json() for row in self.rows],
            "measurements": [one.to_json() for one in self.measurements],
        }

    def write(self, path: Path) -> None:
        """Write the document atomically; an earlier one there is replaced."""
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False)
        with atomic_write(path, overwrite=True) as stream:
            stream.write(text.encode() + b"\n")


def collect(
    plan: BenchPlan,
    facts: Mapping[str, Mapping[str, Any]],
    provenance: Sequence[Mapping[str, Any]],
    measurements: Sequence[Measurement],
) -> BenchResult:
    """The result of what was measured so far."""
    plain = next((one.name for one in plan.configurations if one.is_plain), None)
    return BenchResult(
        kind=plan.kind,
        is_complete=set(plan.cells()) == {one.cell for one in measurements},
        plain=plain,
        plan=plan.to_json(),
        facts=facts,
        provenance=tuple(provenance),
        measurements=tuple(measurements),
    )


def read_result(path: Path) -> BenchResult:
    """Read a document that `BenchResult.write` wrote; FileError for anything else."""
    if not path.exists():
        raise FileError(f"there is no file {path}: check the name")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        raise FileError(
            f"{path} is no result of `dspine bench`: it is not JSON, name the JSON file that one "
            "wrote"
        ) from error
    if not isinstance(document, dict) or "measurements" not in document:
        raise FileError(f"{path} is no result of `dspine bench` or `dspine eval`: name such a file")
    if document.get("format") not in READABLE:
        raise FileError(
            f"{path} has format {document.get('format')!r}, this dspine reads {FORMAT}: measure "
            f"again, or use the dspine that wrote it"
        )
    try:
        return BenchResult(
            kind=str(document["kind"]),
            is_complete=bool(document["complete"]),
            plain=document["plain"],
            plan=dict(document["plan"]),
            facts=dict(document["configurations"]),
            provenance=tuple(document["provenance"]),
            measurements=tuple(Measurement.from_json(row) for row in document["measurements"]),
        )
    except FileError as error:
        raise FileError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(
            f"{path} is damaged ({type(error).__name__}: {error}): measure again"
        ) from error


def provenance(files: Sequence[Path], library: Mapping[str, Any]) -> dict[str, Any]:
    """Where numbers come from: time, command, machine, versions, and the files by fingerprint.

    `library` describes the llama.cpp build. A fingerprint covers a file's size, its header and
    spread pieces (`dspine.files.fingerprint`), so that it is quick for any size.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["dspine", *(_short(word) for word in sys.argv[1:])]),
        "machine": machine_facts(),
        "versions": versions(),
        "library": dict(library),
        "files": {path.name: file_fingerprint(path) for path in files},
    }


def machine_facts() -> dict[str, Any]:
    """Processor, cores and system of this machine."""
    return {
        "cpu": machine.cpu_model(),
        "cores": machine.physical_cores(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _short(word: str) -> str:
    """Results travel: the folders of this machine are nobody's business."""
    return Path(word).name if "/" in word and Path(word).is_absolute() else word


def versions() -> dict[str, str]:
    """Of Python and of what decodes."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
