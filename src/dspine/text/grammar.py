"""What an answer may look like: a JSON schema, a regular expression or a grammar, as llguidance
reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from dspine.errors import UsageError

GrammarKind = Literal["json-schema", "regex", "lark", "gbnf"]

JSON_WHITESPACE = r"[ ]?|\n[ ]{0,20}"
"""Between JSON tokens: nothing, a space, or a new line with its indent. Bounded, because small
models otherwise go on with blanks for ever."""

RULE_OF_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
# Tokens are judged by their bytes alone, whichever way they cut a forced text: then a row's
# choice depends on nothing but the tokens before it.
OPTIONS = '\n%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """A constraint on the whole answer; make one with the class methods.

    What was written wrongly is reported when a generation begins, where the target's vocabulary
    is known; only what is not even JSON is refused here.
    """

    kind: GrammarKind
    source: str

    @classmethod
    def json_schema(cls, schema: str | bool | Mapping[str, Any]) -> Self:
        """Only JSON that is valid for `schema`, which may be a JSON text or the parsed value.

        `{}` is any JSON value, `{"type": "object"}` any object. Keys come in the schema's order.
        Raises UsageError for a text that is not JSON or not a schema.
        """
        value: Any = schema
        if isinstance(schema, str):
            try:
                value = json.loads(schema)
            except ValueError as error:
                raise UsageError(
                    f"the JSON schema is not JSON: {error}; check its quotes and commas"
                ) from error
        if isinstance(value, bool):
            value = {} if value else {"not": {}}
        if not isinstance(value, Mapping):
            raise UsageError(
                f"the JSON schema is a {type(value).__name__}: give an object such as "
                f'{{"type": "object"}}'
            )
        try:
            return cls("json-schema", json.dumps(dict(value)))
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the JSON schema holds something that JSON has no form for: {error}; take it out"
            ) from error

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Only text that matches `pattern` from its first to its last character.

        The syntax is that of Rust's regex crate: no look-around, no back references; `.` does
        not match a new line.
        """
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> Self:
        """Only text of a grammar: llama.cpp's GBNF (`root ::= ...`) or Lark (`start: ...`)."""
        return cls("gbnf" if RULE_OF_GBNF.search(text) else "lark", text)

    @property
    def name(self) -> str:
        """For messages."""
        return {"json-schema": "JSON schema", "regex": "regular expression"}.get(
            self.kind, "grammar"
        )

    def to_lark(self) -> str:
        """In the one form that the library is given; UsageError where GBNF cannot be converted."""
        if self.kind == "json-schema":
            schema = json.loads(self.source)
            given = schema.setdefault("x-guidance", {})
            if isinstance(given, dict) and "whitespace_flexible" not in given:
                given.setdefault("whitespace_pattern", JSON_WHITESPACE)
            return f"start: %json {json.dumps(schema)}{OPTIONS}"
        if self.kind == "regex":
            from llguidance import regex_to_lark

            return f"start: /{regex_to_lark(self.source, use_ascii='')}/{OPTIONS}"
        return (_from_gbnf(self.source) if self.kind == "gbnf" else self.source) + OPTIONS

    def refused(self, reason: str) -> UsageError:
        """The error for a constraint that does not compile, with the library's own reason."""
        return UsageError(f"the {self.name} cannot be used: {one_line(reason)}; correct it")


def one_line(reason: str) -> str:
    """The cause in a message of the library, which adds excerpts of the grammar below it."""
    lines = [line.strip() for line in reason.strip().splitlines()]
    if not lines:
        return "no reason given"
    cause = next((line[len("error: ") :] for line in lines if line.startswith("error: ")), None)
    first = lines[0].rstrip(":")
    if cause is not None:
        first = f"{first}: {cause}"
    return re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", first)


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(ESCAPES.sub(_unescape, text))
    except Exception as error:
        raise UsageError(
            f"the GBNF grammar cannot be converted: {error}; correct it, or write it in Lark "
            f"(start: ...)"
        ) from error


def _unescape(match: re.Match[str]) -> str:
    r"""The converter takes the character itself, or \xNN below 128, but not \uNNNN."""
    digits = match[1] or match[2]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code >= 0x110000 or 0xD800 <= code < 0xE000:
        raise UsageError(
            f"the GBNF grammar has {match[0]}: no character has that number, correct it"
        )
    return chr(code) if code >= 0x80 else f"\\x{code:02x}"
