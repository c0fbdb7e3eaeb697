"""Milliseconds of a whole target decode of n rows, with ggml's kernels and with ours.

Each setting is measured by `dspine doctor` in a process of its own, because kernels are plugged in
once per process. Run it on an idle machine:

    python benchmarks/decode_rows.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import common

PROGRAM = "import sys; from dspine.cli.main import main; sys.exit(main())"


def doctor(**environment: str) -> dict[str, Any]:
    """What `dspine doctor --json` finds under these variables."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "doctor", "--json"],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure both; the last line is one JSON document."""
    document: dict[str, Any] = {}
    for name, environment in {"ggml": {"DSPINE_KERNELS": "off"}, "dspine": {}}.items():
        found = doctor(**environment)
        for attention, rows in found["rows_ms_by_flash_attention"].items():
            document[f"{name}, flash attention {attention}"] = rows
    counts = list(next(iter(document.values())))
    rows = [(name, *(f"{ms[n]:.1f}" for n in counts)) for name, ms in document.items()]
    print(common.table(("rows", *counts), rows))
    common.save("decode_rows", {"ms": document})
    print(json.dumps(document))


if __name__ == "__main__":
    main()
