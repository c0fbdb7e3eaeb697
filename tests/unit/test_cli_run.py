"""`dspine run` on an engine with a scripted target: streams, documents, exit codes."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dspine.cli import run as run_command
from dspine.cli.compare import print_comparison
from dspine.cli.main import run_cli
from dspine.cli.options import Options
from dspine.cli.output import speed_line
from dspine.cli.session import read_request
from dspine.engine.compare import Answer, Comparison, Divergence
from dspine.engine.engine import Engine, EngineParts
from dspine.engine.events import Event, Finish, Step
from dspine.engine.stats import ProposerStats, Stats
from dspine.engine.width import FixedWidth
from dspine.settings import settings_of
from tests.support.fake_target import FakeTarget

LETTERS = "\0abcdefgh"
END = 0


class LetterTokenizer:
    """Token i is letter i of LETTERS; 0 ends an answer."""

    vocab_size = len(LETTERS)
    bos = -1

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def token_text(self, token: int) -> str:
        return LETTERS[token]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return LETTERS[token].encode() if token != END else b""

    def is_end(self, token: int) -> bool:
        return token == END


def round_robin(tokens: Sequence[int]) -> int:
    """The letters a b c d over and over, and the end after twenty tokens."""
    return END if len(tokens) >= 20 else tokens[-1] % 4 + 1


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """`dspine run` gets an engine with the scripted target; the options it was opened with."""
    options_seen: list[Options] = []

    def open_engine(options: Options) -> Engine:
        options_seen.append(options)
        return Engine(
            EngineParts(
                model_path=Path("target.gguf"),
                target=FakeTarget(round_robin, len(LETTERS)),
                tokenizer=LetterTokenizer(),
                policy=FixedWidth({"ngram": 3}),
                proposer="ngram",
                notices=("the drafter was made for another fine-tune",),
            )
        )

    monkeypatch.setattr(run_command, "open_engine", open_engine)
    return options_seen


def test_text_goes_to_stdout_and_one_line_of_speed_to_stderr(
    seen: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", "abcdab"]) == 0
    out, err = capsys.readouterr()
    assert out == "cdabcdabcdabcd\n"
    notice, speed = err.rstrip("\n").split("\n")
    assert notice == "dspine: the drafter was made for another fine-tune"
    assert speed.startswith("15 tokens in ")
    assert "prompt 6 at" in speed
    assert "drafts accepted" in speed


def test_plain_says_so(seen: list[Options], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["run", "--plain", "abcdab"]) == 0
    out, err = capsys.readouterr()
    assert out == "cdabcdabcdabcd\n"
    assert err.rstrip("\n").endswith("plain")


@pytest.mark.parametrize(
    ("flags", "text", "reason"),
    [
        (["-n", "3"], "cda", "length"),
        (["--stop", "bc"], "cda", "stop"),
        ([], "cdabcdabcdabcd", "stop"),
    ],
)
def test_json_is_one_document_with_the_answer(
    seen: list[Options],
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    text: str,
    reason: str,
) -> None:
    assert run_cli(["run", "--json", *flags, "abcdab"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["text"] == text
    assert document["finish_reason"] == reason
    assert document["model"] == "target.gguf"
    assert document["stats"]["tokens"] == len(document["tokens"])


@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("kind", ["regex", "grammar", "file"])
def test_an_answer_follows_the_constraint_that_was_given(
    seen: list[Options],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    kind: str,
    compare: bool,
) -> None:
    grammar = 'root ::= x x x "h"\nx ::= [ab]'
    (tmp_path / "g.gbnf").write_text(grammar)
    flags = {
        "regex": ["--regex", "[ab]{3}h"],
        "grammar": ["--grammar", grammar],
        "file": ["--grammar-file", str(tmp_path / "g.gbnf")],
    }[kind]
    assert run_cli(["run", *flags, *["--compare"] * compare, "abcdab"]) == 0
    out = capsys.readouterr().out
    assert out == "abah\n" if not compare else "abah\n" in out and "the same text" in out


def test_json_shows_log_probabilities_with_their_texts(
    seen: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", "--json", "--logprobs", "2", "-n", "3", "abcdab"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["token"] for entry in document["logprobs"]] == document["tokens"]
    assert "".join(entry["text"] for entry in document["logprobs"]) == "cda"
    # One logit is 1, the other eight are 0.
    likely, other = 1 - math.log(math.e + 8), -math.log(math.e + 8)
    for entry in document["logprobs"]:
        assert entry["logprob"] == pytest.approx(likely, abs=1e-6)
        assert entry["top"][0] == {key: entry[key] for key in ("token", "text", "logprob")}
        assert entry["top"][1]["token"] == 0
        assert entry["top"][1]["logprob"] == pytest.approx(other, abs=1e-6)


def test_compare_json_has_the_promised_fields(
    seen: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", "--compare", "--json", "abcdab"]) == 0
    out, err = capsys.readouterr()
    assert "..." not in err
    document = json.loads(out)
    assert document["identical"] is True
    assert document["divergence"] is None
    assert document["plain"]["tokens_per_second"] > 0
    assert document["speculative"]["tokens_per_second"] > 0
    assert document["speculative"]["acceptance_length"] > 2
    assert document["ratio"] == pytest.approx(
        document["speculative"]["tokens_per_second"] / document["plain"]["tokens_per_second"]
    )


def test_compare_shows_the_text_once_and_both_speeds(
    seen: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", "--compare", "abcdab"]) == 0
    out, err = capsys.readouterr()
    assert err.endswith("\nplain ...\nspeculative ...\n")
    assert out.count("cdabcdabcdabcd") == 1
    assert "acceptance length" in out
    assert out.rstrip().endswith("times the plain speed, the same text")


def test_the_prompt_may_come_from_a_pipe(
    seen: list[Options], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abcdab"))
    assert run_cli(["run", "-n", "2"]) == 0
    assert capsys.readouterr().out == "cd\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", ""], "the prompt is empty"),
        (["run", "-n", "0", "a"], "-n is 0"),
        (["run", "--raw", "--system", "s", "a"], "--raw and --system exclude each other"),
        (["run", "--plain", "--compare", "a"], "--plain and --compare exclude each other"),
        (["run", "--regex", "(a", "a"], "the regular expression cannot be used: line 1, column 8"),
        (["run", "-j", "{", "a"], "the JSON schema is not JSON"),
        (["run", "-j", '{"type": "integer"}', "a"], "the target has no token that goes on with"),
        (["run", "--json-schema-file", "no.json", "a"], "cannot read no.json"),
        (["run", "--grammar", "root ::= b", "a"], "Rule 'b' not found"),
        (["run", "--grammar", "a", "--regex", "b", "a"], "--grammar, --regex exclude each other"),
        (["run", "--logprobs", "1", "a"], "--logprobs is printed by --json"),
        (["run", "--logprobs", "1", "--json", "--compare", "a"], "without --compare only"),
        (["run", "--logprobs", "99", "--json", "a"], "logprobs is 99: ask for 0 to 9"),
        (["run", "a" * 65], "the prompt has 65 tokens, the context has 64"),
    ],
)
def test_bad_requests_are_one_sentence(
    seen: list[Options], capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert run_cli(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.rstrip("\n").split("\n")[-1].startswith("dspine: ")


def test_a_cancelled_answer_keeps_its_text_and_ends_with_130(
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = Step((1, 2), "ab", 0, 0, "none", 0.0, 1.0, 0.0)
    events: list[Event] = [step, Finish("cancelled", STATS)]
    assert run_command.stream(events) == 130
    assert capsys.readouterr().out == "ab\n"
    assert run_command.print_answer(events, {}, bytes) == 130
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "cancelled"


def test_text_is_flushed_as_soon_as_it_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.TextIOWrapper(io.BytesIO(), write_through=False)
    monkeypatch.setattr("sys.stdout", written)
    shown: list[bytes] = []

    def events() -> Iterator[Event]:
        for letter in "ab":
            yield Step((1,), letter, 0, 0, "none", 0.0, 1.0, 0.0)
            buffer = written.buffer
            assert isinstance(buffer, io.BytesIO)
            shown.append(buffer.getvalue())
        yield Finish("stop", STATS)

    assert run_command.stream(events()) == 0
    assert shown == [b"a", b"ab"]


STATS = Stats(
    prompt_tokens=10,
    prefill_ms=20.0,
    tokens=30,
    steps=12,
    drafted=40,
    accepted=18,
    draft_ms=12.0,
    verify_ms=240.0,
    host_ms=6.0,
    wall_ms=300.0,
    proposers={
        "dspine": ProposerStats(steps=8, drafted=32, accepted=16, emitted=24),
        "ngram": ProposerStats(steps=2, drafted=8, accepted=2, emitted=4),
        "none": ProposerStats(steps=2, emitted=2),
    },
)


def test_the_speed_line_has_hand_computed_numbers() -> None:
    assert speed_line(STATS) == (
        "30 tokens in 0.30 s · 100.0 tokens/s · prompt 10 at 500 tokens/s · "
        "acceptance length 2.50 (18 of 40 drafts accepted) · dspine 3.00 in 8 steps · "
        "ngram 2.00 in 2 steps"
    )


def test_the_speed_line_says_why_drafting_is_off() -> None:
    line = speed_line(replace(STATS, drafted=0, disabled_reason="it does not pay here"))
    assert line.endswith("plain · drafting off: it does not pay here")
    silent = replace(STATS, drafted=0)
    assert speed_line(silent).endswith(" · plain")
    assert speed_line(silent, may_draft=True).endswith(" · plain, as no draft promised to pay")


def test_an_answer_that_might_have_had_drafts_says_why_it_has_none(
    seen: list[Options], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", "-n", "1", "abcdab"]) == 0
    assert capsys.readouterr().err.endswith(" · plain, as no draft promised to pay\n")


def comparison(divergence: Divergence | None) -> Comparison:
    plain = replace(STATS, wall_ms=600.0, steps=30)
    text = "other" if divergence else "text"
    return Comparison(
        Answer((1, 2), "text", "length", plain), Answer((1, 3), text, "length", STATS), divergence
    )


def test_a_near_tie_is_explained_and_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    divergence = Divergence(1, 2, 3, 0.01, 0.02, reproduced=True)
    assert print_comparison(comparison(divergence), as_json=False) == 0
    out = capsys.readouterr().out
    assert "2.00 times the plain speed; the texts part at token 1" in out
    assert "logit gaps 0.010 and 0.020" in out
    assert "the target alone gives the same" in out
    assert "text\n" in out and "other\n" in out


@pytest.mark.parametrize("as_json", [True, False])
def test_an_unexplained_difference_is_an_error(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    divergence = Divergence(1, 2, 3, 0.5, 0.7, reproduced=False)
    assert print_comparison(comparison(divergence), as_json=as_json) == 1
    out, err = capsys.readouterr()
    assert "the target alone does not explain it" in err
    if as_json:
        assert json.loads(out)["divergence"]["reproduced"] is False


def test_a_system_message_makes_the_prompt_a_conversation() -> None:
    values = {
        **{setting.name: setting.default for setting in settings_of("run")},
        "predict": -1,
    }
    requests = [
        read_request(Options({**values, "system": system}), "hi", io.StringIO())
        for system in ("be brief", None)
    ]
    assert requests[0].prompt == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert requests[1].prompt == "hi"
    assert requests[1].answer.max_tokens is None
