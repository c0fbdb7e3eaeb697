"""The default pair for tests: held-out prompts, and answers with everything that was decoded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from dspine.engine.compare import Answer
from dspine.engine.engine import Engine
from dspine.engine.events import Finish, Prefill, Step
from dspine.engine.llama_target import LlamaTarget
from dspine.engine.trace import Trace
from dspine.llama.context import Context
from dspine.machine import usable_cores

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts"
TASKS = ("gsm8k", "humaneval", "mt-bench")
NOTED = 16
"""Tokens whose logits are noted at every choice."""


class NotingTarget(LlamaTarget):
    """A target that keeps the best logits of every row that was asked for."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.noted: list[dict[int, float]] = []

    def argmax(self, row: int) -> int:
        self._note(row)
        return super().argmax(row)

    def follow(self, row: int, drafts: Sequence[int]) -> Sequence[int]:
        tokens = super().follow(row, drafts)
        for place in range(row, row + len(tokens)):
            self._note(place)
        return tokens

    def _note(self, row: int) -> None:
        logits = self.logits(row)
        best = np.argpartition(logits, -NOTED)[-NOTED:]
        self.noted.append({int(token): float(logits[token]) for token in best})


@dataclass(frozen=True)
class HeldOut:
    """A prompt that no drafter was trained on."""

    id: str
    prompt: str


@dataclass(frozen=True)
class Outcome:
    """An answer and all that was decoded for it."""

    answer: Answer
    trace: Trace
    steps: tuple[Step, ...]
    logits: tuple[dict[int, float], ...]
    """Of the best tokens where each token of the answer was chosen."""
    outside_ms: float
    """Time of the steps by a clock outside of the engine."""


def held_out(task: str, count: int | None = None) -> list[HeldOut]:
    """The first `count` prompts of a task (all 20 without)."""
    lines = (PROMPTS / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [HeldOut(row["id"], row["prompt"]) for row in map(json.loads, lines)]


def respond(
    engine: Engine, target: NotingTarget, prompt: str, *, max_tokens: int, plain: bool = False
) -> Outcome:
    """One answer of `engine`, which decodes with `target`, at temperature 0."""
    trace, steps, started = Trace(), list[Step](), 0.0
    target.noted.clear()
    for event in engine.generate(prompt, max_tokens=max_tokens, plain=plain, trace=trace):
        if isinstance(event, Prefill):
            started = perf_counter()
        elif isinstance(event, Step):
            steps.append(event)
        elif isinstance(event, Finish):
            outside_ms = (perf_counter() - started) * 1000.0
            tokens = tuple(token for step in steps for token in step.tokens)
            text = "".join(step.text for step in steps)
            answer = Answer(tokens, text, event.reason, event.stats)
            # Rows behind the end of the answer may have been looked at, and count no more.
            noted = tuple(target.noted[: len(tokens)])
            assert len(noted) == len(tokens), "a token came from no row"
            return Outcome(answer, trace, tuple(steps), noted, outside_ms)
    raise AssertionError("the answer had no end")


def decoded_alone(target: LlamaTarget, prompt: Sequence[int], outcome: Outcome) -> list[int]:
    """What `target`, whose memory begins with the prompt, chooses in the batches of `outcome`.

    Checks on the way that every row before a choice holds the prompt and the answer so far:
    then the choices are the target's own greedy continuation in those batch shapes.
    """
    known, position = [*prompt, *outcome.answer.tokens], len(prompt) - 1
    assert [token for chunk in outcome.trace.chunks for token in chunk] == known[:position]
    assert target.trim(position)
    chosen: list[int] = []
    for step in outcome.trace.steps:
        assert (step.position, step.first_row) == (position, 0)
        assert list(step.tokens[: step.emitted]) == known[position : position + step.emitted]
        target.decode(step.tokens, position, "all")
        chosen += [target.argmax(row) for row in range(step.emitted)]
        position += step.emitted
        assert target.trim(position)
    return chosen


def fitting_threads(context: Context) -> int:
    """As many threads as decode fastest now, set on `context`, whose memory it empties.

    Two on a machine with other work can be many times slower than one: they wait for each other.
    """
    target = LlamaTarget(context)

    def best_of_three(count: int, enough: float) -> float:
        context.set_threads(count)
        best = float("inf")
        for _ in range(3):
            target.clear()
            started = perf_counter()
            target.decode((5, 6, 7, 8), 0, "all")
            spent = perf_counter() - started
            best = min(best, spent)
            if spent > enough:
                break
        target.clear()
        return best

    fastest, time = 1, best_of_three(1, float("inf"))
    for count in range(2, usable_cores() + 1):
        spent = best_of_three(count, 2 * time)
        if spent < time:
            fastest, time = count, spent
    context.set_threads(fastest)
    return fastest
