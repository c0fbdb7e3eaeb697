"""Turns the engine's events into OpenAI's chunks, and into one reply."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from dspine.engine.events import Event, Finish, Prefill, Reading, Step, TokenLogprob
from dspine.engine.stats import Stats
from dspine.server.answers import (
    Piece,
    call_object,
    chat_logprobs,
    closing,
    finish_reason,
    new_id,
    now,
    origin,
    text_logprobs,
    usage,
)
from dspine.server.requests import Wish
from dspine.text.reasoning import ReasoningSplitter
from dspine.text.tool_calls import ToolCall, ToolCallParser

Kind = Literal["chat", "text"]
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


Document = tuple[dict[str, Any] | None, Stats | None]
"""A chunk, None for a ping; the last ones come with the answer's statistics."""
Documents = AsyncIterator[Document]

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def sse(document: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {_encode(document)}\n\n".encode()


@dataclass(slots=True)
class Delta:
    """What became certain of an answer: content, thoughts, whole tool calls, and its tokens."""

    content: str = ""
    thought: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_text(self) -> bool:
        return bool(self.content or self.thought or self.calls)


class AnswerReader:
    """Reads the events of one answer. Tokens whose text is held back go with the next text, so
    that every token is on exactly one delta and none is lost.
    """

    def __init__(self, wish: Wish, kind: Kind, *, thinks_at_start: bool = False) -> None:
        self._reasoning = (
            ReasoningSplitter(open_at_start=thinks_at_start) if kind == "chat" else None
        )
        self._calls = ToolCallParser(wish.tools) if wish.tools else None
        self._pending = Delta()
        self.has_calls = False

    def step(self, step: Step) -> Delta | None:
        """The delta of a step, None while its text is held back."""
        pending = self._pending
        pending.tokens += step.tokens
        pending.logprobs += step.logprobs or ()
        if step.tokens:
            pending.steps.append({"tokens": len(step.tokens), **origin(step)})
        self._read(step.text)
        return self._take() if pending.has_text else None

    def finish(self) -> Delta | None:
        """The rest, None when nothing is left."""
        if self._reasoning is not None:
            thought, answer = self._reasoning.finish()
            self._pending.thought += thought
            self._said(answer)
        if self._calls is not None:
            said, calls = self._calls.finish()
            self._pending.content += said
            self._pending.calls += calls
        return self._take() if self._pending.has_text or self._pending.tokens else None

    def _read(self, text: str) -> None:
        if self._reasoning is None:
            self._pending.content += text
            return
        thought, answer = self._reasoning.push(text)
        self._pending.thought += thought
        self._said(answer)

    def _said(self, answer: str) -> None:
        if self._calls is None:
            self._pending.content += answer
            return
        said, calls = self._calls.push(answer)
        self._pending.content += said
        self._pending.calls += calls

    def _take(self) -> Delta:
        taken, self._pending = self._pending, Delta()
        self.has_calls |= bool(taken.calls)
        return taken


class Writer:
    """Writes chunks and replies of one answer."""

    def __init__(self, kind: Kind, model: str, piece: Piece, wish: Wish) -> None:
        self._kind = kind
        self._model = model
        self._piece = piece
        self._wants_logprobs = wish.logprobs is not None
        self._wants_texts = wish.wants_texts
        self._id = new_id("chatcmpl" if kind == "chat" else "cmpl")
        self._created = now()
        self._calls = 0
        self._length = 0
        self._is_first = True

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """A chunk of the stream. `dspine` tells for each verify in it who wrote its tokens."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": None, "token_ids": delta.tokens}
        if self._kind == "chat":
            choice["delta"] = self._chat_delta(delta)
        else:
            choice["text"] = delta.content
        choice["logprobs"] = self._logprobs(delta)
        return self._document([choice], dspine=self._origins(delta))

    def last(self, finish: Finish, *, has_calls: bool, with_usage: bool) -> list[dict[str, Any]]:
        """The chunk with the reason, and if wanted the one with the usage, both with the counts."""
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": finish_reason(finish, has_calls=has_calls),
            "logprobs": None,
        }
        choice |= dict[str, Any](delta={}) if self._kind == "chat" else {"text": ""}
        chunks = [self._document([choice], **closing(finish.stats))]
        if with_usage:
            chunks.append(self._document([], usage=usage(finish.stats), **closing(finish.stats)))
        return chunks

    def progress(self, event: Reading | Prefill) -> dict[str, Any]:
        """llama-server's `prompt_progress`, after each part of the prompt."""
        done = {
            "total": event.tokens,
            "cache": event.reused,
            "processed": event.done if isinstance(event, Reading) else event.tokens,
            "time_ms": round(event.ms),
        }
        return self._document([], prompt_progress=done)

    def reply(self, delta: Delta, finish: Finish) -> dict[str, Any]:
        """The whole answer as one document."""
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": finish_reason(finish, has_calls=bool(delta.calls)),
            "token_ids": delta.tokens,
        }
        if self._kind == "chat":
            message: dict[str, Any] = {"role": "assistant", "content": delta.content}
            if delta.thought:
                message["reasoning_content"] = delta.thought
            if delta.calls:
                message["tool_calls"] = [call_object(call) for call in delta.calls]
                message["content"] = delta.content or None
            choice["message"] = message
        else:
            choice["text"] = delta.content
        choice["logprobs"] = self._logprobs(delta)
        return self._document(
            [choice],
            is_chunk=False,
            usage=usage(finish.stats),
            dspine=self._origins(delta),
            **closing(finish.stats),
        )

    def _chat_delta(self, delta: Delta) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._is_first:  # with the first text: a chunk before it would count as a first token
            found["role"], self._is_first = "assistant", False
        if delta.thought:
            found["reasoning_content"] = delta.thought
        if delta.content:
            found["content"] = delta.content
        if delta.calls:
            found["tool_calls"] = [
                call_object(call, self._calls + i) for i, call in enumerate(delta.calls)
            ]
            self._calls += len(delta.calls)
        return found

    def _origins(self, delta: Delta) -> dict[str, Any]:
        found: dict[str, Any] = {"steps": delta.steps}
        if self._wants_texts:
            found["texts"] = [
                self._piece(token).decode("utf-8", "replace") for token in delta.tokens
            ]
        return found

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        if self._kind == "chat":
            return chat_logprobs(delta.logprobs, self._piece)
        start, self._length = self._length, self._length + len(delta.content)
        return text_logprobs(delta.logprobs, self._piece, start)

    def _document(
        self, choices: list[dict[str, Any]], *, is_chunk: bool = True, **more: Any
    ) -> dict[str, Any]:
        name = "text_completion"
        if self._kind == "chat":
            name = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **more,
        }


async def chunks(
    events: AsyncIterator[Event | None], wish: Wish, reader: AnswerReader, writer: Writer
) -> Documents:
    """Documents of a stream; an event of None is a ping."""
    async for event in events:
        if isinstance(event, Step):
            delta = reader.step(event)
            if delta is not None:
                yield writer.chunk(delta), None
        elif isinstance(event, Reading | Prefill):
            if wish.wants_progress:
                yield writer.progress(event), None
        elif event is None:
            yield None, None
        else:
            delta = reader.finish()
            if delta is not None:
                yield writer.chunk(delta), None
            for document in writer.last(
                event, has_calls=reader.has_calls, with_usage=wish.wants_usage
            ):
                yield document, event.stats


async def whole(
    events: AsyncIterator[Event], reader: AnswerReader, writer: Writer
) -> tuple[dict[str, Any], Stats]:
    """The answer in one document, and its statistics."""
    joined = Delta()
    async for event in events:
        delta: Delta | None = None
        if isinstance(event, Step):
            delta = reader.step(event)
        elif isinstance(event, Finish):
            delta = reader.finish()
        if delta is not None:
            joined.content += delta.content
            joined.thought += delta.thought
            joined.calls += delta.calls
            joined.tokens += delta.tokens
            joined.logprobs += delta.logprobs
            joined.steps += delta.steps
        if isinstance(event, Finish):
            return writer.reply(joined, event), event.stats
    raise RuntimeError("an answer ended without its last event")
