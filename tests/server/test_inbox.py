"""Events from the engine's thread to who asked: at once, or all together when it is over."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from dspine.engine.events import Event, Finish, Prefill
from dspine.engine.stats import StatsRecorder
from dspine.server.inbox import Inbox, Job, announce
from tests.support.fake_engine import VOCAB
from tests.support.served import PATIENCE, SlowTarget, make_service, says, serving

FINISH = Finish("stop", StatsRecorder().snapshot())
MESSAGES = [{"role": "user", "content": "Hello"}]


def test_every_event_arrives_once_and_in_order_whoever_is_faster() -> None:
    events: list[Event] = [*(Prefill(n, 0.0) for n in range(300)), FINISH]

    async def read(*, slowly: bool) -> list[Event | None]:
        inbox = Inbox(Job([1], {}), asyncio.get_running_loop())

        def put() -> None:
            for event in events:
                if not slowly:
                    time.sleep(0.0002)
                if inbox.put(event):
                    announce([inbox])

        thread = threading.Thread(target=put)
        thread.start()
        found: list[Event | None] = []
        while not found or found[-1] is not FINISH:
            if slowly:
                await asyncio.sleep(0.0002)
            found.append(await inbox.get(PATIENCE))
        thread.join()
        return found

    assert asyncio.run(read(slowly=False)) == events
    assert asyncio.run(read(slowly=True)) == events


def test_an_answer_wanted_as_a_whole_wakes_its_reader_once() -> None:
    async def told() -> list[bool]:
        inbox = Inbox(Job([1], {}, as_it_comes=False), asyncio.get_running_loop())
        return [inbox.put(item) for item in (Prefill(1, 0.0), FINISH, ValueError("broken"))]

    assert asyncio.run(told()) == [False, True, True]


def test_silence_is_told_again_and_again_and_ends_with_an_event() -> None:
    async def read() -> list[Event | None]:
        inbox = Inbox(Job([1], {}), asyncio.get_running_loop())
        found = [await inbox.get(0.02), await inbox.get(0.02)]

        def put() -> None:
            inbox.put(FINISH)
            inbox.wake()

        asyncio.get_running_loop().call_later(0.01, put)
        found.append(await inbox.get(PATIENCE))
        inbox.close()
        return found

    assert asyncio.run(read()) == [None, None, FINISH]


def test_a_stream_that_waits_sends_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    target = SlowTarget(says("Hi."), VOCAB, n_ctx=256)
    silences: list[float | None] = []
    get = Inbox.get

    async def counted(inbox: Inbox, patience: float | None = None) -> Event | None:
        found = await get(inbox, patience)
        if found is None:
            silences.append(patience)
            if len(silences) == 3:
                target.may_go.set()
        return found

    monkeypatch.setattr(Inbox, "get", counted)
    with serving(make_service(target, ping_seconds=0.05)) as client:
        target.may_go.clear()
        reply = client.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True})
        lines = [line for line in reply.text.split("\n") if line]
    assert silences[:3] == [0.05] * 3
    assert lines[:3] == [": ping"] * 3
    assert lines[-1] == "data: [DONE]" and '"content":"H"' in reply.text.replace(": ", ":")
