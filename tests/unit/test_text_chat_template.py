"""Chat templates: what model files use, what they must not reach, and how they fail."""

from __future__ import annotations

import pytest

from dspine.errors import FileError, UsageError
from dspine.text.chat_template import ChatTemplate

CHATML = """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe kind<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def test_chatml() -> None:
    assert ChatTemplate(CHATML).render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nBe kind<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_block_lines_leave_no_trace_and_tokens_have_their_texts() -> None:
    source = "{{ bos_token }}\n  {% if true %}\nx{% endif %}{{ eos_token }}"
    template = ChatTemplate(source, bos="<s>", eos="</s>")
    assert template.render([{"role": "user", "content": ""}]) == "<s>\nx</s>"


def test_loop_controls_json_and_variables() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ enable_thinking }}{{ tools | tojson }}"
    )
    text = ChatTemplate(source).render(
        [{"role": "user", "content": "<é>"}, {"role": "user", "content": "2"}],
        tools=[{"name": "f"}],
        enable_thinking=False,
    )
    assert text == '{"role": "user", "content": "<é>"}False[{"name": "f"}]'


def test_the_date_function_exists() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}").render([{"role": "user", "content": ""}])
    assert text.isdigit() and len(text) == 4


def test_a_template_that_refuses_says_so() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(FileError, match="line 2"):
        ChatTemplate("a\n{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_keeps_templates_in(source: str) -> None:
    with pytest.raises(UsageError, match="refuses"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_messages_that_do_not_fit_the_template_are_a_sentence() -> None:
    template = ChatTemplate("{{ messages[0].content + 1 }}")
    with pytest.raises(UsageError, match="roles and contents"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "empty"),
        ([{"content": "x"}], "role"),
        ([{"role": "user"}], "no content"),
    ],
)
def test_malformed_messages(messages: list[dict[str, str]], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ChatTemplate("").render(messages)
