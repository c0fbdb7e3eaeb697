"""Lines become messages; the terminal's lines have editing and a private history."""

from __future__ import annotations

import io
import os
import select
import signal
import stat
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from dspine.cli.chat_input import Entry, LineReader, TerminalReader, history_file, read_entry
from dspine.cli.interrupts import cancel_quietly, unechoed
from dspine.errors import FileError

if sys.platform != "win32":
    import pty
    import termios


def entries(text: str) -> list[Entry]:
    reader, found = LineReader(io.StringIO(text)), list[Entry]()
    while True:
        try:
            found.append(read_entry(reader))
        except EOFError:
            return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a\nb", [Entry("a"), Entry("b")]),
        ("a\r\n\n", [Entry("a"), Entry("")]),
        ("a\\\nb\\\nc\nd\n", [Entry("a\nb\nc"), Entry("d")]),
        ("a\\\n", [Entry("a")]),
        ('"""\na\n\n  b\n"""\nc\n', [Entry("a\n\n  b", True), Entry("c")]),
        ('"""a\nb"""\nc\n', [Entry("a\nb", True), Entry("c")]),
        ('"""a"""\n', [Entry("a", True)]),
        ('"""\n/quit\\\n"""\n', [Entry("/quit\\", True)]),
        ('"""\nthe end is missing\n', [Entry("the end is missing", True)]),
        ('a """ b\n', [Entry('a """ b')]),
    ],
)
def test_lines_become_messages(text: str, expected: list[Entry]) -> None:
    assert entries(text) == expected


class Pasted:
    """A reader that gives several lines at once."""

    interactive = True

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    def read(self, _prompt: str) -> str:
        return self.texts.pop(0)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["a\nb"], Entry("a\nb")),
        (["a\nb\\", "c"], Entry("a\nb\nc")),
        (['"""\na\n\n b\n"""'], Entry("a\n\n b", True)),
        (['"""Doc."""\nimport os'], Entry('"""Doc."""\nimport os', True)),
        (['"""Doc."""\ndef f():\n    """F."""'],
         Entry('"""Doc."""\ndef f():\n    """F."""', True)),
        (['"""\nno end'], Entry('"""\nno end', True)),
        (['"""a"""\n'], Entry("a", True)),
    ],
)  # fmt: skip
def test_what_is_pasted_is_one_message(texts: list[str], expected: Entry) -> None:
    reader = Pasted(*texts)
    assert read_entry(reader) == expected
    assert not reader.texts


def test_bytes_that_are_no_text_are_told() -> None:
    reader = LineReader(io.TextIOWrapper(io.BytesIO(b"ab\xff\n"), encoding="utf-8"))
    with pytest.raises(FileError, match=r"not UTF-8 text \(byte 2\)"):
        reader.read("> ")


def test_the_history_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "dspine"
    path = history_file(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    path.write_text("kept")
    path.chmod(0o644)
    assert history_file(folder) == path
    assert (stat.S_IMODE(path.stat().st_mode), path.read_text()) == (0o600, "kept")
    with pytest.raises(FileError, match="cannot keep what is typed"):
        history_file(path / "below a file")


def test_commands_are_completed() -> None:
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        completer = TerminalReader(None, ["/help", "/set", "/set temp"]).completer

        def complete(text: str) -> list[str]:
            found = completer.get_completions(Document(text), CompleteEvent())
            return [completion.text for completion in found]

        assert complete("/s") == ["/set", "/set temp"]
        assert complete("/set t") == ["/set temp"]
        assert complete("what is /s") == []


def test_a_terminal_edits_and_remembers(tmp_path: Path) -> None:
    history = history_file(tmp_path)
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        reader = TerminalReader(history, ["/help", "/stats"])
        keys.send_text("helo\x1b[Dl\r")  # left, then a letter
        assert reader.read("> ") == "hello"
        keys.send_text("/st\r")
        assert reader.read("> ") == "/st"
        keys.send_text("\x03")
        with pytest.raises(KeyboardInterrupt):
            reader.read("> ")
        keys.send_text("\x04")
        with pytest.raises(EOFError):
            reader.read("> ")
        later = TerminalReader(history, [])
        keys.send_text("\x1b[A\x1b[A\r")  # up twice
        assert later.read("> ") == "hello"


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of Unix")
def test_keys_are_not_shown_while_an_answer_comes_and_not_lost() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as keys, os.fdopen(theirs) as stream:

        def type_line(text: bytes) -> None:
            keys.write(text + b"\n")
            assert select.select([stream], [], [], 10)[0]

        with suppress(KeyboardInterrupt), unechoed(stream):
            type_line(b"typed ahead")
            raise KeyboardInterrupt
        assert stream.readline() == "typed ahead\n"
        type_line(b"seen")
        assert keys.read(20) == b"seen\r\n"


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of Unix")
@pytest.mark.parametrize("presses", [0, 1, 2])
def test_the_terminal_is_as_before_however_an_answer_ends(
    presses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        kept = signal.SIGINT, signal.SIGTERM
        before = termios.tcgetattr(stream), *map(signal.getsignal, kept)
        ended = pytest.raises(KeyboardInterrupt) if presses == 2 else nullcontext()
        with ended, cancel_quietly() as cancel:
            assert not termios.tcgetattr(stream)[3] & termios.ECHO
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
                assert cancel.is_set()
        assert (termios.tcgetattr(stream), *map(signal.getsignal, kept)) == before


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of Unix")
def test_the_terminal_shows_keys_again_after_a_process_that_was_ended() -> None:
    program = """
import sys, time
from dspine.cli.interrupts import unechoed
with unechoed(sys.stdin):
    print("answering", flush=True)
    time.sleep(60)
"""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs) as stream:
        before = termios.tcgetattr(stream)
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdin=stream, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None and child.stdout.readline() == "answering\n"
            assert not termios.tcgetattr(stream)[3] & termios.ECHO
            child.terminate()
            assert child.wait(30) == -signal.SIGTERM
        assert termios.tcgetattr(stream) == before


def test_where_nobody_types_nothing_is_changed() -> None:
    with unechoed(io.StringIO("text")):
        pass
