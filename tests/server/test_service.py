"""Start and end, keys, limits, queues, and llama-server's own routes."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import socket
import threading
from typing import Any

import pytest

from dspine.cli.serve import bound_socket, read_origins
from dspine.engine.engine import Engine
from dspine.engine.parts import TargetFacts
from dspine.errors import FileError, UsageError
from dspine.server.engine_thread import BusyError
from dspine.server.inbox import Job
from dspine.server.routes import openapi_document
from tests.support.fake_engine import VOCAB, make_engine
from tests.support.fake_target import FakeTarget
from tests.support.served import (
    PATIENCE,
    TEMPLATE,
    SlowTarget,
    make_service,
    says,
    served,
    serving,
    until,
)

ASK = {"messages": [{"role": "user", "content": "Hello"}]}


def test_health_tells_how_loading_goes() -> None:
    from starlette.testclient import TestClient

    from dspine.server.app import make_app
    from dspine.server.routes import routes

    may_load = threading.Event()

    def load() -> Engine:
        assert may_load.wait(PATIENCE)
        return make_engine(FakeTarget(says("Hi."), VOCAB, n_ctx=256), template=TEMPLATE)

    service = make_service(FakeTarget(says(""), VOCAB), load=load)
    with TestClient(make_app(service, routes())) as client:
        reply = client.get("/health")
        assert reply.status_code == 503
        error = reply.json()["error"]
        assert (error["message"], error["type"]) == ("Loading model", "unavailable_error")
        assert error["code"] == 503
        for path in ("/props", "/slots"):
            assert client.get(path).status_code == 503
        assert client.post("/v1/chat/completions", json=ASK).status_code == 503
        assert client.get("/v1/models").json()["data"][0]["id"] == "fake"
        service.thread.stage = "reading the target"
        assert client.get("/health").json()["error"]["stage"] == "reading the target"
        may_load.set()
        assert service.thread.wait_ready(PATIENCE)
        assert client.get("/health").json() == {"status": "ok"}
        assert client.post("/v1/chat/completions", json=ASK).status_code == 200
    assert service.thread.state == "stopped"


def test_a_model_that_cannot_be_loaded_is_told_without_its_path() -> None:
    from starlette.testclient import TestClient

    from dspine.server.app import make_app
    from dspine.server.routes import routes

    def load() -> Engine:
        raise FileError("/secret/place/model.gguf is not a GGUF file")

    service = make_service(FakeTarget(says(""), VOCAB), load=load)
    with TestClient(make_app(service, routes())) as client:
        assert not service.thread.wait_ready(PATIENCE)
        for reply in (client.get("/health"), client.post("/v1/chat/completions", json=ASK)):
            assert reply.status_code == 503
            assert "could not be loaded" in reply.json()["error"]["message"]
            assert "secret" not in reply.text
    # It ends the program, which prints it.
    assert str(service.thread.error) == "/secret/place/model.gguf is not a GGUF file"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic key"}, 401),
        ({"Authorization": "Bearer key"}, 200),
        ({"authorization": "bearer key "}, 200),
        ({"X-Api-Key": "key"}, 200),
    ],
)
def test_every_route_but_health_wants_the_key(headers: dict[str, str], status: int) -> None:
    with served("Hi.", api_key="key") as client:
        for path in ("/metrics", "/slots", "/props", "/v1/models", "/openapi.json"):
            assert client.get(path, headers=headers).status_code == status
        reply = client.post("/v1/chat/completions", json=ASK, headers=headers)
        assert reply.status_code == status
        assert client.get("/health").status_code == 200
        if status == 401:
            assert reply.json()["error"]["type"] == "authentication_error"
            assert reply.headers["WWW-Authenticate"] == "Bearer"


def test_a_large_body_is_refused_whether_announced_or_not() -> None:
    def pieces() -> Any:
        for _ in range(30):
            yield b" " * 100

    with served("Hi.", body_limit=2000) as client:
        big = json.dumps({**ASK, "padding": "x" * 3000})
        announced = client.post("/v1/chat/completions", content=big)
        streamed = client.post("/v1/chat/completions", content=pieces())
        for reply in (announced, streamed):
            assert reply.status_code == 413, reply.text
            assert "2000 bytes" in reply.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json=ASK).status_code == 200


def test_other_origins_only_as_configured() -> None:
    origin = {"Origin": "https://chat.example"}
    with served("Hi.") as client:
        reply = client.get("/health", headers=origin)
        assert "access-control-allow-origin" not in reply.headers
    with served("Hi.", cors_origins=("https://chat.example",), api_key="key") as client:
        asked = {**origin, "Access-Control-Request-Method": "POST"}
        assert client.options("/v1/chat/completions", headers=asked).status_code == 200
        reply = client.get("/v1/models", headers=origin)
        assert reply.status_code == 401  # a page must be able to read why
        assert reply.headers["access-control-allow-origin"] == "https://chat.example"
        other = client.get("/health", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_client_in_a_browser_may_send_headers_of_its_own() -> None:
    with served("Hi.", cors_origins=("https://chat.example",)) as client:
        wanted = {
            "Origin": "https://chat.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
        }
        reply = client.options("/v1/chat/completions", headers=wanted)
        assert reply.status_code == 200
        assert "x-stainless-lang" in reply.headers["access-control-allow-headers"]


def test_a_model_is_found_by_its_name() -> None:
    with served("Hi.") as client:
        listed = client.get("/v1/models").json()["data"][0]
        assert client.get("/v1/models/fake").json() == listed
        missing = client.get("/v1/models/other")
        assert missing.status_code == 404
        assert missing.json()["error"]["message"] == "there is one model here, fake"


def test_a_prompt_beyond_the_context_is_told_in_llama_servers_words() -> None:
    with served("Hi.", n_ctx=64) as client:
        error = client.post("/v1/completions", json={"prompt": "x" * 99}).json()["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "exceed_context_size_error", 400, "prompt",
    )  # fmt: skip
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (100, 64)
    assert "leaves no room" in error["message"]


@pytest.mark.parametrize(
    ("host", "port", "told"),
    [
        ("127.0.0.1", 70000, "--port is 70000: it must be at most 65535"),
        ("192.0.2.1", 0, "cannot listen on 192.0.2.1:0 .*: give an address of this machine"),
        ("2001:db8::1", 0, r"cannot listen on \[2001:db8::1\]:0 "),
        ("no.such.host.invalid", 0, "give an address of this machine with --host"),
    ],
)
def test_an_address_that_cannot_be_had_is_told_with_what_to_do(
    host: str, port: int, told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        bound_socket(host, port)


def test_a_machine_without_ipv6_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(family: int, *_: object) -> None:
        assert family == socket.AF_INET6
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr("socket.socket", refused)
    with pytest.raises(UsageError, match=r"\[::1\]:80 \(Address family .*: give an address"):
        bound_socket("::1", 80)


@pytest.mark.parametrize("text", ["chat.example", "https://chat.example/", "null", "https://"])
def test_an_origin_that_no_browser_sends_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="scheme, host and port"):
        read_origins([text])
    assert read_origins(["HTTPS://Chat.example:1"]) == ("https://chat.example:1",)


def test_a_port_that_browsers_leave_out_is_left_out() -> None:
    given = ["https://a.example:443", "http://a.example:80", "http://a.example:443", "*"]
    assert read_origins(given) == (
        *("https://a.example", "http://a.example"),
        *("http://a.example:443", "*"),
    )


def test_tokens_and_templates() -> None:
    with served("Hi.") as client:
        tokens = client.post("/tokenize", json={"content": "ab", "add_special": True}).json()
        assert tokens == {"tokens": [256, 97, 98]}
        pieces = client.post("/tokenize", json={"content": "ü", "with_pieces": True}).json()
        assert [entry["piece"] for entry in pieces["tokens"]] == [[0xC3], [0xBC]]
        text = client.post("/detokenize", json={"tokens": [97, 0xC3, 0xBC]}).json()
        assert text == {"content": "aü"}
        wrong = client.post("/detokenize", json={"tokens": [9999]})
        assert wrong.status_code == 400 and "9999" in wrong.json()["error"]["message"]
        prompt = client.post("/apply-template", json=ASK).json()["prompt"]
        assert prompt == "user=Hello\nA:"


def test_props_slots_and_models_tell_no_paths() -> None:
    with served("Hi.") as client:
        props = client.get("/props").json()
        assert props["total_slots"] == 1 and props["chat_template"] == TEMPLATE
        assert props["default_generation_settings"]["n_ctx"] == 512
        assert props["model_path"] == "target.gguf"
        assert client.get("/slots").json()[0]["is_processing"] is False
        meta = client.get("/v1/models").json()["data"][0]["meta"]
        assert meta == {"n_vocab": VOCAB, "n_ctx": 512}


def test_the_model_is_described_with_llama_servers_numbers() -> None:
    facts = TargetFacts(
        context_train=32768, hidden_size=896, num_parameters=494_032_768, size_bytes=398_000_000
    )
    with served("Hi.", parts={"facts": facts}) as client:
        meta = client.get("/v1/models/fake").json()["meta"]
    assert meta == {
        "n_vocab": VOCAB,
        "n_ctx": 512,
        "n_ctx_train": 32768,
        "n_embd": 896,
        "n_params": 494_032_768,
        "size": 398_000_000,
    }


def test_metrics_count_what_was_done() -> None:
    with served("abcabcabcabcabc") as client:
        for _ in range(2):
            client.post("/v1/chat/completions", json=ASK)
        client.post("/v1/chat/completions", json={**ASK, "stream": True})
        client.post("/v1/chat/completions", json={})
        lines = client.get("/metrics").text.split("\n")
    values = dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    assert float(values["llamacpp:tokens_predicted_total"]) == 48
    assert float(values["llamacpp:spec_decode_num_accepted_tokens_total"]) > 0
    assert float(values['llamacpp:requests_total{status="200"}']) == 3
    assert float(values['llamacpp:requests_total{status="400"}']) == 1
    assert float(values["llamacpp:requests_processing"]) == 0


def test_unknown_routes_and_methods() -> None:
    with served("Hi.") as client:
        assert client.get("/nowhere").json()["error"]["type"] == "not_found_error"
        reply = client.get("/v1/chat/completions")
        assert reply.status_code == 405 and "methods" in reply.json()["error"]["message"]


def test_the_openapi_document_describes_every_post_route() -> None:
    document = openapi_document()
    posts = {path for path, item in document["paths"].items() if "post" in item}
    assert posts == {
        *("/v1/chat/completions", "/v1/completions"),
        *("/tokenize", "/detokenize", "/apply-template"),
    }
    text = json.dumps(document)
    names = set(document["components"]["schemas"])
    for reference in set(text.split('"#/components/schemas/')[1:]):
        assert reference.split('"')[0] in names


def test_logs_hold_no_prompts_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    for logs in (False, True):
        caplog.clear()
        with caplog.at_level(logging.INFO, "dspine.server"), served("Hi.", logs_prompts=logs) as c:
            c.post("/v1/chat/completions", json=ASK)
        assert ("Hello" in caplog.text) is logs
        assert "POST /v1/chat/completions 200" in caplog.text


def test_an_error_inside_tells_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeTarget):
        fails = True

        def decode(self, *arguments: Any) -> None:
            if self.fails:
                self.fails = False
                raise RuntimeError("secret thing")
            super().decode(*arguments)

    target = Broken(says("Hi."), VOCAB)
    with serving(make_service(target)) as client:
        reply = client.post("/v1/chat/completions", json=ASK)
        assert reply.status_code == 500 and "secret" not in reply.text
        assert reply.json()["error"]["type"] == "server_error"
        target.fails = True
        stream = client.post("/v1/chat/completions", json={**ASK, "stream": True})
        assert stream.status_code == 500
    assert "secret thing" in caplog.text


def test_requests_wait_their_turn_and_the_queue_has_a_limit() -> None:
    target = SlowTarget(says("Hi."), VOCAB, n_ctx=256)
    service = make_service(target, queue_limit=1)
    with serving(service) as client:
        target.may_go.clear()
        target.started.clear()
        replies: list[int] = []

        def ask() -> None:
            replies.append(client.post("/v1/chat/completions", json=ASK).status_code)

        first = threading.Thread(target=ask)
        first.start()
        assert target.started.wait(PATIENCE)
        second = threading.Thread(target=ask)
        second.start()
        until(lambda: service.thread.n_waiting == 1)
        full = client.post("/v1/chat/completions", json=ASK)
        assert full.status_code == 503 and full.headers["Retry-After"] == "1"
        assert "requests are waiting" in full.json()["error"]["message"]
        slots = client.get("/slots").json()[0]
        assert slots["is_processing"] is True and slots["n_waiting"] == 1
        target.may_go.set()
        first.join(PATIENCE)
        second.join(PATIENCE)
        assert replies == [200, 200]
        assert service.thread.n_running == service.thread.n_waiting == 0


class Pausing(SlowTarget):
    """Closes its own gate after some decodes, so that the engine waits for the test."""

    pause = 9

    def decode(self, *arguments: Any) -> None:
        super().decode(*arguments)
        self.pause -= 1
        if self.pause == 0:
            self.may_go.clear()


def test_a_reader_that_leaves_ends_the_answer() -> None:
    target = Pausing(says("x" * 200), VOCAB, n_ctx=512)
    service = make_service(target)

    async def leave() -> int:
        events = service.thread.answer(Job([65, 58], {"max_tokens": 300}))
        seen = 0
        async for _ in events:
            seen += 1
            if seen == 3:
                break
        await events.aclose()  # type: ignore[attr-defined]
        return seen

    service.thread.start()
    assert service.thread.wait_ready(PATIENCE)
    assert asyncio.run(leave()) == 3
    held = len(target.memory)
    target.may_go.set()
    service.thread.stop(PATIENCE)
    assert service.thread.n_running == 0
    # The step in which it left, and no other.
    assert held <= len(target.memory) <= held + 8 < 100


def test_stopping_lets_an_answer_end_and_takes_no_new_one() -> None:
    target = SlowTarget(says("Hi."), VOCAB, n_ctx=256)
    service = make_service(target)
    service.thread.start()
    assert service.thread.wait_ready(PATIENCE)

    async def scenario() -> list[str]:
        target.may_go.clear()
        target.started.clear()
        kinds: list[str] = []

        async def read() -> None:
            events = service.thread.answer(Job([65, 58], {"max_tokens": 9}))
            kinds.extend([type(event).__name__ async for event in events])

        reading = asyncio.ensure_future(read())
        await asyncio.to_thread(target.started.wait, PATIENCE)
        stopping = asyncio.ensure_future(asyncio.to_thread(service.thread.stop, PATIENCE))
        while service.thread.state != "stopped":
            await asyncio.sleep(0.01)
        with pytest.raises(BusyError, match="stopping"):
            await anext(service.thread.answer(Job([65, 58], {})))
        target.may_go.set()
        await reading
        await stopping
        return kinds

    kinds = asyncio.run(scenario())
    assert kinds[0] == "Prefill" and kinds[-1] == "Finish"


def test_stopping_breaks_off_what_does_not_end_in_time() -> None:
    target = Pausing(says("x" * 400), VOCAB, n_ctx=512)
    service = make_service(target)
    service.thread.start()
    assert service.thread.wait_ready(PATIENCE)
    stopping = threading.Thread(target=service.thread.stop, args=(0.0,))

    async def scenario() -> str:
        last = ""
        async for event in service.thread.answer(Job([65, 58], {})):
            if not last:
                [running] = service.thread._running
                stopping.start()
                await asyncio.to_thread(running.cancel.wait, PATIENCE)
                target.may_go.set()
            last = getattr(event, "reason", "running")
        return last

    assert asyncio.run(scenario()) == "cancelled"
    stopping.join(PATIENCE)
    assert service.thread.has_ended and len(target.memory) < 100


def test_the_page_loads_nothing_from_elsewhere_and_asks_for_the_key() -> None:
    with served("Hi.", api_key="key") as client:
        page = client.get("/")
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
        names = set(re.findall(r'(?:src|href)="([^"]+)"', page.text)) - {"data:,"}
        assert names == {"page.css", "page.js"}
        for name in (*names, "stream.js"):
            part = client.get(f"/{name}")
            assert part.status_code == 200 and "http://" not in part.text.replace(
                "http://www.w3.org/2000/svg", ""
            )
            assert "https://" not in part.text
        # Every control has a name that a screen reader can say.
        labelled = set(re.findall(r'<label[^>]* for="([^"]+)"', page.text))
        controls = set(re.findall(r'<(?:input|textarea)[^>]* ?id="([^"]+)"', page.text))
        assert controls - labelled == {"drafting"}  # its label stands around it


def test_texts_of_tokens_come_when_asked_for() -> None:
    with served("abcabcabc") as client:
        asked = {**ASK, "return_token_texts": True}
        found = client.post("/v1/chat/completions", json=asked).json()["dspine"]
        bare = client.post("/v1/chat/completions", json=ASK).json()["dspine"]
    assert "".join(found["texts"]) == "abcabcabc"
    assert len(found["texts"]) == sum(step["tokens"] for step in found["steps"])
    assert "texts" not in bare


def test_small_chunks_are_sent_at_once() -> None:
    """Otherwise the first ones of an answer wait 40 ms for a client's acknowledgement."""

    async def accepted() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            found.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bound_socket("127.0.0.1", 0)
        async with await asyncio.start_server(note, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await asyncio.wait_for(found, PATIENCE)

    assert asyncio.run(accepted()) != 0
