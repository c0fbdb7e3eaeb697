"""The application: routes, who may use them, limits, and what happens at start and end."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspine.engine.engine import Engine
from dspine.server.engine_thread import EngineThread
from dspine.server.errors import RequestError, describe, error_response, response_of
from dspine.server.metrics import Metrics
from dspine.server.requests import Defaults

log = logging.getLogger("dspine.server")

OPEN_PATHS = frozenset({"/", "/page.css", "/page.js", "/stream.js", "/health", "/v1/health"})
"""Served without the API key: health, and the page, which asks for it."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server behaves; the engine is made by its own options."""

    alias: str
    """The model's name in replies."""
    api_key: str | None = None
    queue_limit: int = 64
    body_limit: int = 8 << 20
    """Bytes of a request's body."""
    cors_origins: tuple[str, ...] = ()
    ping_seconds: float = 30.0
    drain_seconds: float = 10.0
    logs_prompts: bool = False


class Service:
    """What the routes share."""

    def __init__(
        self,
        load: Callable[[], Engine],
        options: ServerOptions,
        defaults: Callable[[Engine], Defaults],
    ) -> None:
        self.options = options
        self.thread = EngineThread(load, queue_limit=options.queue_limit)
        self.metrics = Metrics()
        self.started = time.time()
        self._make_defaults = defaults
        self._defaults: Defaults | None = None

    @property
    def defaults(self) -> Defaults:
        """What holds where a request says nothing; they need the loaded engine."""
        if self._defaults is None:
            self._defaults = self._make_defaults(self.thread.engine)
        return self._defaults


def service(request: Request) -> Service:
    """The service of a request's application."""
    found: Service = request.app.state.service
    return found


def make_app(made: Service, routes: Sequence[BaseRoute]) -> Starlette:
    """The ASGI application; its lifespan starts the engine's thread and stops it."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        made.thread.start()
        try:
            yield
        finally:
            await run_in_threadpool(made.thread.stop, made.options.drain_seconds)

    middleware = [Middleware(_Watch, service=made)]
    if made.options.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(made.options.cors_origins),
                allow_methods=["GET", "POST", "OPTIONS"],
                # Clients in a browser send headers of their own, such as x-stainless-lang.
                allow_headers=["*"],
            )
        )
    middleware.append(Middleware(_Guard, service=made))
    app = Starlette(
        routes=list(routes),
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={HTTPException: _on_http},
    )
    app.state.service = made
    return app


def _on_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "there is no such route", 405: "this route has other methods"}
    reply = error_response(error.status_code, words.get(error.status_code, error.detail))
    reply.headers.update(error.headers or {})
    return reply


class _Watch:
    """Counts and logs every reply."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def remember(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, remember)
        finally:
            self._service.metrics.replied(status or 499)
            log.info(
                "%s %s %s %.0f ms",
                scope["method"],
                _printable(scope["path"]),
                status or "broken off",
                (time.perf_counter() - started) * 1000,
            )


class _Guard:
    """Refuses requests without the key and bodies beyond the limit; every error becomes a reply."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._options = service.options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun, size = False, 0

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._options.body_limit:
                raise self._too_large()
            return message

        try:
            self._check(scope)
            await self._app(scope, counted, noted)
        except ClientDisconnect:
            return  # in the middle of its request or of the reply: nobody is there to be told
        except Exception as error:
            if has_begun:  # nothing can be said any more
                log.error("a reply broke off", exc_info=error)
                return
            status, message, _ = describe(error)
            if status == 500:
                log.error("%s", message, exc_info=error)
            await response_of(error)(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if not self._may_enter(scope):
            raise RequestError(401, "the API key is missing or wrong: send it as Bearer token")
        announced = _header(scope, b"content-length")
        if announced.isdigit() and int(announced) > self._options.body_limit:
            raise self._too_large()

    def _too_large(self) -> RequestError:
        return RequestError(
            413, f"the body is larger than {self._options.body_limit} bytes: send less"
        )

    def _may_enter(self, scope: Scope) -> bool:
        key = self._options.api_key
        if key is None or scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        given = _header(scope, b"authorization")
        token = given[7:] if given[:7].lower() == b"bearer " else _header(scope, b"x-api-key")
        # In constant time: how long it takes tells nothing of the key.
        return hmac.compare_digest(token.strip(), key.encode())


def _header(scope: Scope, name: bytes) -> bytes:
    found: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in found if key == name), b"")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:200])


async def watch_disconnect(request: Request) -> None:
    """Returns when the client has gone."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)
