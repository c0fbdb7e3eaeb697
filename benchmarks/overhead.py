"""Where a step's milliseconds go: draft, verify, and what the library was not at work for.

The library's share is timed on its own, around every decode of the target and every graph of the
drafter; the rest of a step (proposing in Python, masks, arg-max, text) is the host's share.

python benchmarks/overhead.py
"""

from __future__ import annotations

import json
from time import perf_counter
from typing import Any

import common

import dspine
from dspine.default_pair import choose_pair
from dspine.engine.events import Finish, Prefill
from dspine.ggml.graph import Graph
from dspine.llama.context import Context

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {"proposer": "none"},
    "ngram, 7 drafts": {"proposer": "ngram", "spec_draft_n_max": 7},
    "dspine, 3 drafts": {"proposer": "dspine", "spec_draft_n_max": 3},
    "dspine, 7 drafts": {"proposer": "dspine", "spec_draft_n_max": 7},
    "auto": {"proposer": "auto"},
}


COLUMNS = ("draft", "verify", "host", "library", "wall")


class LibraryClock:
    """Milliseconds spent in target decodes and drafter graphs."""

    def __init__(self) -> None:
        self.ms = 0.0
        for owner, name in ((Context, "decode"), (Context, "wait"), (Graph, "compute")):
            self._time(owner, name)

    def _time(self, owner: type, name: str) -> None:
        original = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            started = perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                self.ms += (perf_counter() - started) * 1000.0

        setattr(owner, name, timed)


def main() -> None:
    """Run every configuration on the same prompts; the last line is one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.set_defaults(count=3)
    arguments = parser.parse_args()
    model, drafter = choose_pair(arguments.model, arguments.model_draft)
    rows, document, clock = [], {}, LibraryClock()
    for name, options in CONFIGURATIONS.items():
        with dspine.load(model, drafter, n_threads=arguments.threads, **options) as engine:
            engine.complete("Say hello.", max_tokens=16)
            draft = verify = host = wall = library = 0.0
            steps = 0
            for _, _, prompt in common.prompts(count=arguments.count):
                for event in engine.generate(prompt, max_tokens=arguments.predict):
                    if isinstance(event, Prefill):
                        clock.ms = 0.0
                    elif isinstance(event, Finish):
                        stats, library = event.stats, library + clock.ms
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
            "library_ms": library / steps,
            "host_share": (wall - library) / wall,
            "parts_to_wall": parts / wall,
        }
        document[name] = {key: round(value, 4) for key, value in figures.items()}
        rows.append(
            (
                name,
                *(f"{figures[f'{key}_ms']:.2f}" for key in COLUMNS),
                f"{figures['host_share']:.1%}",
            )
        )
    print(common.table(("", *(f"{key} ms" for key in COLUMNS), "host share"), rows))
    common.save("overhead", {"configurations": document}, arguments.output)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
