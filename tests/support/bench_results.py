"""Measurements with chosen figures, and an answerer that replies by a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dspine.bench.configuration import Configuration
from dspine.bench.measurement import BenchPlan, Cell, Measurement
from dspine.bench.prompts import BenchPrompt
from dspine.bench.result import BenchResult, collect
from dspine.errors import LibraryError

FACTS: Mapping[str, Any] = {"drafting_off": None, "notices": [], "proposer": "auto"}


def measurement(
    configuration: str = "plain",
    prompt: str = "p0",
    *,
    task: str = "maths",
    repeat: int = 0,
    temperature: float = 0.0,
    depth: int = 0,
    concurrency: int = 1,
    place: int = 0,
    span_ms: float | None = None,
    tokens: tuple[int, ...] = (1, 2, 3, 4),
    wall_ms: float = 40.0,
    steps: int = 4,
    drafted_at: tuple[int, ...] = (),
    accepted_at: tuple[int, ...] = (),
) -> Measurement:
    """An answer; what is not named has a plain value."""
    return Measurement(
        cell=Cell(configuration, task, prompt, repeat, temperature, depth, concurrency, place),
        tokens=tokens,
        reason="length",
        counted=len(tokens),
        wall_ms=wall_ms,
        span_ms=span_ms,
        steps=steps,
        drafted=sum(drafted_at),
        accepted=sum(accepted_at),
        draft_ms=wall_ms * 0.2,
        verify_ms=wall_ms * 0.7,
        host_ms=wall_ms * 0.1,
        prompt_tokens=10,
        prefill_ms=20.0,
        drafted_at_slot=drafted_at,
        accepted_at_slot=accepted_at,
        peak_mib=200.0 + len(configuration),
    )


def plan(
    *names: str, prompts: int = 2, repeats: int = 1, kind: str = "bench", **options: Any
) -> BenchPlan:
    """A plan of configurations by name; `plain` is plain."""
    made = tuple(
        Configuration(name, {"proposer": "none" if name == "plain" else "auto"}) for name in names
    )
    asked = tuple(BenchPrompt("maths", f"p{i}", f"What is {i} + {i}?") for i in range(prompts))
    chosen: dict[str, Any] = {
        "temperatures": (0.0,),
        "depths": (0,),
        "max_tokens": 8,
        "seed": 0,
        **options,
    }
    return BenchPlan(kind=kind, configurations=made, prompts=asked, repeats=repeats, **chosen)


def result(*measurements: Measurement, **options: Any) -> BenchResult:
    """A result of these measurements, over a plan with their configurations."""
    names = dict.fromkeys(one.cell.configuration for one in measurements)
    return collect(plan(*names, **options), {}, [{"date": "a day"}], measurements)


class FakeAnswerer:
    """Replies with the fields of `reply(configuration, request)`; counts what it was asked."""

    facts: Mapping[str, Any] = FACTS

    def __init__(
        self,
        configuration: Configuration,
        asked: list[tuple[str, Mapping[str, Any]]],
        reply: Callable[[str, Mapping[str, Any]], Measurement],
    ) -> None:
        self.name = configuration.name
        self.is_open = True
        self.at_once: list[int] = []
        self._asked = asked
        self._reply = reply

    def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if not self.is_open:
            raise LibraryError("closed")
        self._asked += [(self.name, request) for request in requests]
        self.at_once.append(len(requests))
        rows = [self._reply(self.name, request).to_json() for request in requests]
        return [{k: v for k, v in row.items() if k not in Cell.__slots__} for row in rows]

    def close(self) -> None:
        self.is_open = False
