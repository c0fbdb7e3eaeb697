"""Size, draft time and acceptance of the default drafter in each type that `dspine quantize` makes.

python benchmarks/quantize.py -md drafter-f32.gguf

The file is the drafter's float original (`dspine convert --dtype f32` of its checkpoint), which the
package does not hold.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import common
from runners import acceptance_of, fixed_drafts

from dspine.default_pair import default_target
from dspine.files.quantise import MIXES, quantise_drafter
from dspine.llama.library import find_library
from dspine.machine import physical_cores

DRAFTS = 4


def main() -> None:
    """The same prompts with each type; the last line is one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.set_defaults(count=3, predict=64)
    arguments = parser.parse_args()
    original = arguments.model_draft
    if original is None:
        parser.error("-md is missing: name the drafter's f32, f16 or bf16 original")
    target = arguments.model or default_target()
    find_library()
    document: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / f"{name}.gguf" for name in MIXES}
        for name, path in paths.items():
            quantise_drafter(original, path, name, threads=physical_cores())
        # There and back again: a machine that slows down meanwhile would favour the first.
        for name in (*MIXES, *reversed(list(MIXES))):
            found = measure(target, paths[name], arguments)
            before = document.setdefault(name, found)
            before["draft_ms"] = min(before["draft_ms"], found["draft_ms"])
    rows = [(name, *(f"{x:.4g}" for x in found.values())) for name, found in document.items()]
    print(common.table(("type", "MB", "draft ms", "length", "rate"), rows))
    result = {"drafts": DRAFTS, "prompts": 3 * arguments.count, "types": document}
    common.save("quantize", result, arguments.output)
    print(json.dumps(document))


def measure(target: Path, drafter: Path, arguments: Any) -> dict[str, float]:
    """One type: megabytes, median milliseconds of a draft, tokens per verify, accepted share."""
    found = fixed_drafts(target, drafter, DRAFTS, arguments)
    length, rate = acceptance_of(found)
    return {
        "megabytes": round(drafter.stat().st_size / 1e6, 2),
        "draft_ms": round(statistics.median(stats.draft_ms / stats.steps for stats in found), 3),
        "acceptance_length": length,
        "acceptance_rate": rate,
    }


if __name__ == "__main__":
    main()
