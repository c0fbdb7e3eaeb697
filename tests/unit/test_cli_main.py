"""The `dspine` program as a whole: errors in one line, exit codes, quick start."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

import dspine
from dspine.cli.main import add_commands, cli, complain, run_cli
from dspine.cli.options import EARLIER_NAMES, Options, present_names
from dspine.cli.other_flags import ABSENT
from dspine.cli.output import size
from dspine.errors import DspineError, FileError, LibraryError, TrainingError, UsageError
from dspine.settings import SETTINGS


@pytest.fixture
def failing() -> Iterator[list[BaseException]]:
    """Adds a command `fail` that raises what the test puts into the list."""
    to_raise: list[BaseException] = []

    @click.command("fail")
    def fail() -> None:
        raise to_raise[0]

    cli.add_command(fail)
    yield to_raise
    del cli.commands["fail"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(FileError("a b"), 2), (LibraryError("a b"), 3), (TrainingError("a b"), 4)],
)
def test_an_error_made_for_users_is_its_own_line_and_code(
    failing: list[BaseException],
    capsys: pytest.CaptureFixture[str],
    error: DspineError,
    code: int,
) -> None:
    failing.append(error)
    assert run_cli(["fail"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", "dspine: a b\n")


def test_an_unforeseen_error_says_how_to_see_more(
    failing: list[BaseException],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing.append(ValueError("odd\nvalue"))
    assert run_cli(["fail"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith("dspine: something went wrong inside dspine (ValueError: odd value)")
    assert "DSPINE_DEBUG=1" in err
    monkeypatch.setenv("DSPINE_DEBUG", "1")
    assert run_cli(["fail"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("x", name="torch"), "training needs torch"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "something went wrong"),
        (OSError(28, "No space left on device", "out.gguf"), "cannot use out.gguf: No space left"),
    ],
)
def test_known_causes_get_a_sentence_of_their_own(
    failing: list[BaseException],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    told: str,
) -> None:
    failing.append(error)
    assert run_cli(["fail"]) == 1
    assert told in capsys.readouterr().err


def test_control_c_ends_with_130_and_no_words(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(KeyboardInterrupt())
    assert run_cli(["fail"]) == 130
    assert capsys.readouterr().err.strip() == ""


def test_a_closed_pipe_is_quiet(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(BrokenPipeError(32, "Broken pipe"))
    with pytest.raises(SystemExit) as caught:
        run_cli(["fail"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "No such command 'nothing'; see `dspine --help`"),
        (["inspect"], "Missing argument 'FILE'; see `dspine inspect --help`"),
        (["inspect", "--loud", "x"], "No such option '--loud'; see `dspine inspect --help`"),
        (["runn"], "No such command 'runn': did you mean 'run'?"),
        (["run", "--plai", "x"], "No such option '--plai': did you mean '--plain'?"),
        (
            ["run", "--preson", "x"],
            (
                "No such option '--preson' (did you mean one of: '--json', '--prompt', "
                "'--session'?); see `dspine run --help`"
            ),
        ),
    ],
)
def test_a_wrong_command_line_points_to_its_help(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(arguments) == 2
    assert capsys.readouterr().err == f"dspine: {told}\n"


def test_a_sentence_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert complain("one\n  two", 7) == 7
    assert capsys.readouterr().err == "dspine: one two\n"


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    program = (
        "import sys; from dspine.cli.main import run_cli; run_cli(['--help']);"
        "heavy = {'numpy', 'torch', 'llama_cpp', 'gguf', 'jinja2', 'rich'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[-2] == "[]"
    add_commands()
    for name in cli.commands:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (74_200, "74.2 kB"),
        (999_960, "1.0 MB"),
        (12_345_678, "12.3 MB"),
        (5_000_000_000, "5.0 GB"),
    ],
)
def test_sizes_have_the_unit_that_suits_them(n_bytes: int, text: str) -> None:
    assert size(n_bytes) == text


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("answers", "one that is there is continued"),
        ("fit", "Folder of the run"),
        ("eval", "to measure on, held out from training"),
        ("features", "The prompt file that tells the source"),
    ],
)
def test_a_shared_option_is_explained_for_the_command(
    capsys: pytest.CaptureFixture[str], command: str, told: str
) -> None:
    assert run_cli(["train", command, "--help"]) == 0
    assert told in " ".join(capsys.readouterr().out.split())


def test_what_a_program_needs_is_exported() -> None:
    for name in dspine.__all__:
        assert getattr(dspine, name) is not None
    assert {"Comparison", "Divergence", "ProposerStats", "Stats"} <= set(dspine.__all__)


def test_an_interrupt_while_commands_are_imported_ends_quietly() -> None:
    program = (
        "import os, signal, sys\n"
        # A shell that starts tests in the background has children ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from dspine.cli.main import main\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'dspine.cli.bench':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("name", ["--draft", "--draft-n", "--draft-max"])
@pytest.mark.parametrize("form", ["{} -3", "{}=-3"])
def test_earlier_names_of_llama_cpp_still_work(
    name: str, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", *form.format(name).split(), "hello"]) == 2
    notice, refusal = capsys.readouterr().err.splitlines()
    assert notice == f"dspine: {name} is called --spec-draft-n-max now"
    assert refusal == "dspine: --spec-draft-n-max is -3: it must be at least 0"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-- --draft-max", "-- --draft-max"),
        ("-p --draft", "-p --draft"),
        ("-p --draft=2", "-p --draft=2"),
        ("--prompt --draft --draft 2", "--prompt --draft --spec-draft-n-max 2"),
        ("-p -- --draft 2", "-p -- --spec-draft-n-max 2"),
        ("-p=--draft --draft-n 2", "-p=--draft --spec-draft-n-max 2"),
        ("-p -p --draft 2", "-p -p --spec-draft-n-max 2"),
        ("--plain --draft 2", "--plain --spec-draft-n-max 2"),
    ],
)
def test_values_and_words_behind_two_dashes_stay_as_they_are(words: str, expected: str) -> None:
    assert present_names(words.split(), {"-p", "--prompt"}) == expected.split()


def test_a_prompt_may_be_called_like_a_flag_of_earlier(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str | None] = []

    def note(options: Options, *_: object) -> None:
        seen.append(options.text("prompt"))
        raise UsageError("enough")

    monkeypatch.setattr("dspine.cli.run.read_request", note)
    assert run_cli(["run", "-p", "--draft", "--draft-n", "4"]) == 2
    assert seen == ["--draft"]
    notice, _ = capsys.readouterr().err.splitlines()
    assert notice == "dspine: --draft-n is called --spec-draft-n-max now"


@pytest.mark.parametrize("name", sorted(ABSENT))
@pytest.mark.parametrize("command", ["run", "serve"])
def test_flags_of_llama_cpp_that_are_not_here_say_what_is(
    name: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli([command, name, "draft-dflash", "hello"]) == 2
    assert capsys.readouterr().err == f"dspine: there is no {name}: {ABSENT[name]}\n"


def test_a_prompt_that_is_called_like_such_a_flag_is_a_prompt() -> None:
    assert present_names(["-p", "-ctkd", "--", "-sm"], {"-p"}) == ["-p", "-ctkd", "--", "-sm"]


def test_no_flag_of_ours_is_said_to_be_missing() -> None:
    ours = {flag for setting in SETTINGS for flag in setting.flags}
    assert ours.intersection(ABSENT) == {"--device"} and ours.isdisjoint(EARLIER_NAMES)
    shown = {
        word for answer in ABSENT.values() for word in re.findall(r"(?<!\w)--?[a-z-]+", answer)
    }
    assert shown and shown <= ours
