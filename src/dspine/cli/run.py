"""`dspine run`: answer one prompt; the text goes to stdout, one line of speed to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from dspine.cli import INTERRUPTED
from dspine.cli.compare import print_comparison
from dspine.cli.interrupts import cancel_on_interrupt
from dspine.cli.options import Options, settings_command
from dspine.cli.output import print_json, speed_line, warn
from dspine.cli.session import open_engine, open_session, read_request
from dspine.engine.events import Event, Finish, Step, TokenLogprob
from dspine.errors import UsageError

if TYPE_CHECKING:
    from dspine.engine.engine import Engine


@settings_command("run", click.Argument(["prompt_argument"], required=False, metavar="[PROMPT]"))
def command(options: Options, prompt_argument: str | None) -> int:
    """Answer PROMPT with the target; a drafter makes it faster without changing the text."""
    if options.switch("plain") and options.switch("compare"):
        raise UsageError("--plain and --compare exclude each other: --compare runs both ways")
    request = read_request(options, prompt_argument, sys.stdin)
    file = options.path("session")
    with open_engine(options) as engine, cancel_on_interrupt() as cancel:
        for notice in engine.notices:
            warn(notice)
        if options.switch("compare"):
            comparison = engine.compare(
                request.prompt,
                raw=request.raw,
                **request.answer.arguments(),
                cancel=cancel,
                on_start=None if options.switch("json") else announce,
            )
            return print_comparison(comparison, as_json=options.switch("json"))
        limits: dict[str, Any] = {
            **request.answer.arguments(),
            "logprobs": request.logprobs,
            "plain": options.switch("plain"),
            "cache_prompt": not options.switch("no_cache_prompt"),
            "cancel": cancel,
        }
        session = None
        if file is None:
            events = engine.generate(request.prompt, raw=request.raw, **limits)
        else:
            session = open_session(engine, file, options.text("system"))
            events = session.ask(request.text, **limits)
        if options.switch("json"):
            code = print_answer(events, about(engine), engine.tokenizer.piece)
        else:
            code = stream(events, may_draft=engine.proposer != "none" and not limits["plain"])
        if session is not None and file is not None:
            session.save(file, overwrite=True)
        return code


def announce(way: str) -> None:
    """Which of the two answers is being made: neither is shown before both are."""
    click.echo(f"{way} ...", err=True)


def about(engine: Engine) -> dict[str, Any]:
    """Which files answered."""
    return {
        "model": str(engine.model_path),
        "drafter": None if engine.drafter_path is None else str(engine.drafter_path),
        "proposer": engine.proposer,
    }


def stream(events: Iterable[Event], *, may_draft: bool = False) -> int:
    """Write text the moment it is certain, then the line of speed; returns the exit code."""
    finish = None
    for event in events:
        if isinstance(event, Step) and event.text:
            click.echo(event.text, nl=False)
        elif isinstance(event, Finish):
            finish = event
    click.echo()
    if finish is not None:
        click.echo(speed_line(finish.stats, may_draft=may_draft), err=True)
    return exit_code(finish)


def print_answer(
    events: Iterable[Event], source: dict[str, Any], piece: Callable[[int], bytes]
) -> int:
    """The whole answer as one document; returns the exit code."""
    text, tokens, finish = "", list[int](), None
    logprobs: list[dict[str, Any]] | None = None
    for event in events:
        if isinstance(event, Step):
            text += event.text
            tokens.extend(event.tokens)
            if event.logprobs is not None:
                logprobs = logprobs or []
                logprobs.extend(token_logprob(noted, piece) for noted in event.logprobs)
        elif isinstance(event, Finish):
            finish = event
    document = {**source, "text": text, "tokens": tokens}
    if logprobs is not None:
        document["logprobs"] = logprobs
    if finish is not None:
        document |= {"finish_reason": finish.reason, "stats": finish.stats.to_json()}
    print_json(document)
    return exit_code(finish)


def token_logprob(noted: TokenLogprob, piece: Callable[[int], bytes]) -> dict[str, Any]:
    """With the texts of the tokens; U+FFFD stands for part of a character."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = piece(token).decode("utf-8", "replace")
        return {"token": token, "text": text, "logprob": logprob}

    best = [entry(token, logprob) for token, logprob in noted.top]
    return {**entry(noted.token, noted.logprob), "top": best}


def exit_code(finish: Finish | None) -> int:
    """An answer that was broken off keeps its text and says so with the shell's own number."""
    return INTERRUPTED if finish is None or finish.reason == "cancelled" else 0
