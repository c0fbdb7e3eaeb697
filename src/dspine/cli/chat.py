"""`dspine chat`: a conversation at the terminal, or of the lines of a pipe."""

from __future__ import annotations

import sys

import click

from dspine.cli.chat_input import LineReader, Reader, TerminalReader, history_file
from dspine.cli.chat_settings import ChatSettings, offered
from dspine.cli.interrupts import cancel_on_interrupt, cancel_quietly
from dspine.cli.options import Options, settings_command
from dspine.cli.output import warn
from dspine.cli.session import check_session_file, open_engine, open_session
from dspine.cli.token_colours import has_colour
from dspine.errors import FileError, UsageError
from dspine.machine import state_folder


@settings_command("chat", click.Argument(["prompt_argument"], required=False, metavar="[PROMPT]"))
def command(options: Options, prompt_argument: str | None) -> int:
    """Talk with the target. What was said is not read again; /help lists the commands."""
    first, file = first_question(options, prompt_argument), options.path("session")
    settings = ChatSettings(options)
    check_session_file(file)
    with open_engine(options, may_draft_later=True) as engine:
        # Late, so that `dspine --help` does not load the engine.
        from dspine.cli.chat_loop import Chat

        for notice in engine.notices:
            warn(notice)
        session = open_session(engine, file, options.text("system"))
        reader = open_reader(options)
        if reader.interactive:
            warn("/help lists the commands, Ctrl-D leaves")
        chat = Chat(
            session,
            reader,
            settings,
            cancel_quietly if reader.interactive else cancel_on_interrupt,
            file=file,
            colour=has_colour(sys.stdout),
        )
        return chat.run(first)


def first_question(options: Options, argument: str | None) -> str | None:
    """What the chat begins with, if anything."""
    option = options.text("prompt")
    if argument is not None and option is not None:
        raise UsageError("the first question is given twice (argument, -p): keep one")
    text = argument if option is None else option
    if text is not None and not text.strip():
        raise UsageError("the first question is empty: give some text, or leave it out")
    return text


def open_reader(options: Options) -> Reader:
    """With editing at a terminal, else line by line."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return LineReader(sys.stdin)
    history = None
    if not options.switch("no_history"):
        try:
            history = history_file(state_folder())
        except FileError as error:
            warn(str(error))
    from dspine.cli.chat_loop import NAMES

    return TerminalReader(history, [*NAMES, *(f"/set {name}" for name in offered())])
