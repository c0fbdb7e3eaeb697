"""What a quantised cache of the target does to its choices and to the acceptance of drafts.

python benchmarks/kv_types.py
python benchmarks/kv_types.py --look    # what the look adds to the first load, alone
"""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import common

import dspine
from dspine.default_pair import choose_pair
from dspine.engine.kv_types import agreement
from dspine.llama.model import Model
from dspine.machine import physical_cores

TYPES = ("f16", "q8_0", "q5_1", "q4_1", "q4_0")
"""Each for keys and values alike."""

DRAFTS = 4
LOOKS = 5


def main() -> None:
    """The same prompts with each type; the last line is one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.add_argument("--look", action="store_true", help="time the look for q8_0 alone")
    parser.set_defaults(count=3, predict=64)
    arguments = parser.parse_args()
    path, drafter = choose_pair(arguments.model, arguments.model_draft)
    if arguments.look:
        look = look_times(path, arguments.threads)
        common.save("kv_look", look, arguments.output)
        print(json.dumps(look))
        return
    rows, document = [], {}
    prompts = common.prompts(count=arguments.count)
    for kind in TYPES:
        with Model.load(path) as model:
            started = perf_counter()
            share = agreement(model, kind, kind, n_threads=arguments.threads)
            look_ms = (perf_counter() - started) * 1000.0
        steps = tokens = drafted = accepted = 0
        with dspine.load(
            path,
            drafter,
            proposer="dspine",
            spec_draft_n_max=DRAFTS,
            n_threads=arguments.threads,
            flash_attention=True,
            cache_type_k=kind,
            cache_type_v=kind,
            calibrate=False,
            check_cache=False,
        ) as engine:
            for _, _, prompt in prompts:
                stats = engine.complete(prompt, max_tokens=arguments.predict).stats
                steps, tokens = steps + stats.steps, tokens + stats.tokens
                drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
        document[kind] = {
            "agreement": round(share, 4),
            "look_ms": round(look_ms, 1),
            "acceptance_length": round(tokens / steps, 4),
            "acceptance_rate": round(accepted / drafted, 4),
        }
        found = document[kind]
        rows.append((kind, *(f"{found[name]:.3g}" for name in found)))
    print(common.table(("type", "agreement", "look ms", "length", "rate"), rows))
    common.save(
        "kv_types",
        {"drafts": DRAFTS, "prompts": len(prompts), "types": document},
        arguments.output,
    )
    print(json.dumps(document))


def look_times(path: Path, threads: int | None) -> dict[str, Any]:
    """Milliseconds of loading the target, and of the look for a q8_0 cache after that."""
    started = perf_counter()
    with Model.load(path) as model:
        load_ms = (perf_counter() - started) * 1000.0
        looks = []
        for _ in range(LOOKS):
            started = perf_counter()
            agreement(model, "q8_0", "q8_0", n_threads=threads)
            looks.append(round((perf_counter() - started) * 1000.0, 1))
    return {
        "threads": threads or physical_cores(),
        "load_ms": round(load_ms, 1),
        "first_look_ms": looks[0],
        "looks_ms": looks,
    }


if __name__ == "__main__":
    main()
