"""Clients that go away, and what a reply has begun with by then; the application is called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.support.fake_engine import VOCAB
from tests.support.fake_target import FakeTarget
from tests.support.served import SlowTarget, make_service, says, serving, until

ASK = {"messages": [{"role": "user", "content": "Hello"}]}


def slow() -> SlowTarget:
    return SlowTarget(says("x" * 200), VOCAB, n_ctx=512)


async def call(
    client: TestClient,
    body: bytes,
    has_left: Callable[[], bool],
    *,
    is_whole: bool = True,
    on_send: Callable[[Any], None] = lambda message: None,
) -> list[Any]:
    """The application as a server calls it: a body, then the news that the client has gone."""
    sent: list[Any] = []
    asked = False

    async def receive() -> Any:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": body, "more_body": not is_whole}
        while not has_left():
            await asyncio.sleep(0.005)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        on_send(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [],
    }
    await client.app(scope, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_before_its_first_token_is_noticed(stream: bool) -> None:
    target = slow()
    service = make_service(target)
    with serving(service) as client:
        target.may_go.clear()
        body = json.dumps({**ASK, "stream": stream}).encode()
        begun: list[bool] = []

        def has_left() -> bool:
            begun.extend([True] * service.thread.n_running)
            return bool(begun)

        sent = asyncio.run(call(client, body, has_left))
        assert sent[0]["status"] == 499, "not 200, which a stream would have begun with"
        target.may_go.set()
        until(lambda: service.thread.n_running == 0)
        assert len(target.memory) < 60


def test_a_stream_begins_before_its_first_token_when_that_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dspine.server.completions._SOON", 0.01)
    target = slow()
    with serving(make_service(target)) as client:
        target.may_go.clear()
        told: list[str] = []

        def begin(message: Any) -> None:
            if not told:  # nothing is decoded before the reply has begun
                target.may_go.set()
            told.append(message["type"])

        body = json.dumps({**ASK, "stream": True, "max_tokens": 3}).encode()
        sent = asyncio.run(call(client, body, lambda: False, on_send=begin))
    assert sent[0]["status"] == 200 and told[0] == "http.response.start"
    assert sent[-2]["body"] == b"data: [DONE]\n\n", sent[-2:]


def test_a_client_that_goes_away_in_the_middle_of_its_body_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(make_service(FakeTarget(says("Hi."), VOCAB, n_ctx=256))) as client:
        assert asyncio.run(call(client, b'{"mess', lambda: True, is_whole=False)) == []
        assert client.post("/v1/chat/completions", json=ASK).status_code == 200
    assert all(record.levelname != "ERROR" for record in caplog.records)
