"""A started engine thread with several slots, whose answers stand still where a test wants it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from random import Random
from typing import Any, TypeVar

import pytest

from dspine.engine.events import Event, Step
from dspine.server.app import Service
from dspine.server.engine_thread import EngineThread
from dspine.server.inbox import Inbox, Job
from tests.support.fake_engine import VOCAB
from tests.support.served import (
    PATIENCE,
    SlowTarget,
    says,
    until,
)

ASK = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT = [*b"A:"]
LETTERS = "".join(Random(5).choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=120))
"""A text that hardly repeats itself, so that a step gives few tokens."""
_T = TypeVar("_T")


def with_thread(
    service: Service, scenario: Callable[[EngineThread], Coroutine[Any, Any, _T]]
) -> _T:
    """Run a scenario on a started engine thread, and stop that."""
    service.thread.start()
    assert service.thread.wait_ready(PATIENCE)
    try:
        return asyncio.run(scenario(service.thread))
    finally:
        service.thread.stop(PATIENCE)


async def read(events: AsyncIterator[Event], seen: list[tuple[str, Event]], name: str) -> str:
    """The text of an answer; its events go to `seen`."""
    text = ""
    async for event in events:
        seen.append((name, event))
        if isinstance(event, Step):
            text += event.text
    return text


def gated(count: int) -> list[SlowTarget]:
    """Targets that all say `LETTERS`, and decode only while the first one's gate is open."""
    targets = [SlowTarget(says(LETTERS), VOCAB, n_ctx=512) for _ in range(count)]
    for target in targets[1:]:
        target.may_go = targets[0].may_go
    return targets


class TurnTarget(SlowTarget):
    """Writes its name down whenever it decodes, and closes its gate after the decode `pause`."""

    def __init__(self, name: str, turns: list[str], gate: threading.Event) -> None:
        super().__init__(says(LETTERS), VOCAB, n_ctx=512)
        self._name, self._turns, self.may_go = name, turns, gate
        self.pause = 0

    def decode(self, *arguments: Any) -> None:
        super().decode(*arguments)
        self._turns.append(self._name)
        if len(self._turns) == self.pause:
            self.may_go.clear()


def taking_turns() -> tuple[TurnTarget, TurnTarget, list[str]]:
    """Two targets a and b with one gate, and the names of those that decoded, in that order."""
    turns: list[str] = []
    gate = threading.Event()
    gate.set()
    return TurnTarget("a", turns, gate), TurnTarget("b", turns, gate), turns


def has_jobs(thread: EngineThread, count: int) -> bool:
    """Whether so many requests are answered or wait."""
    return thread.n_running + thread.n_waiting >= count


async def ask_all(
    thread: EngineThread,
    gate: threading.Event,
    wanted: int | Sequence[Job],
    seen: list[tuple[str, Event]],
) -> list[asyncio.Task[str]]:
    """Jobs a, b, ... in that order, of which none has gone on before the gate opens."""
    gate.clear()
    tasks = []
    if isinstance(wanted, int):
        wanted = [Job(PROMPT, {"max_tokens": 100}) for _ in range(wanted)]
    for number, job in enumerate(wanted):
        tasks.append(asyncio.create_task(read(thread.answer(job), seen, "abcdefgh"[number])))
        await asyncio.to_thread(until, partial(has_jobs, thread, number + 1))
    return tasks


def told_by_the_engine(patch: pytest.MonkeyPatch) -> list[tuple[Job, Event | BaseException]]:
    """What the engine's thread tells, in its own order: readers may run late and in any order."""
    told: list[tuple[Job, Event | BaseException]] = []
    put = Inbox.put

    def note(inbox: Inbox, item: Event | BaseException) -> bool:
        told.append((inbox.job, item))
        return put(inbox, item)

    patch.setattr(Inbox, "put", note)
    return told
