"""`dspine chat` on an engine with a scripted target: turns, commands, Ctrl-C, exit codes."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest

from dspine.cli import chat as chat_command
from dspine.cli.chat_loop import Chat
from dspine.cli.chat_settings import ChatSettings
from dspine.cli.main import run_cli
from dspine.cli.options import Options
from dspine.engine.engine import Engine
from dspine.engine.session import Session
from dspine.engine.session_file import read_session
from dspine.settings import settings_of
from tests.support.fake_engine import EOS, VOCAB, make_engine
from tests.support.fake_target import FakeTarget

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{{ hint }}{% endif %}"
)


def echoes(tokens: Sequence[int]) -> int:
    """Answers with the last question in capital letters."""
    text = bytes(token for token in tokens if token < 256).decode()
    question, answer = text.rsplit("[a]", 1)
    wanted = question.rsplit("[u]", 1)[1].upper()
    return ord(wanted[len(answer)]) if len(answer) < len(wanted) else EOS


class Watched(FakeTarget):
    """Tells the test how many tokens it has in memory, before each decode."""

    def decode(self, tokens, position, logits):  # type: ignore[no-untyped-def]
        super().decode(tokens, position, logits)
        self.heard(bytes(t for t in self.memory if t < 256).decode())

    def heard(self, text: str) -> None:
        """Nothing, unless a test replaces it."""


class Script:
    """A reader with lines, and with errors that are raised in their place."""

    def __init__(self, *lines: str | type[BaseException], interactive: bool = True) -> None:
        self._lines = list(lines)
        self.interactive = interactive

    def read(self, prompt: str) -> str:
        if not self._lines:
            raise EOFError
        line = self._lines.pop(0)
        if isinstance(line, str):
            return line
        raise line


class Stage:
    """A chat on the fakes; `cancel` is what Ctrl-C would set."""

    def __init__(self, n_ctx: int = 400, **given: Any) -> None:
        self.target = Watched(echoes, VOCAB, n_ctx=n_ctx)
        self.engine = make_engine(self.target, template=TEMPLATE, made_with={"target": "t"})
        self.session = Session(self.engine)
        self.cancel = threading.Event()
        defaults = {setting.name: setting.default for setting in settings_of("chat")}
        self.settings = ChatSettings(Options({**defaults, **given}))

    @contextmanager
    def interrupts(self) -> Iterator[threading.Event]:
        self.cancel.clear()
        yield self.cancel

    def play(
        self, *lines: str | type[BaseException], interactive: bool = True, **options: Any
    ) -> int:
        reader = Script(*lines, interactive=interactive)
        self.chat = Chat(self.session, reader, self.settings, self.interrupts, **options)
        return self.chat.run()

    def contents(self) -> list[str]:
        return [f"{m['role'][0]}:{m['content']}" for m in self.session.messages]


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the whole command with text as standard input."""

    def open_engine(_options: Options, *, may_draft_later: bool) -> Engine:
        assert may_draft_later
        return Stage().engine

    monkeypatch.setattr(chat_command, "open_engine", open_engine)

    def run(text: str, *arguments: str) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        return run_cli(["chat", *arguments])

    return run


def test_answers_alone_go_to_stdout_and_what_was_said_is_not_read_again(
    piped: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped("one\n\ntwo\n", "-sys", "s", "zero") == 0
    out, err = capsys.readouterr()
    assert out == "ZERO\nONE\nTWO\n"
    first, second, third = err.splitlines()
    assert "from memory" not in first
    assert f"{len('~[s]s[u]zero[a]ZERO')} from memory" in second
    assert f"{len('~[s]s[u]zero[a]ZERO[u]one[a]ONE')} from memory" in third


@pytest.mark.parametrize(
    ("text", "arguments", "told"),
    [
        ("", ["-p", "a", "b"], "the first question is given twice"),
        ("", [" "], "the first question is empty"),
        ("", ["--top-p", "7", "a"], "top_p is 7"),
        ("", ["-n", "0"], "-n is 0"),
        ("", ["--session", "no/where"], "does not exist: create it first"),
        ("", ["--chat-template-kwargs", "{", "a"], "--chat-template-kwargs is not JSON"),
        ("", ["--chat-template-kwargs", "[1]"], "give a JSON object"),
        ("", ["--chat-template-kwargs", '{"messages": 1}'], "without the names"),
        ("/sats\n", [], "there is no command /sats: did you mean /stats?"),
        ("/xyzzy\n", [], "there is no command /xyzzy: /help lists them"),
        ("/undo\n", [], "nothing was asked yet"),
        ("/retry\n", [], "nothing was asked yet"),
        ("/save\n", [], "no file is named: write /save FILE"),
        ("/load\n", [], "no file is named: write /load FILE"),
        ("/load gone\n", [], "gone"),
        ("/set temp hot\n", [], "temp is 'hot': it must be a number"),
    ],
)
def test_errors_are_one_sentence_and_a_pipe_gets_their_exit_code(
    piped: Any,
    capsys: pytest.CaptureFixture[str],
    text: str,
    arguments: list[str],
    told: str,
) -> None:
    assert piped(text, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.startswith("dspine: ") and err.count("\n") == 1


def test_after_an_error_a_pipe_goes_on(piped: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert piped("/no\none\n") == 2
    assert capsys.readouterr().out == "ONE\n"


def test_at_a_terminal_errors_leave_the_exit_code_alone() -> None:
    assert Stage().play("/no", "one") == 0


def test_variables_of_the_template_reach_it(piped: Any, capsys: pytest.CaptureFixture[str]) -> None:
    # The hint stands after [a], so the target takes it for a part of its own answer.
    assert piped("abc\n", "--chat-template-kwargs", '{"hint": "AB"}') == 0
    assert capsys.readouterr().out == "C\n"


def test_the_prompt_is_read_anew_if_wanted(piped: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert piped("one\ntwo\n", "--no-cache-prompt") == 0
    out, err = capsys.readouterr()
    assert out == "ONE\nTWO\n"
    assert "from memory" not in err


def test_history_is_changed_by_commands(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    stage.play("one", "two", "/undo", "/system be loud", "/system")
    assert stage.contents() == ["s:be loud", "u:one", "a:ONE"]
    assert capsys.readouterr().out == "ONE\nTWO\nbe loud\n"
    stage.play("/retry", "/system other", "three")
    assert stage.contents() == ["s:other", "u:one", "a:ONE", "u:three", "a:THREE"]
    stage.play("/reset", "four")
    assert stage.contents() == ["s:other", "u:four", "a:FOUR"]


def test_a_question_without_an_answer_names_the_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stage = Stage()
    stage.play("one")
    stage.session.edit(0, "two")
    stage.play("three")
    assert "/retry answers it, /undo removes it" in capsys.readouterr().err
    stage.play("/retry", "three")
    assert stage.contents() == ["u:two", "a:TWO", "u:three", "a:THREE"]


def test_blocks_and_quit(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    assert stage.play('"""', "/a", "b", '"""', "c\\", "d", "/quit", "never") == 0
    assert stage.contents() == ["u:/a\nb", "a:/A\nB", "u:c\nd", "a:C\nD"]


def test_a_path_before_several_lines_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    assert stage.play("/etc/hosts says\nwhat?", "/etc/hosts?", "/system be\nbrief") == 0
    assert stage.contents()[1:] == ["u:/etc/hosts says\nwhat?", "a:/ETC/HOSTS SAYS\nWHAT?"]
    assert stage.contents()[0] == "s:be\nbrief"
    assert "there is no command /etc/hosts?" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    stage.play("/help")
    shown = capsys.readouterr().out
    assert all(f"\n{name}" in "\n" + shown for name in stage.chat._actions)


# -- Ctrl-C --------------------------------------------------------------------------------------


def test_an_interrupted_answer_keeps_its_text_and_the_chat_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stage = Stage()

    def heard(text: str) -> None:
        if text.endswith("[u]abcdef[a]ABC"):
            stage.cancel.set()

    stage.target.heard = heard  # type: ignore[method-assign]
    assert stage.play("abcdef", "two") == 0
    assert stage.contents() == ["u:abcdef", "a:ABCD", "u:two", "a:TWO"]
    out, err = capsys.readouterr()
    assert out == "ABCD\nTWO\n"
    assert f"{len('~[u]abcdef[a]ABC')} from memory" in err


def test_stopped_before_the_first_word_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    stage.target.heard = lambda text: stage.cancel.set()  # type: ignore[method-assign]
    assert stage.play("abcdef", interactive=False) == 130
    assert stage.contents() == []
    assert "before the first word" in capsys.readouterr().err


def test_a_second_interrupt_outside_of_the_engine_keeps_the_text_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    real = click.echo

    def echo(text: Any = None, **options: Any) -> None:
        real(text, **options)
        if text == "B":
            raise KeyboardInterrupt

    monkeypatch.setattr(click, "echo", echo)
    assert stage.play("abcdef", "/set drafting off", "two") == 0
    assert stage.contents() == ["u:abcdef", "a:AB", "u:two", "a:TWO"]


def test_at_the_prompt_it_clears_the_line_and_twice_leaves() -> None:
    stage = Stage()
    interrupt = KeyboardInterrupt
    assert stage.play(interrupt, "one", interrupt, "two", interrupt, interrupt, "never") == 130
    assert stage.contents() == ["u:one", "a:ONE", "u:two", "a:TWO"]
    assert stage.play('"""', "half", interrupt, "three") == 0
    assert stage.contents()[-2:] == ["u:three", "a:THREE"]
    assert stage.play(interrupt, "never", interactive=False) == 130


# -- a full context ------------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["x" * 60, "x" * 20])
def test_a_full_context_says_what_to_do(capsys: pytest.CaptureFixture[str], question: str) -> None:
    stage = Stage(n_ctx=40)
    assert stage.play(question, "/reset", "one") == 0
    assert stage.contents() == ["u:one", "a:ONE"]
    told = [line for line in capsys.readouterr().err.splitlines() if "is full" in line]
    assert len(told) == 1
    assert told[0].startswith("dspine: the context of 40 tokens is full: /reset begins anew, ")
    assert told[0].endswith("-c at the start gives a larger one")


# -- files ---------------------------------------------------------------------------------------


def messages(file: Path) -> list[str]:
    return [m["content"] for m in read_session(file).messages]


def test_the_session_file_is_written_at_the_end(
    piped: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "talk"
    assert piped("", "--session", str(file)) == 0
    assert not file.exists()
    assert piped("one\n", "--session", str(file)) == 0
    assert messages(file) == ["one", "ONE"]
    before = file.stat().st_mtime_ns
    assert piped("/stats\n", "--session", str(file)) == 0
    assert file.stat().st_mtime_ns == before
    capsys.readouterr()
    assert piped("two\n", "--session", str(file)) == 0
    assert messages(file) == ["one", "ONE", "two", "TWO"]
    assert "from memory" in capsys.readouterr().err


def test_saving_and_loading_never_touch_another_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, notes = tmp_path / "one", tmp_path / "two", tmp_path / "notes"
    notes.write_text("mine")
    stage = Stage()
    stage.play("a", f"/save {one}", f"/save {notes}", "b", "/save", f"/load {notes}")
    assert messages(one) == ["a", "A", "b", "B"]
    assert notes.read_text() == "mine"
    err = capsys.readouterr().err
    assert f"{notes} exists already: choose another name" in err
    assert "not a saved session" in err
    # A chat with a file of its own keeps it, and then goes on in the loaded one.
    stage = Stage()
    stage.play("c", f"/load {one}", "d", file=two)
    assert messages(two) == ["c", "C"]
    assert messages(one) == ["a", "A", "b", "B", "d", "D"]
    # Without one nothing is written unasked.
    stage = Stage()
    stage.play(f"/load {one}", "e")
    assert messages(one) == ["a", "A", "b", "B", "d", "D"]


# -- settings and numbers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("/set temp -1", "temp is -1: it must be at least 0"),
        ("/set top_p 2", "top_p is 2"),
        ("/set predict 0", "-n is 0"),
        ("/set spec_verify maybe", "choose one of auto, match or rejection"),
        ("/set drafting perhaps", "use on or off"),
        ("/set width -3", "at least 0"),
        ("/set json_schema {", "the JSON schema is not JSON"),
        ("/set grammar root ::= (", "the GBNF grammar cannot be converted"),
        ("/set grammar start: missing", "missing"),
        ("/set regex [a", "the regular expression"),
        ("/set stop 'a", "a quotation mark is missing"),
        ("/set logit_bias 5", "--logit-bias is '5'"),
        ("/set sed 5", "there is no setting sed: did you mean seed?"),
        ("/set model x", "there is no setting model"),
        ("/set xyzzy 5", "there is no setting xyzzy: /set alone lists them"),
    ],
)
def test_a_bad_value_is_refused_and_the_old_one_stays(
    capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    stage = Stage()
    before = stage.settings.arguments(), stage.settings.lines()
    assert stage.play(line, "one") == 0
    assert told in capsys.readouterr().err
    assert (stage.settings.arguments(), stage.settings.lines()) == before
    assert stage.contents() == ["u:one", "a:ONE"]


def test_settings_reach_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    stage.play("/set max_tokens 2", "abc", "/set -n default", "/set stop F G", "defg", "/set stop")
    assert stage.contents() == ["u:abc", "a:AB", "u:defg", "a:DE"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "predict 2"
    assert lines[-1].startswith("stop F G  (End the answer")
    stage.play("/set temperature 0.5", "/set seed 7", "/set width 3", "/set drafting off")
    arguments = stage.settings.arguments()
    sampling = arguments["sampling"]
    assert (sampling.temperature, sampling.seed) == (0.5, 7)
    assert (arguments["max_drafts"], arguments["plain"]) == (2, True)
    stage.play("/set")
    listed = capsys.readouterr().out.splitlines()
    assert {"temp 0.5", "seed 7", "width 3", "drafting off", "top_k 40"} <= {*listed}
    stage.play("/set temp default", "/set width default")
    assert stage.settings.arguments()["max_drafts"] is None
    assert stage.settings.arguments()["sampling"].is_greedy


def test_plain_on_the_command_line_is_drafting_off() -> None:
    assert Stage(plain=True).settings.arguments()["plain"] is True
    assert "drafting off" in Stage(plain=True).settings.lines()


def test_stats_are_of_the_last_answer_and_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    stage.play("/stats", "/set drafting off", "ab", "xyz", "/stats")
    out = capsys.readouterr().out
    assert out.startswith("nothing was answered yet\ncontext: 0 of 400 tokens used (0 %)\n")
    last, everything = out.split("last answer: ")[1].split("all 2 answers: ")
    # Each letter and the end token is one step; the end token is not in memory.
    assert last.startswith("4 tokens in ") and "without drafts: 4 steps" in last
    assert f"prompt: {len('~[u]ab[a]AB[u]xyz[a]')} tokens, {len('~[u]ab[a]AB')} of them" in last
    assert everything.startswith("7 tokens in ") and "without drafts: 7 steps" in everything
    used = len("~[u]ab[a]AB[u]xyz[a]XYZ")
    context = f"context: {used} of 400 tokens used ({100 * used / 400:.0f} %)"
    assert everything.endswith(f"{context}\nrollback: trim\n")


def test_drafts_are_shown_with_a_legend(capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    stage.play("abcabcabc", "/set color on", "/retry")
    plain, _setting, legend, marked = capsys.readouterr().out.splitlines()
    assert plain == "ABCABCABC"
    assert legend.startswith("\u2039accepted draft\u203a, \u00abbonus")
    assert "\u2039" in marked
    assert "".join(c for c in marked if c not in "\u2039\u203a\u00ab\u00bb") == plain
    stage = Stage(color_tokens=True)
    stage.play("abcabcabc", colour=True)
    out, err = capsys.readouterr()
    assert out == "ABCABCABC\n"  # click takes colours away where there is no terminal
    assert "accepted draft, bonus" in err
