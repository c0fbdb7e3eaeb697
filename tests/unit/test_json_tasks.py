"""The made-up JSON tasks are what they say, and their validator refuses what it should."""

from __future__ import annotations

import json

import json_tasks
import pytest

from dspine.text.grammar import GrammarOptions
from dspine.text.matcher import Grammars
from tests.support.fake_engine import EOS, ByteTokenizer


def test_tasks_are_many_different_ones_and_always_the_same() -> None:
    tasks = json_tasks.json_tasks(200)
    assert tasks == json_tasks.json_tasks(200) and tasks[:12] == json_tasks.json_tasks(12)
    assert len({task.prompt for task in tasks}) > 150
    assert len({json.dumps(task.schema) for task in tasks}) > 195
    text = json.dumps([task.schema for task in tasks])
    for kind in ("object", "array", "string", "boolean", "integer", "number"):
        assert text.count(f'"type": "{kind}"') > 20, kind
    grammars = Grammars(ByteTokenizer())
    for task in tasks:
        grammars.matcher(GrammarOptions.json_schema(task.schema))


SCHEMA: json_tasks.Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 3},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
        "price": {"type": "number", "minimum": 0, "maximum": 1},
        "open": {"type": "boolean"},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("document", "valid"),
    [
        ('{"name": "abc", "count": 9, "tags": ["a"], "price": 0.5, "open": true}', True),
        ('{"name": "abc"}', True),
        ("{}", False),
        ("[]", False),
        ('{"name": ""}', False),
        ('{"name": "abcd"}', False),
        ('{"name": "a", "count": 0}', False),
        ('{"name": "a", "count": 1.5}', False),
        ('{"name": "a", "count": true}', False),
        ('{"name": "a", "tags": []}', False),
        ('{"name": "a", "tags": ["c"]}', False),
        ('{"name": "a", "price": 1.01}', False),
        ('{"name": "a", "open": 1}', False),
        ('{"name": "a", "other": 1}', False),
    ],
)
def test_validator_and_grammar_agree_on_hand_written_documents(document: str, valid: bool) -> None:
    assert json_tasks.is_valid(json.loads(document), SCHEMA) is valid
    tokens = [*document.encode(), EOS]
    matcher = Grammars(ByteTokenizer()).matcher(GrammarOptions.json_schema(SCHEMA))
    assert (matcher.allowed(tokens) == len(tokens)) is valid
