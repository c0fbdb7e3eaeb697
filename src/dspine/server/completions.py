"""POST /v1/chat/completions and /v1/completions, streamed or not."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dspine.engine.engine import Engine
from dspine.engine.events import Event
from dspine.engine.stats import Stats
from dspine.server.app import Service, service, watch_disconnect
from dspine.server.bodies import ChatBody, CompletionBody
from dspine.server.errors import RequestError, describe, error_body
from dspine.server.inbox import Job
from dspine.server.requests import Wish, chat_wish, completion_wish
from dspine.server.streams import (
    DONE,
    PING,
    AnswerReader,
    Document,
    Documents,
    Kind,
    Writer,
    chunks,
    sse,
    whole,
)
from dspine.text.reasoning import OPEN

log = logging.getLogger("dspine.server")

_SOON = 2.0
"""Seconds to wait for the first event before a stream begins: errors then still get a status."""
_Model = TypeVar("_Model", bound=BaseModel)


async def chat_completions(request: Request) -> Response:
    """An answer to messages."""
    made = service(request)
    engine = made.thread.engine
    body = await read_body(request, ChatBody)
    return await _answer(request, made, engine, "chat", chat_wish(body, made.defaults))


async def completions(request: Request) -> Response:
    """A continuation of a text."""
    made = service(request)
    engine = made.thread.engine
    body = await read_body(request, CompletionBody)
    return await _answer(request, made, engine, "text", completion_wish(body, made.defaults))


async def read_body(request: Request, model: type[_Model]) -> _Model:
    """The body as `model`. Raises RequestError when it is no JSON, ValidationError else."""
    raw = await request.body()
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {str(error)[:100]}") from None
    if not isinstance(values, dict):
        raise RequestError(400, "the body is no JSON object: send one")
    # Strictly: a text where a number belongs is a mistake that the client should hear of.
    return model.model_validate_json(raw, strict=True)


async def _answer(
    request: Request, made: Service, engine: Engine, kind: Kind, wish: Wish
) -> Response:
    options = dict(wish.options)
    raw, variables = options.pop("raw", False), options.pop("variables", {})
    tokens = await run_in_threadpool(engine.encode, wish.prompt, raw=raw, variables=variables)
    if len(tokens) >= engine.n_ctx:
        fewer = " or a smaller -np" if engine.slots > 1 else ""
        raise RequestError(
            400,
            f"the prompt has {len(tokens)} tokens and leaves no room for an answer in the context "
            f"of {engine.n_ctx}: shorten it, or start the server with a larger -c{fewer}",
            "messages" if kind == "chat" else "prompt",
            # llama-server's words, by which agents know that they should shorten the conversation.
            type="exceed_context_size_error",
            n_prompt_tokens=len(tokens),
            n_ctx=engine.n_ctx,
        )
    if made.options.logs_prompts:
        log.info("prompt %s", json.dumps(wish.prompt, ensure_ascii=False, default=str))
    piece = engine.tokenizer.piece
    end = b"".join(piece(token, special=True) for token in tokens[-8:]).decode("utf-8", "replace")
    reader = AnswerReader(wish, kind, thinks_at_start=end.rstrip().endswith(OPEN))
    writer = Writer(kind, made.options.alias, piece, wish)
    if wish.is_stream:
        heard = made.thread.listen(Job(tokens, options), patience=made.options.ping_seconds)
        return await _stream(request, made, heard, chunks(heard, wish, reader, writer))
    events = made.thread.answer(Job(tokens, options, as_it_comes=False))
    return await _reply(request, made, events, reader, writer)


async def _reply(
    request: Request,
    made: Service,
    events: AsyncIterator[Event],
    reader: AnswerReader,
    writer: Writer,
) -> Response:
    """One document; a client that goes away in the meantime ends the answer."""
    answering = asyncio.ensure_future(whole(events, reader, writer))
    watching = asyncio.ensure_future(watch_disconnect(request))
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=499)
        document, stats = answering.result()
    finally:
        for task in (answering, watching):
            await _end(task)
        await _close(events)
    _count(made, stats)
    return JSONResponse(document)


async def _stream(
    request: Request, made: Service, heard: AsyncIterator[Event | None], documents: Documents
) -> Response:
    """Server-sent events, one a verify; what fails early fails with a status."""
    first = asyncio.ensure_future(anext(documents))
    watching = asyncio.ensure_future(watch_disconnect(request))

    async def close() -> None:
        await _end(first)
        await _close(documents)
        await _close(heard)

    try:
        await asyncio.wait({first, watching}, timeout=_SOON, return_when=asyncio.FIRST_COMPLETED)
        has_left = watching.done() and not first.done()
        if first.done():
            first.result()
    except BaseException:
        await close()
        raise
    finally:
        await _end(watching)
    if has_left:
        await close()
        return Response(status_code=499)
    return _Stream(_body(made, documents, first), close)


class _Stream(StreamingResponse):
    """Server-sent events; however it ends, also before it began, the answer ends with it."""

    def __init__(self, body: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(body, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._close()


async def _body(
    made: Service, documents: Documents, first: Awaitable[Document]
) -> AsyncIterator[bytes]:
    counted = False
    try:
        waiting = first
        while True:
            document, stats = await waiting
            if stats is not None and not counted:
                counted = True
                _count(made, stats)
            yield PING if document is None else sse(document)
            waiting = anext(documents)
    except StopAsyncIteration:
        pass
    except Exception as error:
        status, message, param = describe(error)
        if status == 500:
            log.error("%s", message, exc_info=error)
        yield sse(error_body(status, message, param))
    yield DONE


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel a task that nobody waits for, and wait until it is over."""
    task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task


async def _close(events: AsyncIterator[Any]) -> None:
    """End an answer that nobody reads any more."""
    async with aclosing(events):  # type: ignore[type-var]  # it is an async generator
        pass


def _count(made: Service, stats: Stats) -> None:
    made.metrics.answered(stats)
    log.info(
        "answer %d prompt tokens (%d from memory), %d tokens at %.1f/s, acceptance length %.2f",
        stats.prompt_tokens,
        stats.cached_tokens,
        stats.tokens,
        stats.tokens_per_second,
        stats.acceptance_length,
    )
