"""One thread owns the engine; requests wait for a slot and hear events as they come."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from dspine.engine.engine import Engine
from dspine.engine.events import Event, Finish, Step
from dspine.engine.prompt import Prompt
from dspine.engine.scheduler import Scheduler
from dspine.engine.slots import SlotFacts
from dspine.errors import DspineError

_LOOK_SECONDS = 0.05
State = Literal["loading", "ready", "failed", "stopped"]


class BusyError(DspineError):
    """The queue is full, or the server is starting or stopping: come back later."""


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to make: a prompt and the options of `Engine.generate`."""

    prompt: Prompt
    options: Mapping[str, Any]


@dataclass(slots=True, eq=False)
class _Ticket:
    """A job that waits or runs, and the way back to who asked."""

    job: Job
    loop: asyncio.AbstractEventLoop
    inbox: asyncio.Queue[Event | BaseException]
    cancel: threading.Event = field(default_factory=threading.Event)

    def tell(self, item: Event | BaseException) -> None:
        # The loop may be closed when the program ends in the middle of an answer.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.inbox.put_nowait, item)


@dataclass(frozen=True, slots=True)
class Decodes:
    """How many decodes gave tokens, and to how many answers, summed up over them."""

    count: int = 0
    answers: int = 0


class EngineThread:
    """Loads the engine, then answers as many requests at once as it has slots, first come, first
    served.
    """

    def __init__(self, load: Callable[[], Engine], *, queue_limit: int) -> None:
        """`queue_limit` requests may wait beside those that have a slot."""
        self._load = load
        self._queue_limit = queue_limit
        self._waiting: deque[_Ticket] = deque()
        self._running: set[_Ticket] = set()
        self._answers: dict[int, _Ticket] = {}
        """By the scheduler's number; the engine's thread alone uses it."""
        self._changed = threading.Condition()
        self._engine: Engine | None = None
        self._slots: Sequence[SlotFacts] = ()
        self._looked = 0.0
        self._decodes = Decodes()
        self._error: DspineError | None = None
        self._state: State = "loading"
        self._served = False
        """Whether it was ready once."""
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
    def reason(self) -> str:
        """Why nothing can be asked, for those outside."""
        if self._state == "loading":
            return "Loading model"
        if self._state == "failed":
            what = "the engine failed" if self._served else "the model could not be loaded"
            return f"{what}: see the server's log"
        return "the server is stopping: try another one"

    @property
    def engine(self) -> Engine:
        """The loaded engine, for facts and its tokenizer; BusyError until it is there."""
        if self._state != "ready" or self._engine is None:
            raise BusyError(self.reason)
        return self._engine

    @property
    def n_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    @property
    def slots(self) -> Sequence[SlotFacts]:
        """Every slot; whether it is busy as of now, its counts of some 50 ms and a step ago."""
        return self._slots

    @property
    def decodes(self) -> Decodes:
        """How full they were so far."""
        return self._decodes

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
            for ticket in (*self._waiting, *self._running):
                ticket.cancel.set()
        self._thread.join()

    async def answer(self, job: Job) -> AsyncIterator[Event]:
        """Events of an answer; closing the iterator cancels it within one step.

        Raises BusyError when the queue is full, else what `Engine.generate` raises.
        """
        loop = asyncio.get_running_loop()
        ticket = _Ticket(job, loop, asyncio.Queue())
        with self._changed:
            if self._state != "ready" or self._engine is None:
                raise BusyError(self.reason)
            ahead = len(self._waiting) + len(self._running)
            if ahead >= self._engine.slots + self._queue_limit:
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
            with self._load() as engine:
                self._serve(engine)
        except DspineError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(DspineError(f"the engine failed ({type(error).__name__}: {error})"))
            raise

    def _fail(self, error: DspineError) -> None:
        with self._changed:
            self._error, self._state, self._engine = error, "failed", None
            left = (*self._waiting, *self._running)
            self._waiting.clear()
        for ticket in left:
            self._end(ticket, BusyError(self.reason))

    def _serve(self, engine: Engine) -> None:
        scheduler = engine.scheduler()
        self._slots = scheduler.slots()
        with self._changed:
            self._engine, self._served = engine, True
            if self._state == "loading":
                self._state = "ready"
        while self._has_work():
            try:
                self._admit(scheduler)
                self._step(scheduler)
            except Exception as error:  # noqa: BLE001 - no single answer's fault: all are told
                scheduler.close()
                self._give_up(error)
                scheduler = engine.scheduler()
                self._look(scheduler)
        scheduler.close()
        self._engine = None

    def _has_work(self) -> bool:
        """Wait until there is something to do; False when there never will be."""
        with self._changed:
            while not self._waiting and not self._running:
                if self._state == "stopped":
                    return False
                self._changed.wait()
        return True

    def _admit(self, scheduler: Scheduler) -> None:
        """Give free slots to those that wait longest."""
        while scheduler.free_slots():
            with self._changed:
                if not self._waiting:
                    return
                ticket = self._waiting.popleft()
                self._running.add(ticket)
            if ticket.cancel.is_set():
                self._end(ticket, BusyError(self.reason))
                continue
            try:
                number = scheduler.start(
                    ticket.job.prompt, cancel=ticket.cancel, **ticket.job.options
                )
            except Exception as error:  # noqa: BLE001 - whoever asked is told, the next one is served
                self._end(ticket, error)
                continue
            self._answers[number] = ticket
            self._look(scheduler)

    def _step(self, scheduler: Scheduler) -> None:
        """One step of all answers; who asked hears of it."""
        if not self._answers:
            return
        happened = scheduler.step()
        over = any(isinstance(event, Finish | Exception) for _, event in happened)
        if over or time.monotonic() - self._looked > _LOOK_SECONDS:
            self._look(scheduler)
        busy = 0
        for number, event in happened:
            ticket = self._answers[number]
            if isinstance(event, Step) and event.tokens:
                busy += 1
            if isinstance(event, Finish | Exception):
                del self._answers[number]
                self._end(ticket, event)
            else:
                ticket.tell(event)
        if busy:
            before = self._decodes
            self._decodes = Decodes(before.count + 1, before.answers + busy)

    def _look(self, scheduler: Scheduler) -> None:
        # Not after every step: it takes as long as a good part of a step's other host work.
        self._slots, self._looked = scheduler.slots(), time.monotonic()

    def _end(self, ticket: _Ticket, item: Event | BaseException) -> None:
        # First the slot is free, then who asked may look at it.
        self._running.discard(ticket)
        ticket.tell(item)

    def _give_up(self, error: Exception) -> None:
        self._answers.clear()
        for ticket in tuple(self._running):
            self._end(ticket, error)

    def wait_ready(self, seconds: float) -> bool:
        """Wait until it is loaded or has failed; whether it is ready."""
        limit = time.monotonic() + seconds
        while self._state == "loading" and time.monotonic() < limit:
            time.sleep(0.01)
        return self._state == "ready"
