"""`dspine serve`: OpenAI's routes and llama-server's in front of one pair."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dspine.cli.models import named_pair
from dspine.cli.options import Options, settings_command
from dspine.cli.output import warn
from dspine.cli.sampling import read_sampling
from dspine.cli.session import open_engine, read_budget, read_variables
from dspine.default_pair import choose_pair
from dspine.errors import UsageError

if TYPE_CHECKING:
    from dspine.engine.engine import Engine
    from dspine.engine.sampling import SamplingOptions
    from dspine.server.engine_thread import EngineThread
    from dspine.server.requests import Defaults

_BIND_REMEDIES = {
    errno.EADDRINUSE: "is a server running there? choose another --port",
    errno.EACCES: "choose a --port from 1024 on",
}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@settings_command("serve")
def command(options: Options) -> int:
    """Answer over HTTP, for everything that speaks to OpenAI's API or llama-server."""
    try:
        from dspine.server.app import ServerOptions, Service
        from dspine.server.running import Running
        from dspine.text.grammar import GrammarOptions
    except ModuleNotFoundError as error:
        raise UsageError(
            f"serving needs {error.name}, which is not installed: run `pip install 'dspine[serve]'`"
        ) from None

    # Everything that may be wrong is found before the port is taken.
    sampling, variables, origins = (
        read_sampling(options),
        read_variables(options.text("chat_template_kwargs")),
        read_origins(options.texts("cors_origin")),
    )
    model, _ = choose_pair(*named_pair(options))
    limit, thoughts = options.number("predict"), read_budget(options)

    def load() -> Engine:
        started = time.perf_counter()
        engine = open_engine(options, parallel=options.number("parallel"))
        for notice in engine.notices:
            warn(notice)
        if options.switch("warmup"):
            logging.getLogger("dspine.load").info("warming up")
            engine.complete("Say hello.", max_tokens=8)
            # The first grammar takes a second, in which nobody else gets tokens.
            engine.complete("Say hello.", max_tokens=1, grammar=GrammarOptions.regex("[a-z]+"))
        seconds = time.perf_counter() - started
        slots = f", {engine.slots} slots of {engine.n_ctx} tokens" if engine.slots > 1 else ""
        click.echo(f"loaded {model.name} in {seconds:.1f} s{slots}", err=True)
        if engine.rollback != "trim":
            click.echo(f"rollback {engine.rollback}: {engine.rollback_reason}", err=True)
        return engine

    def defaults(engine: Engine) -> Defaults:
        return make_defaults(engine, sampling, None if limit < 0 else limit, variables, thoughts)

    made = Service(
        load,
        ServerOptions(
            alias=options.text("alias") or model.name,
            api_key=options.text("api_key") or None,
            queue_limit=options.number("queue"),
            body_limit=options.number("body_limit"),
            cors_origins=origins,
            drain_seconds=float(options.number("drain")),
            logs_prompts=options.switch("log_prompts"),
        ),
        defaults,
    )
    set_up_log()
    tell_stages(made.thread)
    host, port = options.choice("host"), options.number("port")
    with closing(bound_socket(host, port)) as listener, Running(made) as running:
        announce(options, listener)
        running.run(listener)
    end(made.thread)
    return 0


def end(thread: EngineThread) -> None:
    """Say why it ends before its time; raises why the engine failed."""
    if thread.error is not None:
        if thread.has_ended:
            raise thread.error
        leave(str(thread.error), thread.error.exit_code)
    if not thread.was_loaded:
        leave("stopped before the model was loaded", 0)
    if not thread.has_ended:
        leave("stopped before the answers had ended", 0)


def leave(words: str, code: int) -> NoReturn:
    """End the process beside a thread that is still inside the library: an ordinary end would
    take apart what it works with, and crash."""
    click.echo(f"dspine: {words}" if code else words, err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def make_defaults(
    engine: Engine,
    sampling: SamplingOptions,
    max_tokens: int | None,
    variables: Mapping[str, Any],
    max_thoughts: int | None = None,
) -> Defaults:
    """What holds where a request says nothing."""
    from dspine.server.requests import Defaults

    return Defaults(
        sampling=sampling,
        max_tokens=max_tokens,
        variables=variables,
        max_thoughts=max_thoughts,
        template=engine.template_source,
        end_tokens=lambda: engine.end_tokens,
    )


def read_origins(texts: Sequence[str]) -> tuple[str, ...]:
    """Origins as browsers send them; UsageError for what would never match one."""
    for text in texts:
        if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", text.lower()):
            raise UsageError(
                f"--cors-origin is {text!r}: give scheme, host and port alone, as in "
                f"https://chat.example or http://localhost:3000, or * for any"
            )
    return tuple(_without_usual_port(text.lower()) for text in texts)


def _without_usual_port(origin: str) -> str:
    for scheme, port in (("http://", ":80"), ("https://", ":443")):
        if origin.startswith(scheme):
            return origin.removesuffix(port)
    return origin


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; UsageError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as unused:
        try:
            made = unused.enter_context(
                socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            )
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host, port))
            made.listen(128)
        except OverflowError:
            raise UsageError(f"--port is {port}: it must be at most 65535") from None
        except OSError as error:
            remedy = _BIND_REMEDIES.get(
                error.errno or 0, "give an address of this machine with --host"
            )
            reason = f"cannot listen on {address(host, port)} ({error.strerror})"
            raise UsageError(f"{reason}: {remedy}") from None
        unused.pop_all()
    return made


def address(host: str, port: int) -> str:
    """Both as in a URL, where IPv6 stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def announce(options: Options, listener: socket.socket) -> None:
    """Where it listens, and who can reach it."""
    host, port = listener.getsockname()[:2]
    click.echo(f"listening on http://{address(host, port)}", err=True)
    if host in _LOOPBACK:
        click.echo("only this machine can reach it; --host 0.0.0.0 opens it to others", err=True)
    elif not options.text("api_key"):
        warn("every machine that reaches this address may use the model: set --api-key")


class _Lines(logging.Formatter):
    """One JSON object a line: time, level, message; a traceback only where something broke."""

    def format(self, record: logging.LogRecord) -> str:
        row = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["trace"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False)


class _Stages(logging.Handler):
    """Loading, as it goes on: for whoever reads stderr, and for whoever asks for the health."""

    def __init__(self, thread: EngineThread) -> None:
        super().__init__()
        self._thread = thread

    def emit(self, record: logging.LogRecord) -> None:
        self._thread.stage = record.getMessage()
        click.echo(f"loading: {self._thread.stage}", err=True)


def tell_stages(thread: EngineThread) -> None:
    """What loading is at goes to stderr and to `thread`."""
    logger = logging.getLogger("dspine.load")
    logger.handlers = [_Stages(thread)]
    logger.propagate = False
    logger.setLevel(logging.INFO)


def set_up_log() -> None:
    """The server's lines go to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    for name in ("dspine.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(logging.INFO if name == "dspine.server" else logging.WARNING)
