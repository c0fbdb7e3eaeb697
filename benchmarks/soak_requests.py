"""What `soak.py` asks: mixed requests to a server, and what each reply must look like.

Greedy and seeded answers have a key: with the same key the text is the same, whoever else is
being answered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Document = Mapping[str, Any]
Leave = Literal["chunks", "soon", "upload"]

QUESTIONS = (
    "Write a Python function that adds two numbers.",
    "Name three rivers of Europe.",
    "Why is the sky blue?",
    "Count from 1 to 30.",
    "Translate to French: The cat sleeps on the chair.",
    "What is 17 + 25? Explain each step.",
    "Write a short poem about rain.",
    "List the months of the year.",
    "Explain what a hash table is.",
    "Write an SQL query that counts the orders of each customer.",
)
BEGINNINGS = ("1, 2, 3, 4,", "Once upon a time", "def fibonacci(n):", "The capital of France is")
STOPS = ("\n", ".", " the", ",")
SCHEMA: Document = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog", "bird"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
TOOL: Document = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
BAD_BODIES: tuple[tuple[str, bytes], ...] = (
    (CHAT, b"{"),
    (CHAT, b"[1, 2]"),
    (CHAT, b"\xff\xfe"),
    (CHAT, b"[" * 50_000),
    (CHAT, b"{}"),
    (CHAT, b'{"messages": []}'),
    (CHAT, b'{"messages": [{"role": "user", "content": 7}]}'),
    (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}'),
    (TEXT, b'{"prompt": ""}'),
    (TEXT, b'{"prompt": ["a", "b"]}'),
    (TEXT, b'{"prompt": [99999999]}'),
    (TEXT, b'{"prompt": [-1]}'),
    (TEXT, b'{"prompt": "a", "max_tokens": 0}'),
    (TEXT, b'{"prompt": "a", "max_tokens": "many"}'),
    (TEXT, b'{"prompt": "a", "temperature": -1}'),
    (TEXT, b'{"prompt": "a", "n": 2}'),
    (TEXT, b'{"prompt": "a", "stop": [""]}'),
    (TEXT, b'{"prompt": "a", "logit_bias": {"x": 1}}'),
    (TEXT, b'{"prompt": "a", "grammar": "this is no grammar ("}'),
    (TEXT, b'{"prompt": "a", "json_schema": {"type": "nothing"}}'),
    (TEXT, b'{"prompt": "a", "samplers": ["best"], "temperature": 1}'),
    (TEXT, b'{"prompt": "a", "speculative": {"n_max": -1}}'),
    ("/tokenize", b"{}"),
    ("/detokenize", b'{"tokens": [99999999]}'),
)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: a document, or the documents of a stream."""

    status: int
    documents: Sequence[Document] = ()
    is_done: bool = False
    """Whether a stream ended with its last line."""
    seconds: float = 0.0
    first_seconds: float = 0.0
    """Until the first text."""

    @property
    def text(self) -> str:
        """Content and thoughts in order."""
        return "".join(_said(choice) for choice in self.choices)

    @property
    def choices(self) -> list[Any]:
        return [choice for one in self.documents for choice in one.get("choices", [])]

    @property
    def tokens(self) -> list[int]:
        return [token for choice in self.choices for token in choice.get("token_ids", [])]

    @property
    def reason(self) -> str | None:
        return next((c["finish_reason"] for c in self.choices if c["finish_reason"]), None)

    def last(self, name: str) -> Any:
        """The newest document's value of that name; None without one."""
        return next((one[name] for one in reversed(self.documents) if name in one), None)


Check = Callable[[Reply], str | None]
"""What is wrong with a reply; None for nothing."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `key` names its text, None where it is drawn without a seed."""

    kind: str
    path: str
    body: bytes = b""
    method: str = "POST"
    status: int = 200
    is_stream: bool = False
    key: str | None = None
    leave: Leave | None = None
    """The client goes away: after some chunks, soon after asking, in the middle of its body."""
    after: int = 1
    """Chunks to read before that, or hundredths of a second to wait."""
    checks: tuple[Check, ...] = field(default=())


def asks(count: int, seed: int, n_ctx: int, body_limit: int) -> Iterator[Ask]:
    """`count` requests for a server whose slots have `n_ctx` positions."""
    drawn = random.Random(seed)
    kinds = list(_KINDS)
    weights = [weight for _, weight in _KINDS.values()]
    for _ in range(count):
        kind = drawn.choices(kinds, weights)[0]
        made, _ = _KINDS[kind]
        yield made(kind, drawn, n_ctx, body_limit)


def references(todo: Sequence[Ask]) -> list[Ask]:
    """A request of every key in `todo`, each once, to be asked alone."""
    return list({one.key: one for one in todo if one.key is not None}.values())


def fault(ask: Ask, reply: Reply) -> str | None:
    """What is wrong with a reply, whatever was asked for first."""
    if reply.status != ask.status:
        return f"status {reply.status} instead of {ask.status}: {str(reply.documents)[:300]}"
    if ask.leave is not None:
        return None
    if ask.status != 200:
        return _error_fault(ask.status, reply)
    if ask.path in (CHAT, TEXT):
        found = _answer_fault(ask, reply)
        if found is not None:
            return found
    return next((words for check in ask.checks if (words := check(reply)) is not None), None)


def _error_fault(status: int, reply: Reply) -> str | None:
    error = reply.last("error")
    if not isinstance(error, dict) or error.get("code") != status or not error.get("message"):
        return f"an error without code or message: {str(reply.documents)[:300]}"
    return None


def _answer_fault(ask: Ask, reply: Reply) -> str | None:
    broken = reply.last("error")
    if broken is not None:
        return f"a stream with an error: {broken}"
    if ask.is_stream and not reply.is_done:
        return "a stream without its last line"
    if reply.reason not in ("stop", "length", "tool_calls"):
        return f"finish_reason {reply.reason!r}"
    timings, usage = reply.last("timings"), reply.last("usage")
    if timings is None or timings["predicted_n"] != len(reply.tokens):
        return f"{len(reply.tokens)} token ids and timings {timings}"
    if usage is None and not ask.is_stream:
        return "a reply without usage"
    if usage is not None:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if usage["completion_tokens"] != len(reply.tokens):
            return f"{len(reply.tokens)} token ids and usage {usage}"
        if not 0 <= cached < usage["prompt_tokens"]:
            return f"{cached} tokens of {usage['prompt_tokens']} from memory"
    limit = json.loads(ask.body)["max_tokens"]
    if len(reply.tokens) > limit:
        return f"{len(reply.tokens)} tokens, {limit} at most"
    if reply.reason == "length" and len(reply.tokens) < limit:
        return f"cut at {len(reply.tokens)} of {limit} tokens"
    for choice in reply.choices:
        if ask.is_stream and _said(choice) and not choice.get("token_ids"):
            return "a chunk with text and no token ids"
    return None


def _said(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    part = choice.get("delta") or choice.get("message") or {}
    return f"{part.get('reasoning_content') or ''}{part.get('content') or ''}"


# -- the kinds -------------------------------------------------------------------------------------

Maker = Callable[[str, random.Random, int, int], Ask]


def _answer(
    kind: str,
    drawn: random.Random,
    body: dict[str, Any],
    *,
    path: str = CHAT,
    key: str | None = None,
    checks: tuple[Check, ...] = (),
    **more: Any,
) -> Ask:
    """A request for an answer, streamed in half of the cases."""
    is_stream = drawn.random() < 0.5
    if is_stream:
        body["stream"] = True
        if drawn.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        if drawn.random() < 0.2:
            body["return_progress"] = True
    return Ask(
        kind,
        path,
        json.dumps(body).encode(),
        is_stream=is_stream,
        key=key,
        checks=checks,
        **more,
    )


def _question(drawn: random.Random, first: int = len(QUESTIONS)) -> tuple[str, dict[str, Any]]:
    """A greedy request of the `first` questions; its key decides everything about its text."""
    number = drawn.randrange(first)
    return f"chat-{number}", {
        "messages": [{"role": "user", "content": QUESTIONS[number]}],
        "max_tokens": 8 + number * 16 // len(QUESTIONS),
        "temperature": 0,
    }


def _chat(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    key, body = _question(drawn)
    body["cache_prompt"] = drawn.random() < 0.7
    return _answer(kind, drawn, body, key=key)


def _text(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    number = drawn.randrange(len(BEGINNINGS))
    body = {"prompt": BEGINNINGS[number], "max_tokens": 12 + 4 * number, "temperature": 0}
    return _answer(kind, drawn, body, path=TEXT, key=f"text-{number}")


def _turns(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    number = drawn.randrange(4)
    said = [
        {"role": "system", "content": "Answer in few words."},
        {"role": "user", "content": QUESTIONS[number]},
        {"role": "assistant", "content": "I will."},
        {"role": "user", "content": QUESTIONS[number + 4]},
    ]
    body = {"messages": said, "max_tokens": 16, "temperature": 0}
    return _answer(kind, drawn, body, key=f"turns-{number}")


def _long(kind: str, drawn: random.Random, n_ctx: int, _b: int) -> Ask:
    number = drawn.randrange(2)
    text = "The river runs past the old mill and the miller counts his sacks. " * (n_ctx // 32)
    body = {
        "messages": [{"role": "user", "content": f"{text} {QUESTIONS[number]}"}],
        "max_tokens": 8,
        "temperature": 0,
        "cache_prompt": False,
    }
    return _answer(kind, drawn, body, key=f"long-{number}")


def _schema(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    number = drawn.randrange(3)
    body = {
        "messages": [{"role": "user", "content": f"Animal {number} as JSON."}],
        "max_tokens": 48,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    }

    def check(reply: Reply) -> str | None:
        if reply.reason == "length":
            return None
        found = json.loads(reply.text)
        return None if set(found) == {"name", "age", "kind"} else f"not of the schema: {found}"

    return _answer(kind, drawn, body, key=f"schema-{number}", checks=(check,))


def _tools(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    body = {
        "messages": [{"role": "user", "content": "How is the weather in Rome?"}],
        "max_tokens": 64,
        "temperature": 0,
        "tools": [TOOL],
        "tool_choice": "required",
    }

    def check(reply: Reply) -> str | None:
        return None if reply.reason == "tool_calls" else f"no call: {reply.text!r}"

    return _answer(kind, drawn, body, checks=(check,))


def _logprobs(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    key, body = _question(drawn)
    body |= {"logprobs": True, "top_logprobs": drawn.randrange(4)}

    def check(reply: Reply) -> str | None:
        noted = [
            entry
            for choice in reply.choices
            if choice.get("logprobs")
            for entry in choice["logprobs"]["content"]
        ]
        if [entry["id"] for entry in noted] != reply.tokens:
            return f"{len(noted)} log-probabilities of {len(reply.tokens)} tokens"
        wrong = [entry["logprob"] for entry in noted if not -100 < entry["logprob"] <= 1e-3]
        return f"log-probabilities {wrong}" if wrong else None

    return _answer(kind, drawn, body, key=key, checks=(check,))


def _stops(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    key, body = _question(drawn, 3)
    number = drawn.randrange(len(STOPS))
    body["stop"] = [STOPS[number], "never said"]

    def check(reply: Reply) -> str | None:
        return f"{STOPS[number]!r} in {reply.text!r}" if STOPS[number] in reply.text else None

    return _answer(kind, drawn, body, key=f"{key}-stop-{number}", checks=(check,))


def _seeded(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    key, body = _question(drawn, 3)
    seed = drawn.randrange(2)
    body |= {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02, "seed": seed}
    return _answer(kind, drawn, body, key=f"{key}-seed-{seed}")


def _drawn(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    _, body = _question(drawn)
    body |= {"temperature": 1.2, "top_k": 50, "repeat_penalty": 1.1, "presence_penalty": 0.2}
    return _answer(kind, drawn, body)


def _bounded(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    key, body = _question(drawn)
    most = drawn.randrange(5)
    body["speculative"] = {"n_max": most}

    def check(reply: Reply) -> str | None:
        steps = [step for one in reply.documents for step in one.get("dspine", {}).get("steps", [])]
        wide = max((step["drafted"] for step in steps), default=0)
        if wide > most:
            return f"{wide} drafts with n_max {most}"
        if most == 0 and "draft_n" in reply.last("timings"):
            return f"n_max 0 and {reply.last('timings')}"
        return None

    return _answer(kind, drawn, body, key=key, checks=(check,))


def _too_long(kind: str, drawn: random.Random, n_ctx: int, _b: int) -> Ask:
    body = {
        "messages": [{"role": "user", "content": "word " * n_ctx * drawn.randrange(2, 5)}],
        "max_tokens": 8,
    }
    return _answer(kind, drawn, body, status=400)


def _too_large(kind: str, _d: random.Random, _n: int, body_limit: int) -> Ask:
    return Ask(kind, CHAT, b" " * (body_limit + 1), status=413)


def _bad(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    path, body = drawn.choice(BAD_BODIES)
    return Ask(kind, path, body, status=400)


def _lost(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    if drawn.random() < 0.5:
        return Ask(kind, "/nowhere", b"{}", status=404)
    return Ask(kind, CHAT, method="GET", status=405)


def _looked(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    paths = ("/health", "/slots", "/props", "/metrics", "/v1/models", "/openapi.json", "/")
    return Ask(kind, drawn.choice(paths), method="GET")


def _tokens(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    body = {"content": drawn.choice(QUESTIONS), "with_pieces": drawn.random() < 0.5}
    return Ask(kind, "/tokenize", json.dumps(body).encode())


def _left_stream(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    _, body = _question(drawn)
    body |= {"stream": True, "max_tokens": 200}
    after = drawn.randrange(4)
    return Ask(kind, CHAT, json.dumps(body).encode(), is_stream=True, leave="chunks", after=after)


def _left(kind: str, drawn: random.Random, _n: int, _b: int) -> Ask:
    _, body = _question(drawn)
    body["max_tokens"] = 200
    leave: Leave = "soon" if drawn.random() < 0.8 else "upload"
    return Ask(kind, CHAT, json.dumps(body).encode(), leave=leave, after=drawn.randrange(30))


_KINDS: Mapping[str, tuple[Maker, float]] = {
    "chat": (_chat, 20),
    "text": (_text, 10),
    "several turns": (_turns, 6),
    "long prompt": (_long, 3),
    "JSON schema": (_schema, 6),
    "tools": (_tools, 2),
    "log-probabilities": (_logprobs, 6),
    "stop strings": (_stops, 6),
    "seeded": (_seeded, 6),
    "sampled": (_drawn, 5),
    "bounded drafts": (_bounded, 8),
    "prompt too long": (_too_long, 2),
    "body too large": (_too_large, 1),
    "bad body": (_bad, 5),
    "no such route": (_lost, 1),
    "facts": (_looked, 3),
    "tokenize": (_tokens, 2),
    "stream left": (_left_stream, 5),
    "reply left": (_left, 3),
}
