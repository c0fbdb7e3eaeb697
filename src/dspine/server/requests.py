"""From a checked body to the options of `Engine.generate`; what cannot be served is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dspine.engine.prompt import Prompt
from dspine.engine.sampling import SamplingOptions
from dspine.llama.sampler_options import read_letters, read_samplers
from dspine.server.bodies import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    Generation,
    ResponseFormat,
    Tool,
    ToolChoice,
)
from dspine.server.errors import RequestError
from dspine.text.chat_template import TEMPLATE_OWN
from dspine.text.grammar import GrammarOptions
from dspine.text.tool_calls import Style, forced_grammar, instructions, knows_tools, style_of

_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty"),
    *("frequency_penalty", "repeat_penalty", "repeat_last_n", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "xtc_probability", "xtc_threshold"),
    "top_n_sigma",
)
_FOREIGN_FIELDS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "mirostat": ((0,), "leave it out"),
    "dynatemp_range": ((0,), "leave it out"),
    "min_keep": ((0, 1), "leave it out"),
    "repetition_penalty": ((1,), "send repeat_penalty, with repeat_last_n -1 for the whole text"),
    "use_beam_search": ((False,), "leave it out"),
    "best_of": ((1,), "leave it out"),
}
"""Fields of llama-server, vLLM and OpenAI that change what is drawn and are not done here: the
values that change nothing, and what to do about others.
"""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the server does where a request says nothing."""

    sampling: SamplingOptions
    max_tokens: int | None
    """None: until the answer ends or the context is full."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    max_thoughts: int | None = None
    """None: no limit."""
    template: str = ""
    """The chat template's text: tells in which form the model writes tool calls."""
    end_tokens: Callable[[], Sequence[int]] = tuple


@dataclass(frozen=True, slots=True)
class Wish:
    """A request in the engine's terms."""

    prompt: Prompt
    options: Mapping[str, Any]
    """Of `Engine.generate`."""
    is_stream: bool
    wants_usage: bool
    wants_progress: bool
    logprobs: int | None
    wants_texts: bool = False
    """Of each token, for whoever colours them."""
    tools: Style | None = None
    """The form of calls to look for; None when no tool may be called."""


def chat_wish(body: ChatBody, defaults: Defaults) -> Wish:
    """What a chat completion asks for. Raises RequestError or UsageError."""
    logprobs = None
    if body.logprobs:
        logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise RequestError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    options = _options(body, defaults, body.max_completion_tokens, logprobs)
    messages = [message_of(message, i) for i, message in enumerate(body.messages)]
    variables = {**defaults.variables, **template_variables(body.chat_template_kwargs)}
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    tools, style = _tools(body, options, defaults)
    if tools:
        if knows_tools(defaults.template):
            variables["tools"] = tools
        else:
            messages = _with_system(messages, instructions(tools))
    options["variables"] = variables
    if body.response_format is not None:
        _constrain(options, response_grammar(body.response_format), "response_format")
    thoughts = body.thoughts
    if thoughts is None and not (options.get("grammar") or options["min_tokens"]):
        thoughts = defaults.max_thoughts
    if thoughts is not None and thoughts >= 0:
        options["max_thoughts"] = thoughts
    return Wish(
        prompt=messages,
        options=options,
        is_stream=body.stream,
        wants_usage=body.stream_options is not None and body.stream_options.include_usage,
        wants_progress=body.return_progress,
        logprobs=logprobs,
        wants_texts=body.return_token_texts,
        tools=style if tools else None,
    )


def completion_wish(body: CompletionBody, defaults: Defaults) -> Wish:
    """What a text completion asks for; a list of prompts may hold one."""
    prompt: Prompt | list[Any] = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise RequestError(400, f"prompt holds {len(prompt)} prompts: send one", "prompt")
        prompt = prompt[0]
    if not prompt:
        raise RequestError(400, "prompt is empty: give some text", "prompt")
    for name in ("echo", "suffix"):
        if getattr(body, name):
            raise RequestError(400, f"{name} is not supported: leave it out", name)
    options = _options(body, defaults, None, body.logprobs)
    return Wish(
        prompt=prompt,
        options={**options, "raw": True},
        is_stream=body.stream,
        wants_usage=body.stream_options is not None and body.stream_options.include_usage,
        wants_progress=body.return_progress,
        logprobs=body.logprobs,
        wants_texts=body.return_token_texts,
    )


def message_of(message: ChatMessage, number: int) -> dict[str, Any]:
    """A message as templates read it: text parts become one text. Other parts are refused."""
    found = message.model_dump(exclude_none=True)
    content = found.get("content", "")
    if isinstance(content, list):
        texts = []
        for part in content:
            if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
                raise RequestError(
                    400,
                    f"message {number} holds a part of type {part.get('type')!r}: this server "
                    f"reads text only",
                    f"messages.{number}.content",
                )
            texts.append(part["text"])
        content = "\n".join(texts)
    return {**found, "content": content}


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`, without what is the server's own to give."""
    taken = sorted(TEMPLATE_OWN.intersection(given or {}))
    if taken:
        raise RequestError(
            400,
            f"chat_template_kwargs names {', '.join(taken)}, which the server gives: leave it out",
            "chat_template_kwargs",
        )
    return dict(given or {})


def response_grammar(wanted: ResponseFormat) -> GrammarOptions | None:
    """The constraint of a response_format, None for plain text."""
    if wanted.type == "json_object":
        return GrammarOptions.json_schema(wanted.schema_ or {"type": "object"})
    if wanted.type == "json_schema":
        schema = wanted.schema_ if wanted.json_schema is None else wanted.json_schema.schema_
        if schema is None:
            raise RequestError(
                400, "response_format of type json_schema needs json_schema.schema", "json_schema"
            )
        return GrammarOptions.json_schema(schema)
    if wanted.type == "regex":
        return GrammarOptions.regex(_needed(wanted.pattern, "pattern"))
    if wanted.type == "grammar":
        return GrammarOptions.grammar(_needed(wanted.grammar, "grammar"))
    return None


def _needed(text: str | None, name: str) -> str:
    if text is None:
        raise RequestError(
            400, f"response_format of this type needs {name}", f"response_format.{name}"
        )
    return text


def _options(
    body: Generation, defaults: Defaults, limit: int | None, logprobs: int | None
) -> dict[str, Any]:
    if body.n is not None and body.n != 1:
        raise RequestError(400, f"n is {body.n}: this server makes one answer a request", "n")
    _refuse_foreign(body)
    limit = limit or body.max_tokens or body.n_predict
    if limit is None or limit == -1:
        limit = defaults.max_tokens
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if any(not text for text in stop):
        raise RequestError(400, "stop holds an empty text: leave it out", "stop")
    drafts = body.speculative_n_max
    if body.speculative is not None and body.speculative.n_max is not None:
        drafts = body.speculative.n_max
    options: dict[str, Any] = {
        "max_tokens": limit,
        "min_tokens": 0 if _ignores_end(body, limit) else body.min_tokens or 0,
        "stop": tuple(stop),
        "sampling": _sampling(body, defaults, limit),
        "logprobs": logprobs,
        "cache_prompt": body.cache_prompt,
        "max_drafts": drafts,
        "plain": drafts == 0,
        "tells_reading": body.stream and body.return_progress,
    }
    if body.grammar is not None:
        _constrain(options, GrammarOptions.grammar(body.grammar), "grammar")
    if body.json_schema is not None:
        _constrain(options, GrammarOptions.json_schema(body.json_schema), "json_schema")
    return options


def _constrain(options: dict[str, Any], grammar: GrammarOptions | None, name: str) -> None:
    if grammar is None:
        return
    if options.get("grammar") is not None:
        raise RequestError(400, f"{name} is a second constraint: an answer follows one", name)
    options["grammar"] = grammar


def _sampling(body: Generation, defaults: Defaults, limit: int | None) -> SamplingOptions:
    changes: dict[str, Any] = {
        name: getattr(body, name) for name in _SAMPLING_FIELDS if getattr(body, name) is not None
    }
    if body.seed is not None:
        changes["seed"] = None if body.seed < 0 else body.seed
    if isinstance(body.samplers, str):
        changes["samplers"] = read_letters(body.samplers)
    elif body.samplers is not None:
        changes["samplers"] = read_samplers(";".join(body.samplers))
    if body.dry_sequence_breakers is not None:
        changes["dry_sequence_breakers"] = tuple(body.dry_sequence_breakers)
    if changes.get("top_k", 0) < 0:
        changes["top_k"] = 0  # "all", for vLLM and llama-server
    bias = list(_bias(body.logit_bias))
    if _ignores_end(body, limit):
        bias += [(token, -math.inf) for token in defaults.end_tokens()]
    if bias:
        changes["logit_bias"] = (*defaults.sampling.logit_bias, *bias)
    return replace(defaults.sampling, **changes)


def _refuse_foreign(body: Generation) -> None:
    for name, (without_effect, remedy) in _FOREIGN_FIELDS.items():
        value = (body.model_extra or {}).get(name)
        if name == "repetition_penalty" and body.repeat_penalty is not None:
            continue  # sent under every server's name, of which llama-server's holds
        if value is not None and value not in without_effect:
            raise RequestError(
                400, f"{name} is {value!r}, which this server does not do: {remedy}", name
            )


def _ignores_end(body: Generation, limit: int | None) -> bool:
    return body.ignore_eos or bool(body.min_tokens and limit and body.min_tokens >= limit)


def _bias(given: dict[str, float] | list[tuple[int, float]] | None) -> list[tuple[int, float]]:
    if given is None:
        return []
    if isinstance(given, list):
        return given
    if not all(key.isdecimal() for key in given):
        raise RequestError(
            400,
            "logit_bias names something that is no token id: use ids that /tokenize gave",
            "logit_bias",
        )
    return [(int(key), value) for key, value in given.items()]


def _tools(
    body: ChatBody, options: dict[str, Any], defaults: Defaults
) -> tuple[list[dict[str, Any]], Style]:
    """The tools that may be called, and the form of calls; a required call is a constraint."""
    style = style_of(defaults.template)
    if not body.tools or body.tool_choice == "none":
        if body.tool_choice not in (None, "none", "auto"):
            raise RequestError(
                400,
                "tool_choice asks for a call, but there are no tools: send tools, or leave it out",
                "tools",
            )
        return [], style
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools]
    if isinstance(body.tool_choice, ToolChoice) or body.tool_choice == "required":
        allowed = _chosen(body.tools, body.tool_choice)
        forced = [tool.model_dump(exclude_none=True) for tool in allowed]
        grammar = GrammarOptions("lark", forced_grammar(forced, style))
        _constrain(options, grammar, "tool_choice")
    return tools, style


def _chosen(tools: Sequence[Tool], choice: ToolChoice | str) -> list[Tool]:
    if not isinstance(choice, ToolChoice):
        return list(tools)
    found = [tool for tool in tools if tool.function.name == choice.function.name]
    if not found:
        raise RequestError(
            400,
            f"tool_choice names {choice.function.name!r}, which is none of the tools: name one of "
            "them",
            "tool_choice",
        )
    return found


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The text as a system message, or after the one that is there."""
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
