"""Measures a plan: configurations of a turn one after the other; each answer is kept at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Protocol

from dspine.bench.configuration import Configuration
from dspine.bench.journal import Journal
from dspine.bench.measurement import BenchPlan, Cell, Measurement
from dspine.bench.processes import Answerer
from dspine.bench.prompts import filler_text

WARM_UP = {"prompt": "Say hello.", "tokens": 16}
"""Fills buffers, starts threads and brings the files into memory before the first measurement."""


class Listener(Protocol):
    """Hears how a run goes on."""

    def loaded(self, name: str, facts: Mapping[str, Any]) -> None:
        """A configuration is ready."""

    def measured(self, measurement: Measurement, done: int, total: int) -> None:
        """One more answer."""


def measure(
    plan: BenchPlan,
    journal: Journal,
    start: Callable[[Configuration], Answerer],
    listener: Listener,
    *,
    one_at_a_time: bool = False,
) -> dict[str, Mapping[str, Any]]:
    """Measure what the journal does not hold yet; returns each configuration's facts.

    `start` makes the answerer of a configuration. With `one_at_a_time` a single configuration is
    loaded at any time, for targets of which several do not fit: they then alternate by repeats
    instead of by prompts.
    """
    done = journal.done
    batches = [batch for turn in plan.turns() for batch in turn if not done.issuperset(batch)]
    runner = _Runner(plan, journal, start, listener, batches)
    if one_at_a_time:
        for repeat in range(plan.repeats):
            for configuration in plan.configurations:
                runner.measure(
                    [
                        batch
                        for batch in batches
                        if batch[0].repeat == repeat
                        and batch[0].configuration == configuration.name
                    ]
                )
    else:
        runner.measure(batches)
    return runner.facts


class _Runner:
    def __init__(
        self,
        plan: BenchPlan,
        journal: Journal,
        start: Callable[[Configuration], Answerer],
        listener: Listener,
        batches: Sequence[tuple[Cell, ...]],
    ) -> None:
        self._plan = plan
        self._journal = journal
        self._start = start
        self._listener = listener
        self._total = len(plan.cells())
        self._done = self._total - sum(map(len, batches))
        self._prompts = {(prompt.task, prompt.id): prompt.prompt for prompt in plan.prompts}
        self._filler = filler_text() if any(plan.depths) else ""
        self.facts: dict[str, Mapping[str, Any]] = {}

    def measure(self, batches: Sequence[tuple[Cell, ...]]) -> None:
        """Load what these need, measure them in order, and end it again."""
        wanted = {batch[0].configuration for batch in batches}
        with ExitStack() as stack:
            answerers = {}
            for configuration in self._plan.configurations:
                if configuration.name in wanted:
                    answerer = self._start(configuration)
                    stack.callback(answerer.close)
                    answerers[configuration.name] = answerer
                    self.facts[configuration.name] = answerer.facts
                    self._listener.loaded(configuration.name, answerer.facts)
            for answerer in answerers.values():
                answerer.answer([self._request(None)] * max(self._plan.concurrencies))
            for batch in batches:
                requests = [self._request(cell) for cell in batch]
                replies = answerers[batch[0].configuration].answer(requests)
                measurements = [
                    Measurement.from_json({**reply, **asdict(cell)})
                    for cell, reply in zip(batch, replies, strict=True)
                ]
                self._journal.add(measurements)
                for measurement in measurements:
                    self._done += 1
                    self._listener.measured(measurement, self._done, self._total)

    def _request(self, cell: Cell | None) -> dict[str, Any]:
        if cell is None:
            return {
                "prompt": WARM_UP["prompt"],
                "raw": self._plan.raw,
                "max_tokens": WARM_UP["tokens"],
                "temperature": 0.0,
                "seed": 0,
                "depth": 0,
            }
        return {
            "prompt": self._prompts[cell.task, cell.prompt],
            "raw": self._plan.raw,
            "max_tokens": self._plan.max_tokens,
            "temperature": cell.temperature,
            "seed": self._plan.seed_of(cell),
            "depth": cell.depth,
            **({"filler": self._filler} if cell.depth else {}),
        }
