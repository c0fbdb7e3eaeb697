"""The engine on fakes: prompts, options, comparison and replay."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from dspine.engine.choose import GreedyChooser
from dspine.engine.events import Finish, Prefill, Step
from dspine.engine.replay import first_difference, replay
from dspine.engine.rollback import TrimRollback
from dspine.engine.trace import Trace
from dspine.errors import CapacityError, ClosedError, UsageError
from dspine.text.grammar import GrammarOptions
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_engine import BOS, EOS, VOCAB, make_engine
from tests.support.fake_target import FakeTarget, plain_answer

TEXT = b"the cat sat on the mat and the cat sat on the mat again"


def says(tokens: Sequence[int]) -> int:
    """Writes TEXT after the first token, then ends."""
    at = len(tokens) - 1
    return TEXT[at] if at < len(TEXT) else EOS


def perfect(tokens: Sequence[int], count: int) -> list[int]:
    return plain_answer(says, tokens, count)


def test_text_without_a_template_is_continued() -> None:
    with make_engine(FakeTarget(says, VOCAB, n_ctx=100)) as engine:
        result = engine.complete([BOS])
    assert (result.text, result.reason) == (TEXT.decode(), "stop")
    assert result.tokens[-1] == EOS


def test_prompts_become_tokens() -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ x }}"
    engine = make_engine(FakeTarget(says, VOCAB), template=template)
    assert engine.encode("hi") == [BOS, *b"[user]hi"]
    assert engine.encode("hi", variables={"x": "!"}) == [BOS, *b"[user]hi!"]
    assert engine.encode("hi", raw=True) == [BOS, *b"hi"]
    assert engine.encode([{"role": "system", "content": "s"}]) == [BOS, *b"[system]s"]
    assert engine.encode([1, 2]) == [1, 2]
    begins = make_engine(FakeTarget(says, VOCAB), template="{{ bos_token }}x")
    assert begins.encode("hi") == [BOS, *b"x"], "the begin token must not come twice"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1, "a"], "all messages or all token ids"),
        ([True], "all messages or all token ids"),
        ([VOCAB], "outside the vocabulary"),
        ([{"role": "user", "content": "x"}], "no chat template"),
    ],
)
def test_prompts_that_cannot_be_answered(prompt: object, text: str) -> None:
    engine = make_engine(FakeTarget(says, VOCAB))
    with pytest.raises(UsageError, match=text):
        engine.generate(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("least", [0, 3, len(TEXT), len(TEXT) + 2, len(TEXT) + 9])
def test_an_answer_of_at_least_so_many_tokens(least: int, plain: bool) -> None:
    drafter = FakeDrafter(perfect)
    with make_engine(FakeTarget(says, VOCAB, n_ctx=100), drafter=drafter) as engine:
        found = engine.complete([BOS], min_tokens=least, max_tokens=least + 70, plain=plain)
    if least <= len(TEXT):
        assert found.text == TEXT.decode()
        return
    # Where the end is forbidden, the fake has all other tokens alike: the lowest id.
    beyond = least - len(TEXT)
    assert EOS not in found.tokens[:least]
    assert bytes(found.tokens[: len(TEXT)]) == TEXT
    assert len(found.tokens) == least + 1, f"it ends {beyond} tokens later"
    assert found.tokens[-1] == EOS


def test_errors_of_a_request_come_before_its_first_event() -> None:
    engine = make_engine(FakeTarget(says, VOCAB, n_ctx=10))
    with pytest.raises(CapacityError, match=r"11 tokens.*10"):
        engine.generate([1] * 11)
    with pytest.raises(UsageError, match="max_tokens"):
        engine.generate([1], max_tokens=-1)
    with pytest.raises(UsageError, match="stop string"):
        engine.generate([1], stop=[""])
    with pytest.raises(UsageError, match="min_tokens is -1"):
        engine.generate([1], min_tokens=-1)
    with pytest.raises(UsageError, match="min_tokens is 2, and a grammar"):
        engine.generate([1], min_tokens=2, grammar=GrammarOptions.regex("a+"))


def test_events_come_in_order_and_count_up() -> None:
    drafter = FakeDrafter(perfect)
    engine = make_engine(FakeTarget(says, VOCAB), drafter)
    events = list(engine.generate([BOS], max_tokens=10))
    assert isinstance(events[0], Prefill) and events[0].tokens == 1
    assert all(isinstance(event, Step) for event in events[1:-1])
    finish = events[-1]
    assert isinstance(finish, Finish)
    assert finish.stats.proposers["dspine"].acceptance_length == pytest.approx(10 / 3)
    document = json.loads(json.dumps(finish.stats.to_json()))
    assert document["tokens"] == 10
    assert document["acceptance_length"] == pytest.approx(10 / 3)
    assert document["proposers"]["dspine"]["acceptance_rate"] == 1.0
    assert document["slot_acceptance"] == [1.0, 1.0, 1.0]


def test_slot_acceptance_is_conditional_on_the_slots_before() -> None:
    def half(tokens: Sequence[int], count: int) -> list[int]:
        right = perfect(tokens, count)
        return [right[0], *[1] * (count - 1)] if len(tokens) % 3 == 1 else [1] * count

    engine = make_engine(FakeTarget(says, VOCAB), FakeDrafter(half))
    stats = engine.complete([BOS], max_tokens=30).stats
    first, second = stats.slot_acceptance[:2]
    assert 0 < first < 1
    assert second == 0.0
    assert first == stats.accepted_at_slot[0] / stats.drafted_at_slot[0]


def test_plain_on_an_engine_with_a_drafter() -> None:
    drafter = FakeDrafter(perfect)
    engine = make_engine(FakeTarget(says, VOCAB), drafter)
    stats = engine.complete([BOS], max_tokens=10, plain=True).stats
    assert drafter.drafts == [] and stats.acceptance_length == 1.0
    assert engine.complete([BOS], max_tokens=10).stats.acceptance_length > 3


def test_drafts_of_a_step_can_be_bounded() -> None:
    engine = make_engine(FakeTarget(says, VOCAB, n_ctx=100), FakeDrafter(perfect), drafts=4)
    most = []
    for bound in (None, 4, 2, 1, 0):
        events = list(engine.generate([BOS], max_drafts=bound))
        most.append(max(event.drafted for event in events if isinstance(event, Step)))
        assert "".join(e.text for e in events if isinstance(e, Step)) == TEXT.decode()
    assert most == [4, 4, 2, 1, 0]
    with pytest.raises(UsageError, match="max_drafts is -1"):
        engine.generate([BOS], max_drafts=-1)


def test_one_generation_at_a_time() -> None:
    engine = make_engine(FakeTarget(says, VOCAB))
    first = engine.generate([BOS])
    next(first)
    with pytest.raises(UsageError, match="still running"):
        next(engine.generate([BOS]))
    first.close()  # type: ignore[attr-defined]
    assert engine.complete([BOS], max_tokens=3).text == "the"


def test_use_after_close_is_an_error() -> None:
    closed: list[int] = []
    engine = make_engine(FakeTarget(says, VOCAB), close=lambda: closed.append(1))
    running = engine.generate([BOS])
    next(running)
    engine.close()
    engine.close()
    assert closed == [1]
    with pytest.raises(ClosedError):
        next(running)
    with pytest.raises(ClosedError):
        engine.generate([BOS])


def test_a_reason_against_drafting_is_told_with_every_answer() -> None:
    engine = make_engine(FakeTarget(says, VOCAB), disabled_reason="too slow here", proposer="auto")
    assert engine.disabled_reason == "too slow here"
    assert engine.complete([BOS], max_tokens=3).stats.disabled_reason == "too slow here"
    assert engine.complete([BOS], max_tokens=3, plain=True).stats.disabled_reason is None


def test_comparing_equal_answers() -> None:
    engine = make_engine(FakeTarget(says, VOCAB), FakeDrafter(perfect))
    comparison = engine.compare([BOS], max_tokens=20)
    assert comparison.identical and comparison.divergence is None
    assert comparison.plain.text == comparison.speculative.text == TEXT[:20].decode()
    document = json.loads(json.dumps(comparison.to_json()))
    assert document["identical"] is True and document["divergence"] is None
    assert document["speculative"]["acceptance_length"] == 4.0
    assert document["plain"]["tokens_per_second"] > 0
    assert document["ratio"] == pytest.approx(comparison.ratio)


class ShapeSensitive(FakeTarget):
    """Like kernels that round several rows differently: one near-tie goes the other way."""

    tie_at = 12

    def logits_of(self, row: int) -> dict[int, float]:
        prefix = self.decoded_prefix(row)
        right = says(prefix)
        if len(prefix) != self.tie_at:
            return {right: 9.0}
        several = len(self.decoded[-1][1]) > 1
        return {right: 5.0, ord("!"): 5.25 if several else 4.875}

    def argmax(self, row: int) -> int:
        values = self.logits_of(row)
        return max(values, key=lambda token: values[token])

    def logits(self, row: int):  # type: ignore[no-untyped-def]
        values = super().logits(row) * 0
        for token, value in self.logits_of(row).items():
            values[token] = value
        return values


def test_a_difference_that_the_target_alone_shows_is_reproduced() -> None:
    engine = make_engine(ShapeSensitive(says, VOCAB), FakeDrafter(perfect))
    comparison = engine.compare([BOS], max_tokens=20)
    divergence = comparison.divergence
    assert divergence is not None and not comparison.identical
    assert divergence.position == 11
    assert divergence.plain_token == TEXT[11]
    assert divergence.speculative_token == ord("!")
    assert (divergence.plain_gap, divergence.speculative_gap) == (0.125, 0.25)
    assert divergence.reproduced is True
    assert comparison.to_json()["divergence"]["reproduced"] is True


def test_a_difference_of_the_engine_itself_is_not_reproduced() -> None:
    class Broken(FakeTarget):
        """Answers wrongly once, as a bug in accepting would look like."""

        mistakes = 1

        def argmax(self, row: int) -> int:
            token = super().argmax(row)
            if len(self.decoded[-1][1]) > 1 and self._first > 5 and self.mistakes:
                self.mistakes -= 1
                return ord("?")
            return token

    engine = make_engine(Broken(says, VOCAB), FakeDrafter(perfect))
    divergence = engine.compare([BOS], max_tokens=20).divergence
    assert divergence is not None
    assert divergence.reproduced is False


def test_replay_gives_the_tokens_of_the_trace() -> None:
    def wrong_sometimes(tokens: Sequence[int], count: int) -> list[int]:
        return [t if (len(tokens) + i) % 3 else 1 for i, t in enumerate(perfect(tokens, count))]

    target = FakeTarget(says, VOCAB)
    engine = make_engine(target, FakeDrafter(wrong_sometimes))
    trace = Trace()
    result = engine.complete([BOS, 65, 66], max_tokens=25, trace=trace)
    shapes = list(target.decoded)
    target.decoded.clear()
    again = replay(target, trace, result.tokens, GreedyChooser(target), TrimRollback(target))
    assert again.tokens == result.tokens
    assert target.decoded == shapes


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1], [1, 3]) == 1


def test_importing_dspine_is_light_and_names_its_parts() -> None:
    code = (
        "import sys, dspine; assert 'numpy' not in sys.modules and 'jinja2' not in sys.modules;"
        "assert dspine.DspineError and 'load' in dir(dspine);"
        "from dspine.engine import engine; assert dspine.Engine is engine.Engine;"
        "assert 'torch' not in sys.modules and 'llama_cpp' not in sys.modules\n"
        "try: dspine.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
