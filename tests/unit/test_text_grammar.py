"""Grammars on a small vocabulary of bytes and words; `re` and `json` judge what passes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.errors import UsageError
from dspine.text.forced import NOT_FORCED
from dspine.text.grammar import GrammarOptions, one_line
from dspine.text.matcher import GrammarMatcher, Grammars

WORDS = [b'{"', b'": ', b'name"', b"true", b"12", b"ab", b"abc", "é".encode(), b"\xc3", b'",', b"}"]
BEGIN, END, OTHER_END = 256 + len(WORDS), 257 + len(WORDS), 258 + len(WORDS)
VOCAB = OTHER_END + 1


class WordTokenizer:
    """All bytes, some words, a control token, and two end tokens, one of which has a text."""

    vocab_size = VOCAB

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token < 256:
            return bytes([token])
        if token < BEGIN:
            return WORDS[token - 256]
        names = {BEGIN: b"<s>", END: b"</s>", OTHER_END: b"stop"}
        return names[token] if special or token == OTHER_END else b""

    def is_end(self, token: int) -> bool:
        return token in (END, OTHER_END)

    def encode(self, text: str) -> list[int]:
        """The longest word first."""
        data, tokens = text.encode(), list[int]()
        while data:
            words = [i for i, word in enumerate(WORDS) if data.startswith(word)]
            best = max(words, key=lambda i: len(WORDS[i]), default=None)
            tokens.append(data[0] if best is None else 256 + best)
            data = data[1 if best is None else len(WORDS[best]) :]
        return tokens


GRAMMARS = Grammars(WordTokenizer())
PERSON = GrammarOptions.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["ab", "abc"]}, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
NUMBERS = GrammarOptions.regex(r"(ab|abc)+ [0-9]{1,3}é?")
SUM = GrammarOptions.grammar('root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"')
ANY = st.sampled_from([PERSON, NUMBERS, SUM])


def allowed_tokens(matcher: GrammarMatcher) -> list[int]:
    logits = np.zeros(VOCAB, np.float32)
    matcher.mask(logits)
    return [int(token) for token in np.flatnonzero(logits == 0)]


def text(tokens: Sequence[int]) -> str:
    tokenizer = WordTokenizer()
    return b"".join(tokenizer.piece(t) for t in tokens if not tokenizer.is_end(t)).decode()


def walk(matcher: GrammarMatcher, seed: int, limit: int = 300) -> list[int]:
    """Random allowed tokens up to an end token; ends are taken where they are allowed."""
    choose, tokens = random.Random(seed), list[int]()
    while len(tokens) < limit:
        allowed = allowed_tokens(matcher)
        ends = [token for token in allowed if token in (END, OTHER_END)]
        token = choose.choice(ends if ends and choose.random() < 0.5 else allowed)
        matcher.accept(token)
        tokens.append(token)
        if token in (END, OTHER_END):
            return tokens
    raise AssertionError(f"no end in {limit} tokens: {text(tokens)!r}")


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_mask_allows_is_json_of_the_schema(seed: int) -> None:
    person = json.loads(text(walk(GRAMMARS.matcher(PERSON), seed)))
    assert list(person) == ["name", "age", "tags"]
    assert isinstance(person["name"], str) and len(person["name"]) <= 6
    assert type(person["age"]) is int and 0 <= person["age"] <= 150
    assert len(person["tags"]) <= 2 and set(person["tags"]) <= {"ab", "abc"}


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_mask_allows_matches_the_expression(seed: int) -> None:
    answer = text(walk(GRAMMARS.matcher(NUMBERS), seed))
    assert re.fullmatch(NUMBERS.source, answer)


@settings(deadline=None, max_examples=12)
@given(
    options=ANY, seed=st.integers(0, 2**32), wild=st.lists(st.integers(0, VOCAB - 1), max_size=6)
)
def test_mask_and_draft_check_agree_at_every_place(
    options: GrammarOptions, seed: int, wild: list[int]
) -> None:
    answer, matcher = walk(GRAMMARS.matcher(options), seed), GRAMMARS.matcher(options)
    for place, token in enumerate(answer):
        allowed = allowed_tokens(matcher)
        assert allowed == [t for t in range(VOCAB) if matcher.allowed([t]) == 1]
        rest = answer[place:]
        assert matcher.allowed(rest) == len(rest)
        # Nothing goes on after the end, and a forbidden token cuts the drafts there.
        assert matcher.allowed([*rest, END]) == matcher.allowed([*rest, ord("a")]) == len(rest)
        wrong = next(t for t in range(VOCAB) if t not in allowed)
        assert matcher.allowed([wrong, *rest]) == 0
        assert matcher.allowed([token, *wild]) == 1 + after(matcher, token, wild)
        matcher.accept(token)
    assert matcher.allowed([]) == 0 and allowed_tokens(matcher) == []


@settings(deadline=None, max_examples=30)
@given(options=ANY, seed=st.integers(0, 2**32))
def test_forced_drafts_are_allowed_hold_the_forced_text_and_change_nothing(
    options: GrammarOptions, seed: int
) -> None:
    answer, matcher = walk(GRAMMARS.matcher(options), seed), GRAMMARS.matcher(options)
    fresh = GRAMMARS.matcher(options)
    whole = text(answer).encode()
    done = b""
    for token in answer:
        tokens, scores = matcher.forced()
        assert len(tokens) == len(scores)
        pieces = [WordTokenizer().piece(draft) for draft in tokens]
        # All but the last token are forced text to their end, the last one begins with it.
        assert whole.startswith(done + b"".join(pieces[:-1]))
        assert whole[len(done + b"".join(pieces[:-1])) :][:1] == b"".join(pieces[-1:])[:1] or (
            not tokens
        )
        assert matcher.allowed(tokens) == len(tokens)
        assert allowed_tokens(matcher) == allowed_tokens(fresh)
        for follower in (matcher, fresh):
            follower.accept(token)
        done += WordTokenizer().piece(token)
    assert matcher.forced() == NOT_FORCED


def test_forced_text_is_cut_as_before_and_ends_as_earlier_answers_did() -> None:
    grammars = Grammars(WordTokenizer())
    options = GrammarOptions.regex('\\{"name": (true|12),"ab"é')
    matcher = grammars.matcher(options)
    for token in (*b'{"', 256 + WORDS.index(b'name"')):
        matcher.accept(token)
    # Nothing was seen that goes on after the blank.
    assert matcher.forced().tokens == tuple(b": ")
    matcher = grammars.matcher(GrammarOptions.regex('x": 1'))
    for token in (ord("x"), 256 + WORDS.index(b'": ')):
        matcher.accept(token)
    matcher = grammars.matcher(options)
    for token in b'{"na':
        matcher.accept(token)
    tokens, scores = matcher.forced()
    assert tokens == (*b"me", 256 + WORDS.index(b'": ')) and scores[-1] > 0.5
    for token in b'me": t':
        matcher.accept(token)
    assert matcher.forced().tokens == (
        *b'rue,"',
        256 + WORDS.index(b"ab"),
        ord('"'),
        256 + WORDS.index("é".encode()),
    )


def after(matcher: GrammarMatcher, token: int, drafts: list[int]) -> int:
    """How many drafts fit after `token`, one by one."""
    mark, count = matcher.mark(), 0
    matcher.accept(token)
    for draft in drafts:
        if draft not in allowed_tokens(matcher):
            break
        matcher.accept(draft)
        count += 1
    matcher.restore(mark)
    return count


@settings(deadline=None, max_examples=40)
@given(options=ANY, seed=st.integers(0, 2**32), data=st.data())
def test_going_back_is_the_same_as_never_having_gone_on(
    options: GrammarOptions, seed: int, data: st.DataObject
) -> None:
    answer, matcher = walk(GRAMMARS.matcher(options), seed), GRAMMARS.matcher(options)
    first = data.draw(st.integers(0, len(answer)))
    second = data.draw(st.integers(first, len(answer)))
    for token in answer[:first]:
        matcher.accept(token)
    mark, expected = matcher.mark(), allowed_tokens(matcher)
    for token in answer[first:second]:
        matcher.accept(token)
    matcher.restore(mark)
    assert allowed_tokens(matcher) == expected
    for token in answer[first:]:
        matcher.accept(token)
    assert allowed_tokens(matcher) == []


def test_an_interrupt_between_library_and_note_is_undone() -> None:
    matcher = GRAMMARS.matcher(NUMBERS)
    matcher.accept(ord("a"))
    mark = matcher.mark()
    assert matcher._matcher.consume_token(ord("b"))
    matcher.restore(mark)
    assert matcher.allowed([*b"b 1"]) == 3


def test_end_tokens_are_allowed_where_the_text_may_end_and_nothing_after_it() -> None:
    matcher = GRAMMARS.matcher(GrammarOptions.regex("ab?"))
    assert END not in allowed_tokens(matcher)
    matcher.accept(ord("a"))
    assert allowed_tokens(matcher) == [ord("b"), END, OTHER_END]
    matcher.accept(ord("b"))
    assert allowed_tokens(matcher) == [END, OTHER_END]
    assert matcher.allowed([END, END]) == 1
    matcher.accept(OTHER_END)
    assert allowed_tokens(matcher) == []


def test_control_tokens_and_ends_with_a_text_are_no_text() -> None:
    matcher = GRAMMARS.matcher(GrammarOptions.regex("(stop|<s>)!"))
    assert set(allowed_tokens(matcher)) == {ord("s"), ord("<")}


def test_a_character_over_two_tokens_is_allowed() -> None:
    matcher = GRAMMARS.matcher(GrammarOptions.regex("é"))
    whole, first = 256 + WORDS.index("é".encode()), 256 + WORDS.index(b"\xc3")
    assert set(allowed_tokens(matcher)) == {whole, first, 0xC3}
    matcher.accept(first)
    assert allowed_tokens(matcher) == [0xA9]


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["ye", "nope"]),
        ('root ::= item{2,3}\nitem ::= "- " [^\\n]+ "\\n"', ["- a\n- b\n"], ["- a\n"]),
        (r'root ::= "\u00e9" [\u00e8-\u00ea] [\x41-\U00000043]', ["ééB", "éêC"], ["ééD"]),
        (r'root ::= "a\\u0041" "\u0022"', ['a\\u0041"'], ["aA"]),
        ('# a list\nroot ::= "[" (n ("," n)*)? "]"\nn ::= [0-9]', ["[]", "[1,2]"], ["[1,]"]),
        ("start: /[a-c]/ WORD?\nWORD: /x+/", ["a", "bxx"], ["ax1", "x"]),
        ('// GBNF would write root ::= "a"\nstart: "b"', ["b"], ["a"]),
    ],
)
def test_grammars_of_both_kinds(grammar: str, good: list[str], bad: list[str]) -> None:
    options = GrammarOptions.grammar(grammar)
    for line in good:
        tokens = [*line.encode(), END]
        assert GRAMMARS.matcher(options).allowed(tokens) == len(tokens), line
    for line in bad:
        tokens = [*line.encode(), END]
        assert GRAMMARS.matcher(options).allowed(tokens) < len(tokens), line


def test_blanks_between_json_tokens_are_bounded_unless_the_schema_says_otherwise() -> None:
    schema: dict[str, object] = {"type": "array", "items": {"type": "integer"}}

    def fits(document: str) -> bool:
        tokens = [*document.encode(), END]
        matcher = GRAMMARS.matcher(GrammarOptions.json_schema(schema))
        return matcher.allowed(tokens) == len(tokens)

    assert fits("[1, 2]") and fits("[1,2]") and fits("[\n  1,\n  2\n]")
    assert not fits("[   1]") and not fits("[1,\n\n\n2]")
    schema["x-guidance"] = {"whitespace_flexible": False}
    assert fits("[1,2]") and not fits("[1, 2]")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (GrammarOptions.json_schema({"type": "foo"}), "Invalid type: foo"),
        (GrammarOptions.json_schema({"type": "string", "enum": [1]}), "Unsatisfiable"),
        (GrammarOptions.json_schema(False), "Unsatisfiable|Unimplemented"),
        (GrammarOptions.json_schema({"if": {}}), r"Unimplemented keys: \[\"if\"\]"),
        (GrammarOptions.regex("(a"), "unclosed group"),
        (GrammarOptions.regex("a(?=b)"), "look-around"),
        (GrammarOptions.grammar("start: b"), 'line 1, column 8: unknown name: "b"'),
        (GrammarOptions.grammar("foo bar"), "line 1, column 5: Expected token ':'"),
        (GrammarOptions.grammar("root ::= foo"), "Rule 'foo' not found"),
        (GrammarOptions.grammar("expr ::= [0-9]"), "No 'root' rule found"),
        (GrammarOptions.grammar(r'root ::= "\UFFFFFFFF"'), "no character"),
    ],
)
def test_a_constraint_that_cannot_be_used_is_one_sentence(
    options: GrammarOptions, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        GRAMMARS.matcher(options)
    assert "\n" not in str(caught.value)
    assert options.name in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type": ', "not JSON"),
        ("[1]", "is a list: give an object"),
        ('"object"', "is a str"),
        ({"enum": [{1, 2}]}, "no form for"),
    ],
)
def test_what_is_no_schema_is_refused_at_once(schema: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GrammarOptions.json_schema(schema)


def test_schemas_as_text_and_as_value_are_the_same_and_true_allows_any_json() -> None:
    assert GrammarOptions.json_schema('{"type": "null"}') == GrammarOptions.json_schema(
        {"type": "null"}
    )
    matcher = GRAMMARS.matcher(GrammarOptions.json_schema(True))
    assert matcher.allowed([*b'[{"a": null}]', END]) == 14


def test_a_vocabulary_that_cannot_go_on_is_named() -> None:
    class NoDigits(WordTokenizer):
        def piece(self, token: int, *, special: bool = False) -> bytes:
            piece = super().piece(token, special=special)
            return b"" if any(byte in b"0123456789" for byte in piece) else piece

    matcher = Grammars(NoDigits()).matcher(GrammarOptions.regex("a1"))
    matcher.accept(ord("a"))
    with pytest.raises(UsageError, match="after 1 tokens the target has no token that goes on"):
        matcher.mask(np.zeros(VOCAB, np.float32))


def test_a_target_without_an_end_token_is_refused() -> None:
    class Endless(WordTokenizer):
        def is_end(self, token: int) -> bool:
            return False

    with pytest.raises(UsageError, match="no end token"):
        Grammars(Endless()).matcher(SUM)


def test_a_grammar_beyond_the_limits_of_the_library_is_an_error_with_its_reason() -> None:
    source = 'start: b{500,3000}\nb: c{0,30}\nc: "x"? "y"? "x"?'
    matcher = GRAMMARS.matcher(GrammarOptions.grammar(source))

    def go_on() -> None:
        for _ in range(40):
            matcher.mask(np.zeros(VOCAB, np.float32))
            matcher.accept(ord("x"))

    with pytest.raises(UsageError, match=r"the grammar failed after \d+ tokens: .*simpler"):
        go_on()
    # What was accepted before stays usable.
    matcher.restore(2)
    assert ord("x") in allowed_tokens(matcher)


def test_vocabulary_and_grammars_are_prepared_once() -> None:
    reads = 0

    class Counting(WordTokenizer):
        def piece(self, token: int, *, special: bool = False) -> bytes:
            nonlocal reads
            reads += 1
            return super().piece(token, special=special)

    grammars = Grammars(Counting())
    for number in range(40):
        grammars.matcher(GrammarOptions.regex(f"a{{{number % 20}}}"))
    assert reads < 2 * VOCAB
    assert len(grammars._compiled) == 16


def test_reasons_become_one_line() -> None:
    assert one_line("at 1(8): invalid regex:\n  (a\n  ^\nerror: unclosed group\n 1 | x") == (
        "line 1, column 8: invalid regex: unclosed group"
    )
    assert one_line("") == "no reason given"
