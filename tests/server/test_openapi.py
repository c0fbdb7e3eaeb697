"""Generated requests of every shape against the OpenAPI document: errors keep to it as well."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.types import Receive, Scope, Send

from dspine.server.app import make_app
from dspine.server.routes import routes
from tests.support.fake_engine import VOCAB
from tests.support.fake_target import FakeTarget
from tests.support.served import PATIENCE, make_service, says, until

SERVICE = make_service(FakeTarget(says("Hi there."), VOCAB, n_ctx=512), max_tokens=16)
APP = make_app(SERVICE, routes())


async def running(scope: Scope, receive: Receive, send: Send) -> None:
    """The application, but the engine outlives the client that begins and ends it for each call."""
    if scope["type"] != "lifespan":
        await APP(scope, receive, send)
        return
    while (await receive())["type"] == "lifespan.startup":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})


SERVICE.thread.start()
schema = schemathesis.openapi.from_asgi("/openapi.json", running)


@schema.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_reply_keeps_to_the_document(case: schemathesis.Case[Any]) -> None:
    assert SERVICE.thread.wait_ready(PATIENCE)
    # What a schema cannot say (a prompt too long, two constraints at once) is refused as well.
    case.call_and_validate(excluded_checks=[positive_data_acceptance])
    until(lambda: SERVICE.thread.n_running == 0)
