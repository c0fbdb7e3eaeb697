"""One thread owns the engine; requests wait for a slot and hear events as they come."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Literal

from dspine.engine.engine import Engine
from dspine.engine.events import Event, Finish, Step
from dspine.engine.scheduler import Scheduler
from dspine.engine.slots import SlotFacts
from dspine.errors import CapacityError, DspineError, LibraryError, UsageError
from dspine.server.inbox import Inbox, Job, announce

log = logging.getLogger("dspine.server")

_LOOK_SECONDS = 0.05
State = Literal["loading", "ready", "failed", "stopped"]


class BusyError(DspineError):
    """The queue is full, or the server is starting or stopping: come back later."""


class _BrokenError(LibraryError):
    """No answer can be made any more, whoever asks."""


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
        self.stage = ""
        """What loading is at."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when the engine has failed and all who asked were told."""
        self._load = load
        self._queue_limit = queue_limit
        self._waiting: deque[Inbox] = deque()
        self._running: set[Inbox] = set()
        self._answers: dict[int, Inbox] = {}
        """By the scheduler's number; the engine's thread alone uses it."""
        self._trial: int | None = None
        """The scheduler's number of an answer that shows whether the engine makes any."""
        self._alive = False
        """Whether others got tokens since the trial began."""
        self._changed = threading.Condition()
        self._engine: Engine | None = None
        self._slots: Sequence[SlotFacts] = ()
        self._looked = 0.0
        self._decodes = Decodes()
        self._error: DspineError | None = None
        self._state: State = "loading"
        self._served = False
        """Whether it was loaded once."""
        self._thread = threading.Thread(target=self._work, name="dspine-engine", daemon=True)

    @property
    def state(self) -> State:
        """loading, ready, failed (see `error`) or stopped."""
        return self._state

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the engine runs any more, or ever did."""
        return not self._thread.is_alive()

    @property
    def was_loaded(self) -> bool:
        """Whether the engine was there once, even if it was to stop by then."""
        return self._served

    @property
    def error(self) -> DspineError | None:
        """Why it has failed, at loading or later."""
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
        """Begin to load, unless it was told to stop by now."""
        if self._state == "loading":
            self._thread.start()

    def stop(self, seconds: float) -> None:
        """Take nothing new, give what runs and waits `seconds` to end, then free the engine.

        Returns at once while the model is loading: nothing is answered yet, and nothing can
        interrupt the load, which ends by itself and then frees the engine (`has_ended`).
        """
        with self._changed:
            if self._state in ("loading", "ready"):
                self._state = "stopped"
            self._changed.notify_all()
            is_loading = not self._served
        if self._thread.ident is None or is_loading:
            return
        limit = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < limit:
            if self._state == "failed":
                return  # what is broken may take for ever to be freed
            self._thread.join(_LOOK_SECONDS)
        with self._changed:
            for inbox in (*self._waiting, *self._running):
                inbox.cancel.set()
        self._thread.join()

    async def answer(self, job: Job) -> AsyncIterator[Event]:
        """Events of an answer; closing the iterator cancels it within one step.

        Raises BusyError when the queue is full, else what `Engine.generate` raises.
        """
        async with aclosing(self.listen(job)) as heard:
            async for event in heard:
                if event is not None:
                    yield event

    async def listen(
        self, job: Job, *, patience: float | None = None
    ) -> AsyncGenerator[Event | None]:
        """As `answer`, with None in between whenever nothing came for `patience` seconds."""
        inbox = Inbox(job, asyncio.get_running_loop())
        with self._changed:
            if self._state != "ready" or self._engine is None:
                raise BusyError(self.reason)
            ahead = len(self._waiting) + len(self._running)
            if ahead >= self._engine.slots + self._queue_limit:
                raise BusyError(
                    f"{self._queue_limit} requests are waiting, which is the limit: try again "
                    f"later, or raise --queue"
                )
            self._waiting.append(inbox)
            self._changed.notify_all()
        try:
            while True:
                event = await inbox.get(patience)
                yield event
                if isinstance(event, Finish):
                    return
        finally:
            inbox.close()
            with self._changed, suppress(ValueError):
                self._waiting.remove(inbox)

    def _work(self) -> None:
        try:
            with self._load() as engine:
                try:
                    self._serve(engine)
                except Exception as error:  # noqa: BLE001 - told before the engine is freed
                    self._fail(error)
        except Exception as error:  # noqa: BLE001 - whoever runs the server is told
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._state == "failed" or (self._state == "stopped" and not self._served):
                return  # the first reason counts, and none when nobody waits for the model
            self._error, self._state, self._engine = _as_sentence(error), "failed", None
            left = (*self._waiting, *self._running)
            self._waiting.clear()
        if not isinstance(error, DspineError):
            log.error("the engine failed", exc_info=error)
        for inbox in left:
            self._end(inbox, BusyError(self.reason))
        self.on_failure()

    def _serve(self, engine: Engine) -> None:
        scheduler = engine.scheduler()
        self._slots = scheduler.slots()
        with self._changed:
            self._engine, self._served = engine, True
            if self._state == "loading":
                self._state = "ready"
        trial = engine.encode("Hello.", raw=True)
        while self._has_work():
            try:
                self._admit(scheduler)
                is_in_doubt = self._step(scheduler)
            except _BrokenError:
                raise
            except Exception as error:
                if self._trial is not None:
                    raise _BrokenError(_broken(error)) from error
                log.error("all answers broke off", exc_info=error)
                scheduler.close()
                self._give_up(error)
                scheduler = engine.scheduler()
                self._look(scheduler)
                is_in_doubt = True
            if is_in_doubt and self._trial is None:
                self._alive = False
                self._trial = scheduler.start(trial, max_tokens=1, plain=True, cache_prompt=False)
        scheduler.close()
        self._engine = None

    def _has_work(self) -> bool:
        """Wait until there is something to do; False when there never will be."""
        if self._running or self._waiting or self._trial is not None:
            return True
        with self._changed:
            while not self._waiting and not self._running:
                if self._state == "stopped":
                    return False
                self._changed.wait()
        return True

    def _admit(self, scheduler: Scheduler) -> None:
        """Give free slots to those that wait longest."""
        while self._waiting and scheduler.free_slots():
            with self._changed:
                if not self._waiting:
                    return  # it has just left
                inbox = self._waiting.popleft()
                self._running.add(inbox)
            if inbox.cancel.is_set():
                self._end(inbox, BusyError(self.reason))
                continue
            try:
                number = scheduler.start(inbox.job.prompt, cancel=inbox.cancel, **inbox.job.options)
            except Exception as error:  # noqa: BLE001 - whoever asked is told, the next one is served
                self._end(inbox, error)
                continue
            self._answers[number] = inbox
            self._look(scheduler)

    def _step(self, scheduler: Scheduler) -> bool:
        """One step of all answers; who asked hears of it. Whether one failed that should not.

        Raises _BrokenError when the trial after such an answer failed too, and no other answer
        goes on.
        """
        if not self._answers and self._trial is None:
            return False
        happened = scheduler.step()
        over = any(isinstance(event, Finish | Exception) for _, event in happened)
        if over or time.monotonic() - self._looked > _LOOK_SECONDS:
            self._look(scheduler)
        busy, ready, is_in_doubt = 0, [], False
        broken: Exception | None = None
        for number, event in happened:
            if number == self._trial:
                if isinstance(event, Finish | Exception):
                    self._trial = None
                    broken = event if isinstance(event, Exception) else None
                continue
            inbox = self._answers[number]
            if isinstance(event, Step):
                busy += bool(event.tokens)
            elif isinstance(event, Finish | Exception):
                # First the slot is free, then who asked may look at it.
                del self._answers[number]
                self._running.discard(inbox)
                is_in_doubt |= not isinstance(event, Finish | UsageError | CapacityError)
            if inbox.put(event):
                ready.append(inbox)
        announce(ready)
        if busy:
            self._alive = True
            before = self._decodes
            self._decodes = Decodes(before.count + 1, before.answers + busy)
        if broken is not None and not self._alive:
            raise _BrokenError(_broken(broken)) from broken
        return is_in_doubt

    def _look(self, scheduler: Scheduler) -> None:
        # Not after every step: it takes as long as a good part of a step's other host work.
        self._slots, self._looked = scheduler.slots(), time.monotonic()

    def _end(self, inbox: Inbox, item: BaseException) -> None:
        self._running.discard(inbox)
        inbox.put(item)
        announce([inbox])

    def _give_up(self, error: Exception) -> None:
        self._answers.clear()
        self._trial = None
        for inbox in tuple(self._running):
            self._end(inbox, error)

    def wait_ready(self, seconds: float) -> bool:
        """Wait until it is loaded or has failed; whether it is ready."""
        limit = time.monotonic() + seconds
        while self._state == "loading" and time.monotonic() < limit:
            time.sleep(0.01)
        return self._state == "ready"


def _as_sentence(error: Exception) -> DspineError:
    """What ends the server, as its user reads it."""
    if isinstance(error, DspineError):
        return error
    return LibraryError(
        f"the engine failed ({type(error).__name__}: {error}): the log above says where, start it "
        "again"
    )


def _broken(error: Exception) -> str:
    what = str(error) if isinstance(error, DspineError) else f"{type(error).__name__}: {error}"
    return f"the engine makes no answers any more ({what}): start the server again"
