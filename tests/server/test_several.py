"""Several requests at once: slots, queue, those who leave, errors of one, and the end."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from itertools import groupby
from random import Random
from typing import Any, TypeVar

import pytest

from dspine.engine.engine import Engine
from dspine.engine.events import Event, Finish, Prefill, Step
from dspine.engine.scheduler import Scheduler
from dspine.errors import DspineError, UsageError
from dspine.server.app import Service
from dspine.server.engine_thread import BusyError, EngineThread
from dspine.server.inbox import Inbox, Job
from tests.support.fake_engine import VOCAB
from tests.support.fake_slots import make_slots
from tests.support.fake_target import FakeTarget
from tests.support.served import (
    PATIENCE,
    TEMPLATE,
    SlowTarget,
    make_service,
    says,
    serving,
    until,
)

ASK = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT = [*b"A:"]
PLAIN = {"json": {"prompt": "A:", "max_tokens": 9}}
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


def _has(thread: EngineThread, count: int) -> bool:
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
        await asyncio.to_thread(until, partial(_has, thread, number + 1))
    return tasks


def test_two_streams_take_turns_and_say_what_they_say_alone() -> None:
    first, second, decoded = taking_turns()

    async def scenario(thread: EngineThread) -> list[str]:
        tasks = await ask_all(thread, first.may_go, 2, [])
        first.may_go.set()
        return await asyncio.gather(*tasks)

    assert with_thread(make_service(first, second), scenario) == [LETTERS[:100]] * 2
    turns = "".join(decoded)
    both = turns[turns.index("b") : turns.rindex("a")]
    runs = [len(list(group)) for _, group in groupby(both)]
    assert len(runs) > 60 and max(runs) <= 2, f"one of the two had to wait: {turns}"


def told_by_the_engine(patch: pytest.MonkeyPatch) -> list[tuple[Job, Event | BaseException]]:
    """What the engine's thread tells, in its own order: readers may run late and in any order."""
    told: list[tuple[Job, Event | BaseException]] = []
    put = Inbox.put

    def note(inbox: Inbox, item: Event | BaseException) -> bool:
        told.append((inbox.job, item))
        return put(inbox, item)

    patch.setattr(Inbox, "put", note)
    return told


def test_requests_get_slots_in_the_order_in_which_they_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets = gated(2)
    told = told_by_the_engine(monkeypatch)
    jobs = [Job(PROMPT, {"max_tokens": 100}) for _ in range(6)]

    async def scenario(thread: EngineThread) -> list[str]:
        tasks = await ask_all(thread, targets[0].may_go, jobs, [])
        assert thread.n_waiting >= 4
        targets[0].may_go.set()
        return await asyncio.gather(*tasks)

    assert with_thread(make_service(*targets), scenario) == [LETTERS[:100]] * 6
    begun = [id(job) for job, event in told if isinstance(event, Prefill)]
    assert begun == [id(job) for job in jobs]
    # Never more at a time than there are slots.
    running = most = 0
    for _, event in told:
        running += isinstance(event, Prefill) - isinstance(event, Finish)
        most = max(most, running)
    assert (most, running) == (2, 0)


def test_the_queue_has_a_limit_beside_the_slots_and_every_route_tells_the_truth() -> None:
    targets = gated(2)
    service = make_service(*targets, queue_limit=1)
    with serving(service) as client:
        assert client.get("/props").json()["total_slots"] == 2
        idle = client.get("/slots").json()
        assert [(slot["id"], slot["state"], slot["is_processing"]) for slot in idle] == [
            (0, "idle", False),
            (1, "idle", False),
        ]
        targets[0].may_go.clear()
        statuses: list[int] = []

        def ask() -> None:
            statuses.append(client.post("/v1/chat/completions", json=ASK).status_code)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for number, thread in enumerate(threads):
            thread.start()
            until(partial(_has, service.thread, number + 1))
        full = client.post("/v1/chat/completions", json=ASK)
        assert full.status_code == 503 and full.headers["Retry-After"] == "1"
        values = metrics(client.get("/metrics").text)
        assert values["requests_processing"] + values["requests_deferred"] == 3
        targets[0].may_go.set()
        for thread in threads:
            thread.join(PATIENCE)
        assert statuses == [200] * 3
        until(lambda: all(slot["state"] == "idle" for slot in client.get("/slots").json()))
        values = metrics(client.get("/metrics").text)
        assert values["requests_processing"] == values["requests_deferred"] == 0
        assert 1 <= values["n_busy_slots_per_decode"] <= 2
        # A decode of both counts once, and every answer took more than 30.
        assert 30 < values["n_decode_total"] < 3 * 120
        assert [slot["n_held"] > 100 for slot in client.get("/slots").json()] == [True, True]


def metrics(text: str) -> dict[str, float]:
    found = re.findall(r"^llamacpp:(\w+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_who_spreads_requests_is_told_that_no_slot_is_free() -> None:
    targets = gated(1)
    service = make_service(*targets)
    with serving(service) as client:
        assert client.get("/slots?fail_on_no_slot=1").status_code == 200
        targets[0].may_go.clear()
        thread = threading.Thread(target=client.post, args=("/v1/completions",), kwargs=PLAIN)
        thread.start()
        until(lambda: client.get("/slots").json()[0]["is_processing"])
        assert client.get("/slots?fail_on_no_slot=1").status_code == 503
        targets[0].may_go.set()
        thread.join(PATIENCE)


@pytest.mark.parametrize("drafts", [{}, {"speculative": {"n_max": 0}}], ids=["drafted", "plain"])
def test_a_conversation_comes_back_to_the_slot_that_holds_it(drafts: dict[str, Any]) -> None:
    with serving(make_service(*gated(2))) as client:

        def cached(*said: str) -> int:
            roles = ("user", "assistant") * len(said)
            messages = [{"role": r, "content": t} for r, t in zip(roles, said, strict=False)]
            body = {"messages": messages, "max_tokens": 20, **drafts}
            usage = client.post("/v1/chat/completions", json=body).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        first, second = "x" * 40, "y" * 60
        assert cached(first) < 10 and cached(second) < 10
        # What both turns share, but for the answer: the template marks it otherwise in a prompt.
        assert cached(first, LETTERS[:20], "more") >= len(f"user={first}\n")
        assert cached(second, LETTERS[:20], "more") >= len(f"user={second}\n")


def test_slots_tell_what_each_one_does() -> None:
    targets = gated(2)

    async def scenario(thread: EngineThread) -> None:
        seen: list[tuple[str, Event]] = []
        [task] = await ask_all(thread, targets[0].may_go, 1, seen)
        await asyncio.to_thread(until, lambda: thread.slots[0].state != "idle")
        first, second = thread.slots
        assert (first.prompt_tokens, first.decoded_tokens) == (2, 0)
        assert (second.state, second.answer) == ("idle", None)
        targets[0].may_go.set()
        await task

    with_thread(make_service(*targets), scenario)


def test_one_who_leaves_frees_its_slot_and_disturbs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, turns = taking_turns()
    first.pause = second.pause = 21
    told = told_by_the_engine(monkeypatch)
    jobs = [Job(PROMPT, {"max_tokens": count}) for count in (100, 100, 20)]

    async def scenario(thread: EngineThread) -> tuple[str, str]:
        left, stays, waits = await ask_all(thread, first.may_go, jobs, [])
        first.may_go.set()
        # The engine stands still in the middle of both answers until one of them has left.
        await asyncio.to_thread(until, lambda: len(turns) == 21 and not first.may_go.is_set())
        assert thread.n_waiting == 1
        begun = {id(job) for job, event in told if isinstance(event, Step)}
        assert begun == {id(job) for job in jobs[:2]}
        left.cancel()
        await asyncio.wait([left])
        first.may_go.set()
        texts = await stays, await waits
        assert thread.n_running == thread.n_waiting == 0
        return texts

    texts = with_thread(make_service(first, second), scenario)
    assert texts == (LETTERS[:100], LETTERS[:20])
    ends = [(job, event.reason) for job, event in told if isinstance(event, Finish)]
    assert ends == [(jobs[0], "cancelled"), (jobs[2], "length"), (jobs[1], "length")]


def test_one_who_leaves_the_queue_is_never_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = gated(2)
    told = told_by_the_engine(monkeypatch)
    jobs = [Job(PROMPT, {"max_tokens": 100}) for _ in range(4)]

    async def scenario(thread: EngineThread) -> None:
        tasks = await ask_all(thread, targets[0].may_go, jobs, [])
        tasks[3].cancel()
        await asyncio.wait([tasks[3]])
        targets[0].may_go.set()
        await asyncio.gather(*tasks[:3])

    with_thread(make_service(*targets), scenario)
    answered = {id(job) for job, _ in told}
    assert answered == {id(job) for job in jobs[:3]}


class Brittle(SlowTarget):
    """Its choices fail when it is told so."""

    fails = False

    def argmax(self, row: int) -> int:
        if self.fails:
            raise RuntimeError("the choice failed")
        return super().argmax(row)


def test_an_error_of_one_answer_is_told_to_that_one_alone() -> None:
    good, bad = (Brittle(says(LETTERS), VOCAB, n_ctx=512) for _ in range(2))
    bad.may_go = good.may_go

    async def scenario(thread: EngineThread) -> None:
        seen: list[tuple[str, Event]] = []
        first, second = await ask_all(thread, good.may_go, 2, seen)
        wrong = thread.answer(Job(PROMPT, {"max_tokens": 9, "max_drafts": -1}))
        bad.fails = True
        good.may_go.set()
        with pytest.raises(RuntimeError, match="the choice failed"):
            await second
        with pytest.raises(UsageError, match="max_drafts is -1"):
            await anext(wrong)
        assert await first == LETTERS[:100]
        bad.fails = False
        again = [read(thread.answer(Job(PROMPT, {"max_tokens": 30})), [], "x") for _ in range(3)]
        assert await asyncio.gather(*again) == [LETTERS[:30]] * 3

    with_thread(make_service(good, bad), scenario)


def test_a_step_that_fails_as_a_whole_is_told_to_all_and_the_next_ones_are_served() -> None:
    class OnceError(Exception):
        pass

    made: list[Engine] = []

    def load() -> Engine:
        engine = make_slots(*targets, template=TEMPLATE)
        real = engine.scheduler

        def scheduler() -> Any:
            found = real()
            if not made:
                made.append(engine)
                found.step = fail  # type: ignore[method-assign]
            return found

        engine.scheduler = scheduler  # type: ignore[method-assign,assignment]
        return engine

    def fail() -> Any:
        targets[0].may_go.wait(PATIENCE)
        raise OnceError("all of it")

    targets = gated(2)

    async def scenario(thread: EngineThread) -> None:
        tasks = await ask_all(thread, targets[0].may_go, 3, [])
        targets[0].may_go.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found[:1]] == [OnceError]
        assert found[2] == LETTERS[:100]
        assert await read(thread.answer(Job(PROMPT, {"max_tokens": 9})), [], "x") == LETTERS[:9]

    with_thread(make_service(*targets, load=load), scenario)


def _all_told_to_end(thread: EngineThread) -> bool:
    return all(one.cancel.is_set() for one in (*thread._waiting, *thread._running))


@pytest.mark.parametrize("seconds", [PATIENCE, 0.0], ids=["in time", "broken off"])
def test_stopping_ends_what_runs_and_waits_and_takes_nothing_new(seconds: float) -> None:
    targets = gated(2)
    service = make_service(*targets)

    async def scenario(thread: EngineThread) -> list[str | BaseException]:
        tasks = await ask_all(thread, targets[0].may_go, 3, [])
        stopping = asyncio.create_task(asyncio.to_thread(thread.stop, seconds))
        await asyncio.to_thread(until, lambda: thread.state == "stopped")
        with pytest.raises(BusyError, match="stopping"):
            await anext(thread.answer(Job(PROMPT, {})))
        if not seconds:
            await asyncio.to_thread(until, lambda: _all_told_to_end(thread))
        targets[0].may_go.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await stopping
        return found

    found = with_thread(service, scenario)
    if seconds:
        assert found == [LETTERS[:100]] * 3
    else:
        assert all(len(one) < 10 for one in found if isinstance(one, str)), found
        assert isinstance(found[2], BusyError)


def test_without_a_queue_a_free_slot_still_takes_a_request() -> None:
    with serving(make_service(FakeTarget(says("Hi."), VOCAB, n_ctx=256), queue_limit=0)) as client:
        assert client.post("/v1/chat/completions", json=ASK).status_code == 200


def test_an_engine_without_room_for_its_slots_is_told_as_a_failure() -> None:
    class Full(Engine):
        def scheduler(self, n_slots: int | None = None) -> Scheduler:
            raise DspineError("there is no room for 4 slots")

    def load() -> Engine:
        made = make_slots(*gated(2))
        made.__class__ = Full
        return made

    service = make_service(FakeTarget(says(""), VOCAB), load=load)
    service.thread.start()
    assert not service.thread.wait_ready(PATIENCE)
    assert service.thread.state == "failed" and "no room" in str(service.thread.error)
