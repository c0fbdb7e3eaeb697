"""Lines become messages; the terminal's lines have editing and a private history."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from dspine.cli.chat_input import Entry, LineReader, TerminalReader, history_file, read_entry
from dspine.errors import FileError


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
