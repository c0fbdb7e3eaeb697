"""Answers of one engine alone and several at once, as facts for a test to judge; a program.

    python -m tests.support.several TARGET DRAFTER

prints one JSON object. It runs in a process of its own, because which kernels compute is decided
once a process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dspine
from dspine.engine.engine import Engine
from dspine.engine.events import Finish, Step
from dspine.engine.llama_target import LlamaTargets
from dspine.engine.scheduler import CHUNK
from dspine.engine.target import Rows

TOKENS = 32

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
    "required": ["city", "people"],
}

REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Write a Python function that checks whether a string is a palindrome.", {}),
    ("Explain in two sentences why the sky is blue.", {"seed": 7, "temperature": 0.8}),
    ("Name a large city. Answer with JSON that has the fields city and people.", {"json": True}),
    ("Repeat this line four times: the quick brown fox jumps over the lazy dog", {}),
    ("What is 17 + 25?", {"plain": True}),
    ("Tell me a short story about a lighthouse keeper and his cat.", {"seed": 8}),
    (
        "Which of these is the odd one out? "
        + " ".join(f"In year {n} there were {3 * n % 17} ships and one cat." for n in range(12)),
        {},
    ),
)
"""More than there are slots, so that later ones begin while others answer; the last prompt is read
in several pieces."""


@dataclass(frozen=True)
class Outcome:
    """What a request gave, and its drafts."""

    tokens: list[int]
    text: str
    reason: str
    drafted: int
    accepted: int


def options(wishes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `Engine.generate`."""
    made: dict[str, Any] = {"max_tokens": TOKENS}
    if "seed" in wishes:
        made["sampling"] = dspine.SamplingOptions(
            temperature=wishes.get("temperature", 1.0), seed=wishes["seed"]
        )
    if "json" in wishes:
        made["grammar"] = dspine.GrammarOptions.json_schema(SCHEMA)
    if "plain" in wishes:
        made["plain"] = True
    return made


def one_after_the_other(
    engine: Engine, requests: Sequence[tuple[Any, Mapping[str, Any]]]
) -> list[Outcome]:
    """Each request on the engine itself, with an empty memory."""
    found = []
    for prompt, wishes in requests:
        result = engine.complete(prompt, cache_prompt=False, **options(wishes))
        stats = result.stats
        found.append(
            Outcome(list(result.tokens), result.text, result.reason, stats.drafted, stats.accepted)
        )
    return found


def at_once(
    engine: Engine, requests: Sequence[tuple[Any, Mapping[str, Any]]]
) -> tuple[list[Outcome], int]:
    """All requests on a scheduler as slots get free; and how many answered at once at most."""
    scheduler = engine.scheduler()
    waiting, numbers = list(enumerate(requests)), dict[int, int]()
    steps: dict[int, list[Step]] = {index: [] for index in range(len(requests))}
    found: dict[int, Outcome] = {}
    most = 0
    while len(found) < len(requests):
        while waiting and scheduler.free_slots():
            index, (prompt, wishes) = waiting.pop(0)
            numbers[scheduler.start(prompt, **options(wishes))] = index
        most = max(most, sum(facts.state == "answer" for facts in scheduler.slots()))
        for number, event in scheduler.step():
            if isinstance(event, Exception):
                raise event
            index = numbers[number]
            if isinstance(event, Step):
                steps[index].append(event)
            elif isinstance(event, Finish):
                found[index] = Outcome(
                    [token for step in steps[index] for token in step.tokens],
                    "".join(step.text for step in steps[index]),
                    event.reason,
                    event.stats.drafted,
                    event.stats.accepted,
                )
    scheduler.close()
    return [found[index] for index in range(len(requests))], most


@contextmanager
def counted() -> Iterator[list[int]]:
    """Of every decode with a piece of a prompt among other rows, how many sequences it had."""
    decode, found = LlamaTargets.decode, list[int]()

    def counting(self: LlamaTargets, parts: Sequence[Rows]) -> None:
        if any(part.logits == "none" and len(part.tokens) == CHUNK for part in parts):
            found.append(len(parts))
        decode(self, parts)

    with patch.object(LlamaTargets, "decode", counting):
        yield found


def facts(target: Path, drafter: Path, requests: Any, **load: Any) -> list[dict[str, Any]]:
    """For every way to propose what the requests gave alone and at once."""
    rows = []
    for proposer in ("none", "ngram", "dspine", "auto"):
        with dspine.load(
            target, drafter, proposer=proposer, parallel=4, n_threads=1, calibrate=False, **load
        ) as engine:
            alone = one_after_the_other(engine, requests)
            with counted() as mixed:
                several, most = at_once(engine, requests)
        for one, other in zip(alone, several, strict=True):
            rows.append(
                {
                    "proposer": proposer,
                    "same": (one.tokens, one.text, one.reason)
                    == (other.tokens, other.text, other.reason),
                    "text": one.text,
                    "other": other.text,
                    "drafted": [one.drafted, other.drafted],
                    "accepted": [one.accepted, other.accepted],
                    "most": most,
                    "mixed": len(mixed),
                }
            )
    return rows


def main() -> None:
    """Everything about the pair named on the command line."""
    target, drafter = map(Path, sys.argv[1:])
    found = facts(target, drafter, REQUESTS, n_ctx=4096, spec_draft_n_max=3)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
