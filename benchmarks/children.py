"""Child processes that compute with ggml's kernels or with ours, and answer requests in turn.

Kernels are plugged in once per process, so a benchmark that compares both in one run has one child
of each kind. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dspine.kernels.status import SWITCH

KINDS = ("stock", "dspine")
_SETTLE_SECONDS = 0.02
"""OpenMP threads of a child spin for a few milliseconds after its last answer."""


class Child:
    """`script --child ARGUMENTS` with the kernels of one kind."""

    def __init__(self, kind: str, script: Path, *arguments: str, **environment: str) -> None:
        variables = {**os.environ, **environment}
        variables.pop(SWITCH, None)
        if kind == "stock":
            variables[SWITCH] = "off"
        self.kind = kind
        self._process = subprocess.Popen(
            [sys.executable, str(script), "--child", *arguments],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str, **values: Any) -> Any:
        """The answer of the child's function `what`."""
        self.send(what, **values)
        return self.receive()

    def send(self, what: str, **values: Any) -> None:
        """Ask without waiting: for work whose time does not matter."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"what": what, **values}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """The answer to what was sent."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the {self.kind} child ended with status {self._process.wait()}")
        time.sleep(_SETTLE_SECONDS)
        return json.loads(line)

    def close(self) -> None:
        """End the child."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def serve(functions: dict[str, Callable[..., Any]]) -> None:
    """Answer the parent's requests until it closes the pipe."""
    for line in sys.stdin:
        values = json.loads(line)
        answer = functions[values.pop("what")](**values)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def check_kernels(kind: str, text: str) -> None:
    """Stop where a child does not compute with the kernels it is there for."""
    if text.startswith("stock") != (kind == "stock"):
        raise SystemExit(f"the {kind} child computes with {text}: run python -m dspine.kernels")
