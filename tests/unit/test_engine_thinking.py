"""Reasoning on or off in a prompt against what the drafter was trained on."""

from __future__ import annotations

import logging

import pytest

from dspine.engine.thinking import ThinkingMode
from dspine.text.reasoning import expects_thoughts
from tests.support.fake_engine import VOCAB, ByteTokenizer, make_engine
from tests.support.fake_target import FakeTarget, mixing

QWEN3 = (
    "{% for m in messages %}{{ m.content }}{% endfor %}\n<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)


@pytest.mark.parametrize(
    ("prompt", "template", "expected"),
    [
        ("assistant\n<think>\n", "", True),
        ("assistant\n<think>\n\n</think>\n\n", "", False),
        ("assistant\n<think>\n\n</think>\n\n", QWEN3, False),
        ("assistant\n", QWEN3, True),
        ("assistant\n", "{{ messages }}", None),
        ("<think> is a mark\n", "", None),
    ],
)
def test_what_a_prompt_asks_for(prompt: str, template: str, expected: bool | None) -> None:
    assert expects_thoughts(prompt, template) is expected


@pytest.mark.parametrize("trained", [True, False, None])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_other_mode_is_told_once(
    trained: bool | None, wanted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    target = FakeTarget(mixing(VOCAB, 3), VOCAB)
    engine = make_engine(target, template=QWEN3, trained_on_thoughts=trained)
    for _ in range(2):
        engine.encode("hello", variables={"enable_thinking": wanted})
    told = [record.getMessage() for record in caplog.records]
    if trained is None or trained is wanted:
        assert told == []
        return
    assert len(told) == 1
    words = {True: "with", False: "without"}
    assert f"asks for an answer {words[wanted]} reasoning" in told[0]
    assert f"trained on text {words[trained]} it" in told[0]
    assert f"--thinking {'on' if wanted else 'off'}" in told[0]
    assert caplog.records[0].levelno == logging.WARNING


def test_raw_text_and_tokens_ask_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    target = FakeTarget(mixing(VOCAB, 3), VOCAB)
    engine = make_engine(target, template=QWEN3, trained_on_thoughts=False)
    engine.encode("hello", raw=True)
    engine.encode([1, 2, 3])
    assert caplog.records == []


def test_marks_that_are_one_token_are_found() -> None:
    class Marks(ByteTokenizer):
        def piece(self, token: int, *, special: bool = False) -> bytes:
            return b"<think>" if token == 7 else super().piece(token, special=special)

    mode = ThinkingMode(False, "")
    mode.look([1] * 20 + [7, 10], Marks())
    assert mode._trained is None
