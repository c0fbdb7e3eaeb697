"""Checks of plain arguments that several objects share."""

from __future__ import annotations

import math

from dspine.errors import UsageError


def require_count(name: str, value: object, least: int = 1) -> None:
    """UsageError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}: it must be a whole number of at least {least}")


def require_number(
    name: str, value: object, *, least: float = -math.inf, most: float = math.inf
) -> None:
    """UsageError unless `value` is a finite number between `least` and `most`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not least <= value <= most
    ):
        bounds = f" of at least {least:g}" if least > -math.inf else ""
        bounds = f" between {least:g} and {most:g}" if most < math.inf else bounds
        raise UsageError(f"{name} is {value!r}: it must be a number{bounds}")
