"""Runs the application on a socket until a signal, or an engine that failed, ends it."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

import uvicorn

from dspine.server.app import Service, make_app
from dspine.server.routes import routes

LAST_WORDS_SECONDS = 5
"""For the ends of answers that were broken off, and for clients that do not listen."""


class Running:
    """One server. SIGTERM and Ctrl-C end it in order from the moment it is entered, before it runs
    too.

    Uvicorn's own way sends itself the signal again at the end, and breaks off the streams.
    """

    def __init__(self, made: Service) -> None:
        self._thread = made.thread
        self._drain_seconds = made.options.drain_seconds
        config = uvicorn.Config(
            make_app(made, routes()),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(self._drain_seconds) + LAST_WORDS_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = _leaves_signals  # type: ignore[method-assign]
        made.thread.on_failure = self._give_up

    def __enter__(self) -> Self:
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._stop) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, listener: socket.socket) -> None:
        """Serve until the end."""
        self._server.run(sockets=[listener])

    def _stop(self, number: int, frame: FrameType | None) -> None:
        # Answers end at the limit, with their last chunks.
        drain = threading.Thread(target=self._thread.stop, args=(self._drain_seconds,), daemon=True)
        drain.start()
        self._server.handle_exit(number, frame)

    def _give_up(self) -> None:
        """Nothing is left to wait for: all who asked were told."""
        self._server.config.timeout_graceful_shutdown = LAST_WORDS_SECONDS
        self._server.should_exit = True


@contextmanager
def _leaves_signals() -> Iterator[None]:
    yield
