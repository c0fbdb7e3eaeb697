"""What an answer looks like on the wire: counts, timings, log-probabilities, tool calls."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from dspine.engine.events import Finish, Step, TokenLogprob
from dspine.engine.stats import Stats
from dspine.text.tool_calls import ToolCall

Piece = Callable[[int], bytes]


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}-{secrets.token_hex(12)}"


def now() -> int:
    """Seconds since 1970, as `created` has it."""
    return int(time.time())


def finish_reason(finish: Finish, *, has_calls: bool = False) -> str:
    """OpenAI's word for it."""
    if has_calls:
        return "tool_calls"
    return "length" if finish.reason in ("length", "context", "cancelled") else "stop"


def usage(stats: Stats) -> dict[str, Any]:
    """Counts of tokens, those that were in memory from before apart."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.tokens,
        "total_tokens": stats.prompt_tokens + stats.tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
    }


def timings(stats: Stats) -> dict[str, Any]:
    """llama-server's `timings`; the draft counts only when something was drafted, and why nothing
    is drafted though a drafter was asked for.
    """
    new = max(0, stats.prompt_tokens - stats.cached_tokens)
    found: dict[str, Any] = {
        "cache_n": stats.cached_tokens,
        "prompt_n": new,
        "prompt_ms": stats.prefill_ms,
        "prompt_per_token_ms": stats.prefill_ms / new if new else 0.0,
        "prompt_per_second": stats.prompt_tokens_per_second,
        "predicted_n": stats.tokens,
        "predicted_ms": stats.wall_ms,
        "predicted_per_token_ms": stats.wall_ms / stats.tokens if stats.tokens else 0.0,
        "predicted_per_second": stats.tokens_per_second,
    }
    if stats.disabled_reason:
        found["drafting_off"] = stats.disabled_reason
    if stats.drafted:
        found |= {"draft_n": stats.drafted, "draft_n_accepted": stats.accepted}
    return found


def speculative_decoding(stats: Stats) -> dict[str, Any]:
    """The summary form of `metrics.speculative_decoding`, as vLLM has it."""
    return {
        "mean_acceptance_length": stats.acceptance_length,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": list(stats.accepted_at_slot),
        "num_spec_steps": stats.steps_with_drafts,
        "num_accepted_draft_tokens": stats.accepted,
        "num_draft_tokens": stats.drafted,
        "num_spec_tokens": len(stats.drafted_at_slot),
    }


def closing(stats: Stats) -> dict[str, Any]:
    """What the end of every answer carries beside its usage."""
    found: dict[str, Any] = {"timings": timings(stats)}
    if stats.drafted:
        found["metrics"] = {"speculative_decoding": speculative_decoding(stats)}
    return found


def origin(step: Step) -> dict[str, Any]:
    """Who wrote the tokens of a step: the first `accepted` were drafted."""
    return {
        "drafted": step.drafted,
        "accepted": step.accepted,
        "proposer": step.proposer,
        "draft_ms": round(step.draft_ms, 3),
        "verify_ms": round(step.verify_ms, 3),
    }


def chat_logprobs(noted: Sequence[TokenLogprob], piece: Piece) -> dict[str, Any]:
    """`logprobs` of a choice of a chat completion."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = piece(token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(raw),
            "id": token,
        }

    return {
        "content": [
            {**entry(n.token, n.logprob), "top_logprobs": [entry(*pair) for pair in n.top]}
            for n in noted
        ],
        "refusal": None,
    }


def text_logprobs(noted: Sequence[TokenLogprob], piece: Piece, start: int) -> dict[str, Any]:
    """`logprobs` of a choice of a text completion; offsets count characters from `start`."""
    texts = [piece(n.token).decode("utf-8", "replace") for n in noted]
    offsets, at = [], start
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [n.logprob for n in noted],
        "top_logprobs": [
            {piece(token).decode("utf-8", "replace"): logprob for token, logprob in n.top}
            for n in noted
        ],
        "text_offset": offsets,
    }


def call_object(call: ToolCall, number: int | None = None) -> dict[str, Any]:
    """A tool call; `number` is its index in a stream."""
    found: dict[str, Any] = {
        "id": new_id("call"),
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
    return found if number is None else {"index": number, **found}
