"""One thread owns the engine; requests wait in a queue and hear events as they come."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from dspine.engine.engine import Engine
from dspine.engine.events import Event, Finish
from dspine.engine.prompt import Prompt
from dspine.errors import DspineError

State = Literal["loading", "ready", "failed", "stopped"]


class BusyError(DspineError):
    """The queue is full, or the server is starting or stopping: come back later."""


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to make: a prompt and the options of `Engine.generate`."""

    prompt: Prompt
    options: Mapping[str, Any]


@dataclass(slots=True)
class _Ticket:
    """A job in the queue, and the way back to who asked."""

    job: Job
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[Event | BaseException]
    cancel: threading.Event = field(default_factory=threading.Event)

    def tell(self, item: Event | BaseException) -> None:
        # The loop may be closed when the program ends in the middle of an answer.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.inbox.put_nowait, item)


class EngineThread:
    """Loads the engine, then answers one request after the other, first come, first served."""

    def __init__(self, load: Callable[[], Engine], *, queue_limit: int) -> None:
        """`queue_limit` requests may wait beside the one that runs."""
        self._load = load
        self._queue_limit = queue_limit
        self._waiting: deque[_Ticket] = deque()
        self._running: _Ticket | None = None
        self._changed = threading.Condition()
        self._engine: Engine | None = None
        self._error: DspineError | None = None
        self._state: State = "loading"
        self._thread = threading.Thread(target=self._work, name="dspine-engine", daemon=True)

    @property
    def state(self) -> State:
        """loading, ready, failed (see `error`) or stopped."""
        return self._state

    @property
    def error(self) -> DspineError | None:
        """Why loading failed."""
        return self._error

    @property
    def engine(self) -> Engine:
        """The loaded engine, for facts and its tokenizer; BusyError until it is there."""
        if self._state != "ready" or self._engine is None:
            raise BusyError(_unready(self._state))
        return self._engine

    @property
    def n_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """1 while an answer is made, else 0."""
        return int(self._running is not None)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Take nothing new, give what runs and waits `seconds` to end, then free the engine."""
        with self._changed:
            if self._state in ("loading", "ready"):
                self._state = "stopped"
            self._changed.notify_all()
        if self._thread.ident is None:
            return
        self._thread.join(seconds)
        with self._changed:
            for ticket in (*self._waiting, *([self._running] if self._running else [])):
                ticket.cancel.set()
        self._thread.join()

    async def answer(self, job: Job) -> AsyncIterator[Event]:
        """Events of an answer; closing the iterator cancels it within one step.

        Raises BusyError when the queue is full, else what `Engine.generate` raises.
        """
        loop = asyncio.get_running_loop()
        ticket = _Ticket(job, loop, asyncio.Queue())
        with self._changed:
            if self._state != "ready":
                raise BusyError(_unready(self._state))
            if len(self._waiting) >= self._queue_limit:
                raise BusyError(
                    f"{len(self._waiting)} requests are waiting, which is the limit: try again "
                    f"later, or raise --queue"
                )
            self._waiting.append(ticket)
            self._changed.notify_all()
        try:
            while True:
                item = await ticket.inbox.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if isinstance(item, Finish):
                    return
        finally:
            ticket.cancel.set()
            with self._changed, suppress(ValueError):
                self._waiting.remove(ticket)

    def _work(self) -> None:
        try:
            engine = self._load()
        except DspineError as error:
            self._error, self._state = error, "failed"
            return
        except BaseException as error:
            self._error = DspineError(f"loading failed ({type(error).__name__}: {error})")
            self._state = "failed"
            raise
        with engine:
            with self._changed:
                self._engine = engine
                if self._state == "loading":
                    self._state = "ready"
            while (ticket := self._next()) is not None:
                self._run(engine, ticket)
                with self._changed:
                    self._running = None
            self._engine = None

    def _next(self) -> _Ticket | None:
        with self._changed:
            while not self._waiting:
                if self._state == "stopped":
                    return None
                self._changed.wait()
            self._running = self._waiting.popleft()
            return self._running

    def _run(self, engine: Engine, ticket: _Ticket) -> None:
        if ticket.cancel.is_set():
            return
        try:
            for event in engine.generate(
                ticket.job.prompt, cancel=ticket.cancel, **ticket.job.options
            ):
                ticket.tell(event)
        except Exception as error:  # noqa: BLE001 - whoever asked is told, the next one is served
            ticket.tell(error)

    def wait_ready(self, seconds: float) -> bool:
        """Wait until it is loaded or has failed; whether it is ready."""
        limit = time.monotonic() + seconds
        while self._state == "loading" and time.monotonic() < limit:
            time.sleep(0.01)
        return self._state == "ready"


def _unready(state: State) -> str:
    return {
        "loading": "Loading model",
        "failed": "the model could not be loaded: see the server's log",
        "stopped": "the server is stopping: try another one",
    }.get(state, "the engine is gone")
