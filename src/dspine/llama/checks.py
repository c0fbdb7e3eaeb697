"""Checks of plain arguments that several objects share."""

from __future__ import annotations

from dspine.errors import UsageError


def require_count(name: str, value: object, least: int = 1) -> None:
    """UsageError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}: it must be a whole number of at least {least}")
