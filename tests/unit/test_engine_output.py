"""One pipeline for both ways of decoding: grammar, stop strings, limits and log-probabilities at
once, against a loop that is written out here."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.engine.choose import GreedyChooser
from dspine.engine.emit import Emitter
from dspine.engine.events import Finish, Step
from dspine.engine.loop import Run, generate
from dspine.engine.plain import PlainStepper
from dspine.engine.proposers import DrafterProposer
from dspine.engine.rollback import TrimRollback
from dspine.engine.sampling import SamplingOptions
from dspine.engine.sequence import TokenSequence
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.width import FixedWidth
from dspine.text.grammar import GrammarOptions
from dspine.text.matcher import GrammarMatcher, Grammars
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_engine import BOS, EOS, VOCAB, ByteTokenizer, make_engine
from tests.support.fake_target import FakeTarget
from tests.support.toy_target import OracleSampler

GRAMMARS = Grammars(ByteTokenizer())
WORDS = GrammarOptions.regex(r"(ab?|c€|x{2,4})+ [0-9]{1,3}(\.[0-9]+)?")
JSON = GrammarOptions.json_schema(
    {
        "type": "object",
        "properties": {"a": {"enum": ["ab", "abc", "b"]}, "n": {"type": "integer"}},
        "required": ["a", "n"],
        "additionalProperties": False,
    }
)
LIST = GrammarOptions.grammar('root ::= "[" [ab]{1,4} ("," [ab]{1,4}){0,5} "]"')
STOPS = ["ab", "b,", "€", '"a"', " ", "1", "xx", "]"]


class Spread(FakeTarget):
    """Every logit is a fixed function of the newest tokens, so that a mask leaves a choice."""

    salt = 0

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        return spread(self.salt, self.decoded_prefix(row))

    def argmax(self, row: int) -> int:
        return int(self.logits(row).argmax())


def spread(salt: int, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    chance = np.random.default_rng([salt, *tokens[-3:]])
    return chance.normal(0, 3, VOCAB).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """One request, and how good its drafts are."""

    salt: int
    prompt: list[int]
    grammar: GrammarOptions | None
    stop: list[str]
    max_tokens: int
    width: int
    hit_rate: float
    kind: Literal["dspine", "ngram", "auto"]


CASES = st.builds(
    Case,
    salt=st.integers(0, 2**20),
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=10),
    grammar=st.sampled_from([None, WORDS, JSON, LIST]),
    stop=st.lists(st.sampled_from(STOPS), max_size=2),
    max_tokens=st.integers(1, 40),
    width=st.integers(1, 8),
    hit_rate=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    kind=st.sampled_from(["dspine", "ngram", "auto"]),
)


@dataclass(frozen=True)
class Expected:
    """What the case must give."""

    tokens: list[int]
    text: str
    reason: str


def answer(case: Case) -> Expected:
    """Token by token, with a new grammar state each time and the text looked at as a whole."""
    tokens: list[int] = []
    while True:
        logits = spread(case.salt, [*case.prompt, *tokens])
        if case.grammar is not None:
            matcher = GRAMMARS.matcher(case.grammar)
            for token in tokens:
                matcher.accept(token)
            matcher.mask(logits)
        tokens.append(int(logits.argmax()))
        text = bytes(t for t in tokens if t < BOS).decode("utf-8", "replace")
        if tokens[-1] == EOS:
            return Expected(tokens, text, "stop")
        found = [at for at in map(text.find, case.stop) if at >= 0]
        if found and "\ufffd" not in text[-1:]:
            return Expected(tokens, text[: min(found)], "stop")
        if len(tokens) == case.max_tokens:
            return Expected(tokens, text, "length")


def drafter(case: Case, right: list[int]) -> FakeDrafter:
    chance, whole = random.Random(case.salt), [*case.prompt, *right]

    def chain(tokens: Sequence[int], count: int) -> list[int]:
        ahead = (whole[len(tokens) :] + [EOS] * count)[:count]
        return [t if chance.random() < case.hit_rate else chance.randrange(VOCAB) for t in ahead]

    return FakeDrafter(chain)


@settings(max_examples=120, deadline=None)
@given(case=CASES)
def test_all_ways_of_decoding_give_the_same_answer_and_leave_the_same_memory(case: Case) -> None:
    expected = answer(case)
    target = Spread(lambda _: 0, VOCAB, n_ctx=80)
    target.salt = case.salt
    engine = make_engine(
        target,
        drafter(case, expected.tokens),
        drafts=case.width - 1,
        proposer=case.kind,
        ngram_min_match=1,
    )
    noted = []
    for plain in (True, False):
        result = engine.complete(
            case.prompt,
            grammar=case.grammar,
            stop=case.stop,
            max_tokens=case.max_tokens,
            logprobs=3,
            plain=plain,
        )
        assert (list(result.tokens), result.text) == (expected.tokens, expected.text)
        assert result.reason == expected.reason
        assert target.memory == [*case.prompt, *expected.tokens][:-1]
        assert result.stats.disabled_reason is None
        noted.append(result.logprobs)
    assert noted[0] == noted[1]
    assert [n.token for n in noted[0] or ()] == expected.tokens
    for place, entry in enumerate(noted[0] or ()):
        logits = spread(case.salt, [*case.prompt, *expected.tokens[:place]]).astype(np.float64)
        assert entry.logprob == pytest.approx(
            logits[entry.token] - np.log(np.exp(logits).sum()), abs=1e-4
        )
        assert [t for t, _ in entry.top] == [*np.argsort(-logits, kind="stable")[:3]]


def test_answers_under_a_grammar_are_whole_or_say_that_they_were_cut() -> None:
    reasons = set()
    for salt in range(60):
        case = Case(salt, [1], WORDS, [], 12, 4, 0.5, "dspine")
        expected = answer(case)
        reasons.add(expected.reason)
        whole = re.fullmatch(WORDS.source, expected.text) is not None
        assert whole or expected.reason == "length"
        assert not whole or expected.reason == "stop" or len(expected.tokens) == 12
    assert reasons == {"stop", "length"}


def test_drafts_that_the_grammar_forbids_are_not_verified() -> None:
    case = Case(3, [1], JSON, [], 30, 6, 1.0, "dspine")
    expected = answer(case)
    # The second draft of every block is a letter that no place allows.
    right = drafter(case, expected.tokens)
    chain = right.chain
    right.chain = lambda tokens, count: [
        ord("z") if index == 1 else token for index, token in enumerate(chain(tokens, count))
    ]
    target = Spread(lambda _: 0, VOCAB, n_ctx=80)
    target.salt = case.salt
    engine = make_engine(target, right, drafts=5)
    events = engine.generate(case.prompt, grammar=JSON, max_tokens=30)
    steps = [event for event in events if isinstance(event, Step)]
    assert [token for step in steps for token in step.tokens] == expected.tokens
    assert {step.drafted for step in steps[:-1] if step.proposer == "dspine"} == {1}
    # What the grammar forces is drafted all the same.
    assert {step.proposer for step in steps} >= {"dspine", "grammar"}
    assert not any(ord("z") in tokens for _, tokens in target.decoded)


class Fused(Spread):
    """The interrupt comes out of the n-th call."""

    fuse = -1

    def _burn(self) -> None:
        self.fuse -= 1
        if self.fuse == 0:
            raise KeyboardInterrupt

    def wait(self) -> None:
        self._burn()
        super().wait()

    def argmax(self, row: int) -> int:
        self._burn()
        return super().argmax(row)

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        self._burn()
        return super().logits(row)


@settings(max_examples=40, deadline=None)
@given(case=CASES.filter(lambda case: case.grammar is not None), fuse=st.integers(1, 60))
@pytest.mark.parametrize("plain", [True, False])
def test_an_interrupted_step_leaves_grammar_text_and_memory_where_they_were(
    plain: bool, case: Case, fuse: int
) -> None:
    assert case.grammar is not None
    expected = answer(case)
    target = Fused(lambda _: 0, VOCAB, n_ctx=80)
    target.salt, target.fuse = case.salt, fuse
    tokenizer, matcher = ByteTokenizer(), GRAMMARS.matcher(case.grammar)
    emitter = Emitter(tokenizer.piece, tokenizer.is_end, max_tokens=case.max_tokens, stop=case.stop)
    run = Run(
        target,
        TokenSequence(case.prompt),
        emitter,
        GreedyChooser(target, constraint=matcher),
    )
    policy = FixedWidth({"dspine": case.width - 1})
    network = DrafterProposer(policy, drafter(case, expected.tokens), target, max_positions=100)
    stepper = (
        PlainStepper(run)
        if plain
        else SpeculativeStepper(run, network, policy, TrimRollback(target))
    )
    events = list(generate(run, stepper))
    tokens = [t for event in events if isinstance(event, Step) for t in event.tokens]
    finish = events[-1]
    assert isinstance(finish, Finish) and finish.reason in (expected.reason, "cancelled")
    assert tokens == expected.tokens[: len(tokens)]
    assert run.sequence.tokens == [*case.prompt, *tokens]
    assert target.memory == run.sequence.tokens[:-1]
    again = GRAMMARS.matcher(case.grammar)
    for token in tokens:
        again.accept(token)
    assert allowed(matcher) == allowed(again)


def allowed(matcher: GrammarMatcher) -> list[int]:
    logits = np.zeros(VOCAB, np.float32)
    matcher.mask(logits)
    return [int(token) for token in np.flatnonzero(logits == 0)]


@settings(max_examples=25, deadline=None)
@given(case=CASES.filter(lambda case: case.grammar is not None), seed=st.integers(0, 999))
def test_a_seed_under_a_grammar_gives_one_answer(case: Case, seed: int) -> None:
    target = Spread(lambda _: 0, VOCAB, n_ctx=80)
    target.salt = case.salt
    engine = make_engine(
        target,
        drafter(case, answer(case).tokens),
        drafts=case.width - 1,
        proposer=case.kind,
        ngram_min_match=1,
        make_sampler=OracleSampler,
    )
    results = [
        engine.complete(
            case.prompt,
            grammar=case.grammar,
            stop=case.stop,
            max_tokens=case.max_tokens,
            logprobs=2,
            plain=plain,
            sampling=SamplingOptions(temperature=1.2, seed=seed, verification="match"),
        )
        for plain in (True, False)
    ]
    facts = [(r.tokens, r.text, r.reason, r.logprobs) for r in results]
    assert facts[0] == facts[1]
