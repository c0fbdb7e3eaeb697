"""Where a step's milliseconds go: draft, verify, and the host's share, which should be small.

python benchmarks/overhead.py
"""

from __future__ import annotations

import json
from typing import Any

import common

import dspine
from dspine.default_pair import choose_pair

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"proposer": "none"},
    "ngram, 7 drafts": {"proposer": "ngram", "spec_draft_n_max": 7},
    "dspine, 3 drafts": {"proposer": "dspine", "spec_draft_n_max": 3},
    "dspine, 7 drafts": {"proposer": "dspine", "spec_draft_n_max": 7},
    "auto": {"proposer": "auto"},
}


def main() -> None:
    """Run every configuration on the same prompts; the last line is one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.set_defaults(count=3)
    arguments = parser.parse_args()
    model, drafter = choose_pair(arguments.model, arguments.model_draft)
    rows, document = [], {}
    for name, options in CONFIGURATIONS.items():
        with dspine.load(model, drafter, n_threads=arguments.threads, **options) as engine:
            engine.complete("Say hello.", max_tokens=16)
            draft = verify = host = wall = 0.0
            steps = 0
            for _, _, prompt in common.prompts(count=arguments.count):
                stats = engine.complete(prompt, max_tokens=arguments.predict).stats
                draft, verify = draft + stats.draft_ms, verify + stats.verify_ms
                host, wall = host + stats.host_ms, wall + stats.wall_ms
                steps += stats.steps
        parts = draft + verify + host
        figures = {
            "steps": steps,
            "draft_ms": draft / steps,
            "verify_ms": verify / steps,
            "host_ms": host / steps,
            "wall_ms": wall / steps,
            "host_share": (wall - draft - verify) / wall,
            "parts_to_wall": parts / wall,
        }
        document[name] = {key: round(value, 4) for key, value in figures.items()}
        rows.append(
            (
                name,
                *(f"{figures[key]:.2f}" for key in ("draft_ms", "verify_ms", "host_ms", "wall_ms")),
                f"{figures['host_share']:.1%}",
            )
        )
    print(common.table(("", "draft ms", "verify ms", "host ms", "wall ms", "host"), rows))
    common.save("overhead", {"configurations": document}, arguments.output)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
