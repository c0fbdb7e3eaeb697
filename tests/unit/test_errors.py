"""Every error for users says what is wrong and, after it, what to do or what would be right."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dspine import errors

SOURCES = Path(errors.__file__).parent
CLASSES = {name for name in vars(errors) if name.endswith("Error")} | {"RequestError"}
ADVICE = re.compile(r"[:;,] \S|\bexpected\b|\bmust\b|\bneeds?\b")
PASSED_ON = re.compile(r"(\{\}(: )?)+")
"""Only names the place of another error, which has its own advice."""
REASONS = (
    "the CPU kernels",
    "there are no CPU kernels",
    "this ggml library",
    "the {} kernels",
)
"""Why stock kernels compute: told by `dspine doctor` as a fact, nothing has failed."""


def text_of(node: ast.expr) -> str | None:
    """The message as it stands in the source, with its values in braces."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        return "".join(map(str, parts))
    return None


def messages() -> Iterator[tuple[str, str]]:
    """Place and text of every message that is written where an error is made."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in CLASSES:
                for argument in node.args[:2]:
                    if (text := text_of(argument)) is not None:
                        yield f"{path.relative_to(SOURCES)}:{node.lineno}", text
                        break


def has_advice(text: str) -> bool:
    return bool(ADVICE.search(text.removeprefix("{}: ")) or PASSED_ON.fullmatch(text))


def test_every_message_says_what_to_do() -> None:
    found = list(messages())
    assert len(found) > 400
    silent = [
        f"{place} {text}"
        for place, text in found
        if not has_advice(text) and not text.startswith(REASONS)
    ]
    assert silent == []


@pytest.mark.parametrize(
    "text", ["the library gave no logits for row {}", "{}: tensor {} has dtype {}"]
)
def test_a_message_without_advice_is_noticed(text: str) -> None:
    assert not has_advice(text)
