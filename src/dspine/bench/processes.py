"""Starts the process of a configuration and talks to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dspine.bench.configuration import Configuration
from dspine.errors import LibraryError, UsageError


class Answerer(Protocol):
    """Answers requests in one configuration."""

    facts: Mapping[str, Any]
    """What the configuration turned out to be on this machine."""

    def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The replies to requests that are made at once; raises DspineError with what the
        configuration says."""

    def close(self) -> None:
        """End it; its memory is free afterwards."""


class WorkerProcess:
    """A configuration in a process of its own (`dspine.bench.worker`)."""

    def __init__(self, configuration: Configuration) -> None:
        """Start it and wait until it is loaded; raises its own error in one sentence."""
        self._name = configuration.name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dspine.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, **configuration.environment},
            # Ctrl-C is for the parent, which ends its children in order.
            start_new_session=True,
        )
        try:
            self.facts: Mapping[str, Any] = self._ask(dict(configuration.options))
        except BaseException:
            self.close()
            raise

    def answer(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = self._ask(requests)["answers"]
        return replies

    def _ask(self, row: object) -> dict[str, Any]:
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None and replies is not None
        try:
            requests.write(json.dumps(row) + "\n")
            requests.flush()
            line = replies.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise LibraryError(
                f"the process of configuration {self._name!r} {ended}: measure without it, or "
                f"look at it with `dspine doctor`"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            kind = LibraryError if reply["exit_code"] == LibraryError.exit_code else UsageError
            raise kind(f"configuration {self._name!r}: {reply['error']}")
        return reply

    def close(self) -> None:
        requests, replies = self._process.stdin, self._process.stdout
        self._process.kill()  # nothing of it is worth waiting for
        self._process.wait()
        for stream in (requests, replies):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue
