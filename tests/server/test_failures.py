"""Errors of one answer, of a step of all, and of an engine that cannot be made."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dspine.engine.engine import Engine
from dspine.engine.events import Event
from dspine.engine.scheduler import Scheduler
from dspine.errors import DspineError, UsageError
from dspine.server.engine_thread import EngineThread
from dspine.server.inbox import Job
from tests.support.fake_engine import VOCAB
from tests.support.fake_slots import make_slots
from tests.support.fake_target import FakeTarget
from tests.support.served import (
    PATIENCE,
    TEMPLATE,
    SlowTarget,
    make_service,
    says,
)
from tests.support.served_slots import (
    LETTERS,
    PROMPT,
    ask_all,
    gated,
    read,
    with_thread,
)


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
