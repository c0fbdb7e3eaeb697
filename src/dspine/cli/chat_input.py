"""Where the lines of a chat come from, and which of them are one message."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

import click

from dspine.errors import FileError

PROMPT, CONTINUED = "> ", ". "
FENCE = '"""'


class Reader(Protocol):
    """Gives lines."""

    interactive: bool
    """Whether a person sits there, who sees errors and goes on."""

    def read(self, prompt: str) -> str:
        """One line without its end, or several that were pasted; EOFError after the last,
        KeyboardInterrupt for Ctrl-C.
        """


@dataclass(frozen=True, slots=True)
class Entry:
    """One message. `literal` is a block, in which a / at the beginning is no command."""

    text: str
    literal: bool = False


def read_entry(reader: Reader) -> Entry:
    r"""One message: a line, lines that end with \ and the next, or a block between \"\"\" lines.

    The end of the input ends a block as well. Several lines at once were pasted: they are one
    message, and begin a block only if they are the whole of it. EOFError when there is nothing any
    more.
    """
    line = reader.read(PROMPT)
    if "\n" in line.strip() and line.lstrip().startswith(FENCE):
        return Entry(_pasted_block(line), literal=True)
    if line.lstrip().startswith(FENCE):
        return Entry(_block(reader, line.lstrip()[len(FENCE) :]), literal=True)
    lines = [line]
    with suppress(EOFError):
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(reader.read(CONTINUED))
    return Entry("\n".join(lines))


def _block(reader: Reader, first: str) -> str:
    lines = [first]
    with suppress(EOFError):
        while not lines[-1].rstrip().endswith(FENCE):
            lines.append(reader.read(CONTINUED))
        lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
    return "\n".join(lines).strip("\n")


def _pasted_block(text: str) -> str:
    """What is between its two marks; all of it if there are others, as in source code."""
    if text.count(FENCE) == 2 and text.rstrip().endswith(FENCE):
        return text.strip()[len(FENCE) : -len(FENCE)].strip("\n")
    return text


class LineReader:
    """Lines of a pipe or file, or of a terminal whose output goes elsewhere."""

    interactive = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def read(self, prompt: str) -> str:
        if self._stream.isatty():
            click.echo(prompt, nl=False, err=True)
        try:
            line = self._stream.readline()
        except UnicodeDecodeError as error:
            raise FileError(
                f"standard input is not UTF-8 text (byte {error.start}): convert it"
            ) from None
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


class TerminalReader:
    """Lines with editing, history and completion of commands."""

    interactive = True

    def __init__(self, history: Path | None, commands: Iterable[str]) -> None:
        """`history` is a file, None keeps what was typed for this chat alone."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory
        from prompt_toolkit.shortcuts import CompleteStyle

        self.completer = WordCompleter(sorted(commands), sentence=True)
        self._session: PromptSession[str] = PromptSession(
            history=InMemoryHistory() if history is None else FileHistory(str(history)),
            completer=self.completer,
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,  # a menu would keep lines below free
        )

    def read(self, prompt: str) -> str:
        return self._session.prompt(prompt)


def history_file(folder: Path) -> Path:
    """The file for what is typed, which nobody else may read. Raises FileError."""
    path = folder / "chat_history"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        path.chmod(0o600)
    except OSError as error:
        raise FileError(f"cannot keep what is typed in {path}: {error.strerror}") from None
    return path
