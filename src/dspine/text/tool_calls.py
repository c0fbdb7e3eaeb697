"""Finds the tool calls in an answer, in the forms that model families write.

Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; Qwen's coders:
`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`; Llama: the
whole answer is `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dspine.text.stop import possible_prefix

Style = Literal["hermes", "llama"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wants: `arguments` is the text of a JSON object, as OpenAI has it."""

    name: str
    arguments: str


def style_of(template: str) -> Style:
    """The form that a chat template asks its model for; Hermes where it names none."""
    return "llama" if "<tool_call>" not in template and '"parameters"' in template else "hermes"


def knows_tools(template: str) -> bool:
    """Whether a chat template shows tools to its model at all."""
    return re.search(r"\btools\b", template) is not None


def instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system message says of tools where the template does not: Hermes' form."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You may call these functions:\n<tools>\n{lines}\n</tools>\n"
        f'To call one, answer with {OPEN}{{"name": NAME, "arguments": OBJECT}}{CLOSE} and '
        f"nothing else."
    )


def forced_grammar(tools: Sequence[Mapping[str, Any]], style: Style) -> str:
    """Lark grammar of an answer that is exactly one call of one of these tools."""
    key = "arguments" if style == "hermes" else "parameters"
    choices = []
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters") or {"type": "object"}
        schema = {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, key: parameters},
            "required": ["name", key],
            "additionalProperties": False,
        }
        choices.append(f"%json {json.dumps(schema)}")
    rules = "\n".join(f"call_{i}: {choice}" for i, choice in enumerate(choices))
    any_call = " | ".join(f"call_{i}" for i in range(len(choices)))
    if style == "hermes":
        return f'start: "{OPEN}\\n" call "\\n{CLOSE}"\ncall: {any_call}\n{rules}\n'
    return f"start: {any_call}\n{rules}\n"


class ToolCallParser:
    """Takes an answer's text as it comes; calls come out whole, everything else as text.

    What looks like a call but is none (no JSON, no name) is text, unchanged.
    """

    def __init__(self, style: Style) -> None:
        self._style = style
        self._held = ""
        self._is_decided = style == "hermes"
        self._after_call = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """(text, calls) that became certain with `text`."""
        self._held += text
        if self._style == "llama":
            return self._push_llama()
        said, calls = "", list[ToolCall]()
        while True:
            start = self._held.find(OPEN)
            if start < 0:
                keep = possible_prefix(self._held, (OPEN,))
                said += self._said(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                return said, calls
            end = self._held.find(CLOSE, start)
            said += self._said(self._held[:start])
            self._held = self._held[start:]
            if end < 0:
                return said, calls
            body = self._held[len(OPEN) : end - start]
            found = parse_call(body)
            if found is None:
                said += self._held[: end - start + len(CLOSE)]
            else:
                calls.append(found)
                self._after_call = True
            self._held = self._held[end - start + len(CLOSE) :]

    def finish(self) -> tuple[str, list[ToolCall]]:
        """(text, calls) of what was held back; the answer ends here."""
        held, self._held = self._held, ""
        if self._style == "llama" and not self._is_decided:
            found = parse_call(held.strip().removeprefix(_PYTHON_TAG))
            return ("", [found]) if found else (held, [])
        if held.startswith(OPEN):  # cut off, or without its closing mark
            found = parse_call(held[len(OPEN) :])
            if found is not None:
                return "", [found]
        return self._said(held), []

    def _push_llama(self) -> tuple[str, list[ToolCall]]:
        """An answer is a call or a text as a whole; its first character tells."""
        begun = self._held.lstrip()
        if not self._is_decided:
            if not begun or _PYTHON_TAG.startswith(begun) or begun.startswith(("{", _PYTHON_TAG)):
                return "", []
            self._is_decided = True
        held, self._held = self._held, ""
        return held, []

    def _said(self, text: str) -> str:
        """Blanks between and after calls are not part of the answer."""
        return "" if self._after_call and not text.strip() else text


def parse_call(body: str) -> ToolCall | None:
    """A call from what stands between the marks, None when it is none."""
    function = _FUNCTION.search(body)
    if function is not None:
        values = {key: _value(text) for key, text in _PARAMETER.findall(function.group(2))}
        return ToolCall(function.group(1), json.dumps(values, ensure_ascii=False))
    try:
        found, end = json.JSONDecoder().raw_decode(body.strip())
    except ValueError:
        return None
    if body.strip()[end:].strip() or not isinstance(found, dict):
        return None
    name = found.get("name")
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        return ToolCall(name, arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _value(text: str) -> Any:
    """A parameter written as plain text: JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
