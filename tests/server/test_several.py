"""Several requests at once: slots, queue, those who leave, what the routes tell, the end."""

from __future__ import annotations

import asyncio
import re
import threading
from functools import partial
from itertools import groupby
from typing import Any

import pytest

from dspine.engine.events import Event, Finish, Prefill, Step
from dspine.server.engine_thread import BusyError, EngineThread
from dspine.server.inbox import Job
from tests.support.fake_engine import VOCAB
from tests.support.fake_target import FakeTarget
from tests.support.served import (
    PATIENCE,
    make_service,
    says,
    serving,
    until,
)
from tests.support.served_slots import (
    ASK,
    LETTERS,
    PROMPT,
    ask_all,
    gated,
    has_jobs,
    taking_turns,
    told_by_the_engine,
    with_thread,
)

PLAIN = {"json": {"prompt": "A:", "max_tokens": 9}}


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
            until(partial(has_jobs, service.thread, number + 1))
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
