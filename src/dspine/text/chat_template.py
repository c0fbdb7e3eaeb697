"""Renders a conversation with the target's own chat template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dspine.errors import FileError, UsageError

Message = Mapping[str, Any]
"""One turn: at least `role` and `content`."""

TEMPLATE_OWN = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
"""What a chat template gets from us."""

TEMPLATE_KEY = "tokenizer.chat_template"


class ChatTemplate:
    """A compiled template. Templates come from model files, so they run in a sandbox."""

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        """`bos` and `eos` are the texts of these tokens. Raises FileError on a broken template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise FileError(
                f"the target's chat template has an error in line {error.lineno}: "
                f"{error.message}; give the prompt as raw text instead"
            ) from error
        self._bos, self._eos = bos, eos
        self.source = source

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text; `variables` reach the template (`enable_thinking=False`).

        Raises UsageError when the messages are malformed or the template refuses them.
        """
        check_messages(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None if tools is None else [dict(tool) for tool in tools],
                bos_token=self._bos,
                eos_token=self._eos,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise UsageError(
                f"the target's chat template refuses this: {error}; change the messages"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise UsageError(
                f"the target's chat template cannot use these messages ({error}): "
                f"check their roles and contents"
            ) from error


def check_messages(messages: Sequence[Message]) -> None:
    """Raise UsageError unless this is a non-empty list of messages with a role."""
    if not messages:
        raise UsageError("the list of messages is empty: give at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise UsageError(
                f"message {number} is {message!r}: each message needs a role and a content"
            )
        if "content" not in message and "tool_calls" not in message:
            raise UsageError(f"message {number} has no content: each message needs one")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML, which model templates do not expect."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
