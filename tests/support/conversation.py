"""A conversation with the default pair, with what is in memory reused and cold.

Run as a program it prints one JSON object. It runs in a process of its own, because which
kernels compute is decided when the library is loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import dspine
from dspine.engine.events import Finish, Prefill, Step
from dspine.llama.library import find_library

QUESTIONS = (
    "Write a Python function that reverses a string.",
    "Now add a docstring and type hints to it.",
    "Explain in two sentences how it works.",
)
TOKENS = 40


def answers(session: dspine.Session, cache_prompt: bool) -> list[dict[str, Any]]:
    rows = []
    for question in QUESTIONS:
        row: dict[str, Any] = {"tokens": []}
        for event in session.ask(question, max_tokens=TOKENS, cache_prompt=cache_prompt):
            if isinstance(event, Prefill):
                row |= {"prompt": event.tokens, "reused": event.reused}
            elif isinstance(event, Step):
                row["tokens"] += event.tokens
            elif isinstance(event, Finish):
                row["acceptance_length"] = event.stats.acceptance_length
                row["disabled"] = event.stats.disabled_reason
        rows.append(row)
    return rows


def main(target: Path, drafter: Path) -> dict[str, Any]:
    with dspine.load(
        target,
        drafter,
        proposer="dspine",
        spec_draft_n_max=4,
        n_ctx=1024,
        n_threads=1,
        calibrate=False,
    ) as engine:
        return {
            "kernels": find_library().kernels.family,
            "reused": answers(dspine.Session(engine), True),
            "cold": answers(dspine.Session(engine), False),
        }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))) + "\n")
