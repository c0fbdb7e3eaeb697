"""A server on an engine whose target says given texts; nothing of the real library."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.testclient import TestClient

from dspine.engine.engine import Engine
from dspine.engine.sampling import SamplingOptions
from dspine.server.app import ServerOptions, Service, make_app
from dspine.server.requests import Defaults
from dspine.server.routes import routes
from tests.support.fake_engine import EOS, VOCAB, make_engine
from tests.support.fake_slots import make_slots
from tests.support.fake_target import FakeTarget

PATIENCE = 60.0
"""Seconds that a test waits for what must happen, on a machine that may have other work."""
MARK = b"A:"
TEMPLATE = (
    "{% if tools %}<tool_call> {{ tools|tojson }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}={{ m.content }}\n{% endfor %}"
    "{% if enable_thinking %}A:{% else %}A:{% endif %}"
)


def until(what: Callable[[], bool]) -> None:
    """Wait until it is so."""
    limit = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.005)


def says(text: str) -> Callable[[Sequence[int]], int]:
    """A next-token function: after the mark that ends a prompt, this text, then the end."""
    script = [*text.encode(), EOS]

    def choose(tokens: Sequence[int]) -> int:
        for start in range(len(tokens) - 2, -1, -1):
            if bytes(t for t in tokens[start : start + 2] if t < 256) == MARK:
                said = len(tokens) - start - 2
                return script[said] if said < len(script) else EOS
        return EOS

    return choose


class SlowTarget(FakeTarget):
    """Decodes only when it is let; `started` tells that a decode waits."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.may_go = threading.Event()
        self.may_go.set()
        self.started = threading.Event()

    def decode(self, *arguments: Any) -> None:
        self.started.set()
        assert self.may_go.wait(PATIENCE)
        super().decode(*arguments)


def make_service(
    *targets: FakeTarget,
    template: str = TEMPLATE,
    load: Callable[[], Engine] | None = None,
    max_tokens: int | None = None,
    parts: Mapping[str, Any] | None = None,
    **options: Any,
) -> Service:
    """A service with a slot for each target; `parts` are those of the engine."""

    def make() -> Engine:
        if len(targets) > 1:
            return make_slots(*targets, template=template, **(parts or {}))
        return make_engine(targets[0], template=template, **(parts or {}))

    def defaults(engine: Engine) -> Defaults:
        return Defaults(
            sampling=SamplingOptions(),
            max_tokens=max_tokens,
            template=engine.template_source,
            end_tokens=lambda: (EOS,),
        )

    return Service(load or make, ServerOptions(alias="fake", **options), defaults)


@contextmanager
def served(text: str, **options: Any) -> Iterator[TestClient]:
    """A client of a server whose target says `text` after every prompt."""
    target = FakeTarget(says(text), VOCAB, n_ctx=options.pop("n_ctx", 512))
    with serving(make_service(target, **options)) as client:
        yield client


@contextmanager
def serving(service: Service) -> Iterator[TestClient]:
    """The server is loaded when this begins."""
    with TestClient(make_app(service, routes()), raise_server_exceptions=True) as client:
        assert service.thread.wait_ready(PATIENCE)
        yield client
