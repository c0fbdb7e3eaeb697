"""Shows how far a long job is and how fast: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0


class JobProgress:
    """Counts units of work (tokens); use it in `with`, writes to stderr.

    The rate is that of this run, without what an earlier run had done.
    """

    def __init__(self, label: str, total: int, *, unit: str = "tokens") -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = 0
        self.started = time.monotonic()
        self._last_line = self.started
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(label, total=total, state="")

    @property
    def seconds(self) -> float:
        """Since the job began."""
        return time.monotonic() - self.started

    @property
    def rate(self) -> float:
        """Units a second."""
        return self.done / max(self.seconds, 1e-9)

    def advance(self, count: int, note: str = "") -> None:
        """`count` more units are done; `note` is shown behind the numbers."""
        self.done += count
        state = f"{self.done:,} of {self.total:,} {self.unit}, {self.rate:,.0f}/s"
        if note:
            state += f", {note}"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, state=state)
            return
        now = time.monotonic()
        if now - self._last_line >= LINE_SECONDS or self.done >= self.total:
            self._last_line = now
            left = max(self.total - self.done, 0) / max(self.rate, 1e-9)
            sys.stderr.write(f"{self.label}: {state}, {left / 60:.0f} min left\n")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
