"""Tool calls in the forms of several model families, however the text is cut into pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine.text.tool_calls import (
    Style,
    ToolCall,
    ToolCallParser,
    forced_grammar,
    instructions,
    knows_tools,
    style_of,
)

WEATHER = ToolCall("weather", '{"city": "Paris"}')
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
XML = """<tool_call>
<function=weather>
<parameter=city>
Paris
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def parse(pieces: list[str], style: Style) -> tuple[str, list[ToolCall]]:
    parser = ToolCallParser(style)
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    return "".join(said for said, _ in parts), [call for _, calls in parts for call in calls]


@pytest.mark.parametrize(
    ("text", "style", "said", "calls"),
    [
        (HERMES, "hermes", "", [WEATHER]),
        (f"Let me see. {HERMES}\n{HERMES}\n", "hermes", "Let me see. ", [WEATHER, WEATHER]),
        (HERMES.removesuffix("</tool_call>"), "hermes", "", [WEATHER]),
        (
            XML,
            "hermes",
            "",
            [ToolCall("weather", '{"city": "Paris", "days": 3}')],
        ),
        ("<tool_call>no JSON</tool_call> and", "hermes", "<tool_call>no JSON</tool_call> and", []),
        ('<tool_call>{"name": 7}</tool_call>', "hermes", '<tool_call>{"name": 7}</tool_call>', []),
        ("a <tool_cal b", "hermes", "a <tool_cal b", []),
        ("text <tool_ca", "hermes", "text <tool_ca", []),
        ('{"name": "weather", "parameters": {"city": "Paris"}}', "llama", "", [WEATHER]),
        (
            '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}',
            "llama",
            "",
            [WEATHER],
        ),
        ('{"just": "JSON"}', "llama", '{"just": "JSON"}', []),
        ('{"name": "weather", "parameters"', "llama", '{"name": "weather", "parameters"', []),
        ("It rains {often}.", "llama", "It rains {often}.", []),
        ('{"name": "weather"} or so', "llama", '{"name": "weather"} or so', []),
        ('{"name": "now"}', "llama", "", [ToolCall("now", "{}")]),
    ],
)
def test_each_form(text: str, style: Style, said: str, calls: list[ToolCall]) -> None:
    assert parse([text], style) == (said, calls)
    assert parse(list(text), style) == (said, calls)


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "<", "tool", " ", "x"])))
def test_what_is_no_call_comes_out_unchanged(parts: list[str]) -> None:
    text = "".join(parts)
    assert parse(parts, "hermes") == (text, [])
    assert parse(list(text), "hermes") == (text, [])


def test_the_form_is_the_templates() -> None:
    assert style_of("... <tool_call> ...") == "hermes"
    assert style_of('Respond {"name": function name, "parameters": dictionary}') == "llama"
    assert style_of("no word of it") == "hermes"
    assert knows_tools("{% if tools %}") and not knows_tools("{{ messages }}")


def test_instructions_show_every_tool() -> None:
    text = instructions([TOOL])
    assert json.dumps(TOOL) in text and "<tool_call>" in text


@pytest.mark.parametrize("style", ["hermes", "llama"])
def test_a_forced_call_is_what_the_parser_reads(style: Style) -> None:
    llguidance = pytest.importorskip("llguidance")
    grammar = forced_grammar([TOOL, {"function": {"name": "now"}}], style)
    assert llguidance.LLMatcher.validate_grammar(grammar, None) == ""
