"""A chat: reads messages, streams answers, and obeys the commands that begin with a slash."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import click

from dspine.cli import INTERRUPTED
from dspine.cli.chat_input import Entry, Reader, read_entry
from dspine.cli.chat_settings import ChatSettings
from dspine.cli.chat_stats import add_up, context_line, rollback_line, stats_lines
from dspine.cli.output import speed_line, warn
from dspine.cli.token_colours import TokenColours, legend
from dspine.engine.events import Event, Finish, Step
from dspine.engine.session import Session
from dspine.engine.stats import Stats
from dspine.errors import CapacityError, DspineError, UsageError

Interrupts = Callable[[], AbstractContextManager[threading.Event]]
"""Inside of it Ctrl-C sets the event that it gives."""

COMMANDS = {
    "/help": "this list",
    "/set [NAME [VALUE]]": "show or change settings; the value default undoes a change",
    "/stats": "speed, acceptance and memory of the last answer and of the conversation",
    "/retry": "answer the last question again",
    "/undo": "remove the last question and its answer",
    "/reset": "begin anew; the system message stays",
    "/system [TEXT]": "show the system message, or go on with another one",
    "/save [FILE]": "write the conversation to a file",
    "/load FILE": "go on with a saved conversation",
    "/quit": "leave, as Ctrl-D does",
}
NAMES = [usage.split()[0] for usage in COMMANDS]
HINTS = (
    'A line that ends with \\ goes on in the next one; a block between two """ lines is one\n'
    "message, and in it a / at the beginning is no command. Ctrl-C stops an answer and keeps\n"
    "what was said; at the prompt it clears the line, and leaves when pressed twice."
)


class Chat:
    """The loop around one session. Requested text goes to stdout, all remarks to stderr."""

    def __init__(
        self,
        session: Session,
        reader: Reader,
        settings: ChatSettings,
        interrupts: Interrupts,
        *,
        file: Path | None = None,
        colour: bool = False,
    ) -> None:
        """`file`: where the conversation is kept. `colour`: whether the terminal has colours."""
        self._session = session
        self._reader = reader
        self._settings = settings
        self._interrupts = interrupts
        self._file = file
        self._colour = colour
        self._keeps = file is not None
        self._saved = session.messages
        self._ours = {file.resolve()} if file is not None else set[Path]()
        self._cancel = threading.Event()
        self._answers: list[Stats] = []
        self._done = False
        self._code = 0
        self._actions: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/set": self._set,
            "/stats": self._stats,
            "/retry": self._retry,
            "/undo": self._undo,
            "/reset": self._reset,
            "/system": self._system,
            "/save": self._save,
            "/load": self._load,
            "/quit": self._quit,
        }

    def run(self, first: str | None = None) -> int:
        """Answer `first`, then what is read, until the end; returns the exit code.

        Errors are told and the chat goes on; where nobody sits at a terminal, the code is that
        of the first one.
        """
        if self._settings.color_tokens:
            warn(legend(colour=self._colour))
        entry = None if first is None else Entry(first, literal=True)
        interrupted = False
        while not self._done:
            try:
                entry = entry or read_entry(self._reader)
            except EOFError:
                break
            except KeyboardInterrupt:
                if interrupted or not self._reader.interactive:
                    self._code = INTERRUPTED
                    break
                interrupted = True
                warn("Ctrl-C again, Ctrl-D or /quit leaves")
                continue
            interrupted = False
            self._obey(entry)
            entry = None
        self._keep()
        return self._code

    def _obey(self, entry: Entry) -> None:
        text = entry.text.strip()
        if not text:
            return
        with self._interrupts() as self._cancel:
            self._do(entry, text)

    def _do(self, entry: Entry, text: str) -> None:
        try:
            name, *rest = text.split(None, 1)
            # Several lines that begin with a path are a message, not a mistyped command.
            is_command = name.startswith("/") and (name in self._actions or "\n" not in text)
            if is_command and not entry.literal:
                self._action(name)("".join(rest).strip())
            else:
                self._ask(entry.text)
        except DspineError as error:
            warn(" ".join(str(error).split()))
            self._failed(error.exit_code)

    def _failed(self, code: int) -> None:
        if not self._reader.interactive:
            self._code = self._code or code

    def _full(self) -> str:
        return (
            f"the context of {self._session.engine.n_ctx} tokens is full: /reset begins anew, "
            f"/undo removes the last question, and -c at the start gives a larger one"
        )

    def _action(self, name: str) -> Callable[[str], None]:
        if name not in self._actions:
            near = difflib.get_close_matches(name, self._actions, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else "/help lists them"
            raise UsageError(f"there is no command {name}: {hint}")
        return self._actions[name]

    # -- answers ---------------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        if self._session.waits_for_answer:
            raise UsageError(
                "the last message is a question without an answer: /retry answers it, /undo "
                "removes it"
            )
        self._answer(lambda options: self._session.ask(question, **options))

    def _answer(self, begin: Callable[[dict[str, Any]], Iterator[Event]]) -> None:
        engine, before = self._session.engine, self._session.messages
        colours = None
        if self._settings.color_tokens:
            colours = TokenColours(engine.tokenizer.piece, colour=self._colour)
        finish: Finish | None = None
        try:
            events = begin({**self._settings.arguments(), "cancel": self._cancel})
        except CapacityError:
            raise CapacityError(self._full()) from None
        try:
            for event in events:
                if isinstance(event, Step):
                    text = event.text if colours is None else colours.show(event)
                    click.echo(text, nl=False)
                elif isinstance(event, Finish):
                    finish = event
        except KeyboardInterrupt:  # a second one, which the engine did not see
            pass
        finally:
            if isinstance(events, Generator):
                events.close()
            click.echo()
        if finish is not None:
            self._answers.append(finish.stats)
            plain = self._settings.arguments()["plain"] or engine.proposer == "none"
            click.echo(speed_line(finish.stats, may_draft=not plain), err=True)
        if finish is None or finish.reason == "cancelled":
            self._failed(INTERRUPTED)
            if self._session.messages == before:
                warn("stopped before the first word: the conversation is as it was")
        elif finish.reason == "context":
            warn(self._full())

    # -- commands --------------------------------------------------------------------------------

    def _help(self, _rest: str) -> None:
        width = max(map(len, COMMANDS))
        for usage, meaning in COMMANDS.items():
            click.echo(f"{usage:{width}}  {meaning}")
        click.echo(HINTS)

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            click.echo("\n".join(self._settings.lines()))
        elif not value.strip():
            click.echo(self._settings.show(name))
        else:
            coloured = self._settings.color_tokens
            click.echo(self._settings.set(name, value.strip(), self._check_grammar))
            if self._settings.arguments()["plain"] is False:
                self._check_drafting()
            if self._settings.color_tokens and not coloured:
                click.echo(legend(colour=self._colour))

    def _check_grammar(self, arguments: Mapping[str, Any]) -> None:
        if arguments["grammar"] is not None:
            self._session.engine.check_grammar(arguments["grammar"])

    def _check_drafting(self) -> None:
        engine = self._session.engine
        if engine.proposer == "none":
            warn(f"nothing drafts here: {engine.disabled_reason or '--proposer none was given'}")

    def _stats(self, _rest: str) -> None:
        if not self._answers:
            click.echo("nothing was answered yet")
        else:
            click.echo("\n".join(stats_lines("last answer", self._answers[-1])))
        if len(self._answers) > 1:
            title = f"all {len(self._answers)} answers"
            click.echo("\n".join(stats_lines(title, add_up(self._answers))))
        engine = self._session.engine
        click.echo(context_line(self._session.count_tokens(), engine.n_ctx))
        click.echo(rollback_line(engine.rollback, engine.rollback_reason))

    def _retry(self, _rest: str) -> None:
        self._answer(lambda options: self._session.regenerate(**options))

    def _undo(self, _rest: str) -> None:
        self._session.undo()
        warn("the last question and its answer are removed")

    def _reset(self, _rest: str) -> None:
        self._session.reset()
        self._answers = []
        warn("the conversation begins anew")

    def _system(self, rest: str) -> None:
        if rest:
            self._session.set_system(rest)
            warn("the conversation goes on with this system message")
            return
        first = self._session.messages[:1]
        is_set = bool(first) and first[0]["role"] == "system"
        click.echo(first[0]["content"] if is_set else "there is no system message")

    def _save(self, rest: str) -> None:
        path = Path(rest).expanduser() if rest else self._file
        if path is None:
            raise UsageError("no file is named: write /save FILE")
        if path.exists() and path.resolve() not in self._ours:
            raise UsageError(f"{path} exists already: choose another name")
        self._session.save(path, overwrite=True)
        self._ours.add(path.resolve())
        self._file = self._file or path
        if path == self._file:
            self._saved = self._session.messages
        warn(f"saved in {path}")

    def _load(self, rest: str) -> None:
        if not rest:
            raise UsageError("no file is named: write /load FILE")
        path = Path(rest).expanduser()
        self._keep()
        self._session = Session.load(self._session.engine, path)
        self._answers = []
        self._file, self._saved = path, self._session.messages
        self._ours.add(path.resolve())
        warn(f"going on with the {len(self._session.messages)} messages of {path}")

    def _quit(self, _rest: str) -> None:
        self._done = True

    def _keep(self) -> None:
        """A chat with --session writes its file when a conversation is left that has changed."""
        if self._keeps and self._file is not None and self._session.messages != self._saved:
            self._session.save(self._file, overwrite=True)
            self._saved = self._session.messages
