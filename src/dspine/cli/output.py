"""How numbers look on a terminal: the line of speed and the lines of a comparison."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import Any, Self

import click

from dspine.engine.stats import Stats


def speed_line(stats: Stats, *, may_draft: bool = False) -> str:
    """One line: tokens and rate, the prompt's rate, and what speculation did.

    `may_draft`: drafts were wanted, so that an answer without any needs a word.
    """
    parts = [
        f"{stats.tokens} tokens in {stats.wall_ms / 1000:.2f} s",
        f"{stats.tokens_per_second:.1f} tokens/s",
        f"prompt {stats.prompt_tokens} at {stats.prompt_tokens_per_second:.0f} tokens/s",
    ]
    if stats.cached_tokens:
        parts[-1] = (
            f"prompt {stats.prompt_tokens - stats.cached_tokens} new at "
            f"{stats.prompt_tokens_per_second:.0f} tokens/s, {stats.cached_tokens} from memory"
        )
    if stats.drafted:
        parts.append(
            f"acceptance length {stats.acceptance_length:.2f} "
            f"({stats.accepted} of {stats.drafted} drafts accepted)"
        )
        parts.extend(
            f"{name} {share.acceptance_length:.2f} in {share.steps} steps"
            for name, share in sorted(stats.proposers.items())
            if name != "none"
        )
    else:
        chosen = may_draft and not stats.disabled_reason
        parts.append("plain, as no draft promised to pay" if chosen else "plain")
    if stats.disabled_reason:
        parts.append(f"drafting off: {stats.disabled_reason}")
    return " · ".join(parts)


def size(n_bytes: int) -> str:
    """A file's size in the unit that leaves one to three digits before the point."""
    amount, unit = float(n_bytes), "bytes"
    for larger in ("kB", "MB", "GB"):
        if amount < 999.95:
            break
        amount, unit = amount / 1000, larger
    return f"{n_bytes} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"


def print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def warn(sentence: str) -> None:
    click.echo(f"dspine: {sentence}", err=True)


class Progress:
    """A percentage on stderr that rewrites its line; silent when stderr is not a terminal."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._shown = False
        self._next = 0.0

    def update(self, done: int, total: int) -> None:
        """At most ten times a second, and always at the end."""
        now = time.monotonic()
        if sys.stderr.isatty() and (now >= self._next or done >= total):
            self._next, self._shown = now + 0.1, True
            click.echo(f"\r{self._label}: {100 * done // max(1, total):3d} %", nl=False, err=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._shown:
            click.echo(err=True)
