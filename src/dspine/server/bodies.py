"""Bodies of requests. Unknown fields are let through: clients of other servers send their own.

Those of them that would change what is drawn are refused (`dspine.server.requests`).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


def _false_for_null(value: object) -> object:
    return False if value is None else value


Switch = Annotated[
    bool,
    BeforeValidator(_false_for_null),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "null"}]}),
]
"""Where OpenAI's API takes null, for false."""


def _with_never(given: object) -> object:
    """false, llama-server's bias of a token that must not come, as the number it means."""
    if isinstance(given, dict):
        return {key: _never(value) for key, value in given.items()}
    if isinstance(given, list):
        return [
            [*pair[:-1], _never(pair[-1])] if isinstance(pair, list) and pair else pair
            for pair in given
        ]
    return given


def _never(value: object) -> object:
    if value is True:
        raise ValueError("should hold numbers, or false for a token that must not come")
    return -math.inf if value is False else value


_BIAS: dict[str, Any] = {"anyOf": [{"type": "number"}, {"const": False}]}
Biases = Annotated[
    dict[str, float] | list[tuple[int, float]] | None,
    BeforeValidator(_with_never),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "object", "additionalProperties": _BIAS},
                {
                    "type": "array",
                    "items": {
                        "type": "array",
                        "prefixItems": [{"type": "integer"}, _BIAS],
                        "minItems": 2,
                        "maxItems": 2,
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]
"""By token id, what is added to its logit."""


class StreamOptions(Body):
    include_usage: Switch = False


class Speculative(Body):
    """llama-server's `speculative`: n_max 0 switches drafting off for this request."""

    n_max: Annotated[int, Field(ge=0)] | None = None


class JsonSchema(Body):
    name: str = ""
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"] = "text"
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """llama-server's short form beside json_object."""
    pattern: str | None = None
    grammar: str | None = None


class Function(Body):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class ToolChoiceFunction(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"] = "function"
    function: ToolChoiceFunction


class ChatMessage(Body):
    role: Annotated[str, Field(min_length=1, max_length=50)]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


def _limit(value: int | None) -> int | None:
    if value is not None and value < 1 and value != -1:
        raise ValueError("should be greater than or equal to 1, or -1")
    return value


Limit = Annotated[
    int | None,
    AfterValidator(_limit),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": -1}, {"type": "null"}]}),
]
"""Tokens of an answer at most; -1, as llama-server's clients say it, is the server's default."""


class Generation(Body):
    """What chat and text completions have in common; None is the server's default."""

    model: str | None = None
    stream: Switch = False
    stream_options: StreamOptions | None = None
    max_tokens: Limit = None
    n_predict: Limit = None
    """llama-server's name of max_tokens."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_n_sigma: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    samplers: list[str] | str | None = None
    """Names in their order, or their letters in one text, as clients of llama-server send it."""
    logit_bias: Biases = None
    ignore_eos: bool = False
    cache_prompt: bool = True
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    speculative: Speculative | None = None
    speculative_n_max: int | None = Field(default=None, ge=0, alias="speculative.n_max")
    return_progress: bool = False
    return_token_texts: bool = False
    """Ours: the text of each token, beside who wrote it."""


class ChatBody(Generation):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Limit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning_budget: Annotated[int, Field(ge=-1)] | None = None
    """Tokens of thoughts at most; -1 is no limit."""
    thinking_budget_tokens: Annotated[int, Field(ge=-1)] | None = None
    """llama-server's name of it."""
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None
    """vLLM's."""
    thinking_budget: Annotated[int, Field(ge=-1)] | None = None
    """Qwen's own API's."""

    @property
    def thoughts(self) -> int | None:
        """The limit under whichever name, None where nothing is said."""
        named = (
            self.reasoning_budget,
            self.thinking_budget_tokens,
            self.thinking_token_budget,
            self.thinking_budget,
        )
        return next((value for value in named if value is not None), None)


class CompletionBody(Generation):
    """POST /v1/completions"""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = None
    echo: Switch = False
    suffix: str | None = None


class TokenizeBody(Body):
    """POST /tokenize"""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    """POST /detokenize"""

    tokens: list[Annotated[int, Field(ge=0)]]


class ApplyTemplateBody(Body):
    """POST /apply-template"""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
