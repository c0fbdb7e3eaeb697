"""Measurements of a pair that are kept for later starts, under all that they depend on."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dspine.measured import FORMAT, Calibration


def cached(
    key: Mapping[str, Any],
    folder: Path,
    measure: Callable[[], Calibration],
    *,
    anew: bool = False,
) -> tuple[Calibration, bool]:
    """The calibration kept under `key`, else a new one; (calibration, whether it was kept).

    `anew` measures in any case and replaces what is kept. A damaged file counts as none. A
    folder that cannot be written costs the next start a measurement, nothing else. Noisy
    measurements and empty ones are not kept.
    """
    text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
    file = folder / "calibration" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["key"] == text and not anew:
            return Calibration.from_json(document), True
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # nothing usable is there: measure
    calibration = measure()
    if calibration.rows_ms and not calibration.is_noisy:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8"
            ) as out:
                json.dump({"key": text, **calibration.to_json()}, out)
            Path(out.name).replace(file)
    return calibration, False


def file_identity(path: Path) -> list[str | int]:
    """Name, size and time of a file: what a cached measurement is tied to."""
    facts = path.stat()
    return [path.name, facts.st_size, facts.st_mtime_ns]
