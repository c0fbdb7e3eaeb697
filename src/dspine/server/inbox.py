"""The way of an answer's events from the engine's thread to the coroutine that asked."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dspine.engine.events import Event, Finish
from dspine.engine.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to make: a prompt and the options of `Engine.generate`."""

    prompt: Prompt
    options: Mapping[str, Any]
    as_it_comes: bool = True
    """Whether every event is wanted at once; else all of them when the answer is over."""


class Inbox:
    """A job that waits or runs. The engine's thread puts events in, one coroutine takes them out.

    A wake-up of the event loop costs the engine's thread time, so what waits for several readers
    is put first and announced once (`announce`).
    """

    def __init__(self, job: Job, loop: asyncio.AbstractEventLoop) -> None:
        self.job = job
        self.loop = loop
        self.cancel = threading.Event()
        self._items: deque[Event | BaseException] = deque()
        self._waiter: asyncio.Future[bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._until = 0.0
        """When the patience of the reader ends, in the loop's time."""

    def put(self, item: Event | BaseException) -> bool:
        """From any thread; whether the reader is to be told."""
        self._items.append(item)
        return self.job.as_it_comes or isinstance(item, Finish | BaseException)

    async def get(self, patience: float | None = None) -> Event | None:
        """The next event; None when nothing came for `patience` seconds.

        Raises the exception that ended the answer.
        """
        while not self._items:
            if not await self._wait(patience):
                return None
        item = self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    def wake(self) -> None:
        """In the loop: something was put."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def close(self) -> None:
        """In the loop: nobody reads it any more, so the answer is to end."""
        self.cancel.set()
        if self._timer is not None:
            self._timer.cancel()

    async def _wait(self, patience: float | None) -> bool:
        """Until `wake`; False when that takes longer than `patience` seconds."""
        if patience is not None:
            self._until = self.loop.time() + patience
            if self._timer is None:
                self._timer = self.loop.call_at(self._until, self._look_at_clock)
        self._waiter = self.loop.create_future()
        # What was put in the meantime may have been announced when nobody waited.
        try:
            return bool(self._items) or await self._waiter
        finally:
            self._waiter = None

    def _look_at_clock(self) -> None:
        """One timer for all waits: most of them are short."""
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self.loop.time() < self._until:
            self._timer = self.loop.call_at(self._until, self._look_at_clock)
        else:
            self._waiter.set_result(False)


def announce(inboxes: Iterable[Inbox]) -> None:
    """Wake those who read them, each loop once."""
    loops: dict[asyncio.AbstractEventLoop, list[Inbox]] = {}
    for inbox in inboxes:
        loops.setdefault(inbox.loop, []).append(inbox)
    for loop, ready in loops.items():
        # The loop may be closed when the program ends in the middle of an answer.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_wake, ready)


def _wake(inboxes: Iterable[Inbox]) -> None:
    for inbox in inboxes:
        inbox.wake()
