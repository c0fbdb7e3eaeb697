"""Typed reading of config.json: a value is there and of its type, or FileError names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspine.errors import FileError


def either(key: str, values: Mapping[str, Any], dflash: Mapping[str, Any]) -> Any:
    """A key that may stand at the top or in dflash_config; both must agree."""
    stated = [table[key] for table in (values, dflash) if table.get(key) is not None]
    if not stated:
        raise FileError(
            f"{key} is missing, at the top level and in dflash_config: copy or download the "
            "folder again"
        )
    if any(value != stated[0] for value in stated):
        raise FileError(
            f"{key} is stated twice and differently: {stated[0]!r} and {stated[1]!r}; keep the "
            "right one"
        )
    return stated[0]


def required(values: Mapping[str, Any], key: str) -> Any:
    """A key that must be there."""
    if values.get(key) is None:
        raise FileError(
            f"{key} is missing: the configuration is incomplete, copy or download the folder again"
        )
    return values[key]


def subtable(values: Mapping[str, Any], key: str, *, required: bool = True) -> Mapping[str, Any]:
    """A table below a key; empty where it is missing and not required."""
    table = values.get(key)
    if table is None and not required:
        return {}
    if not isinstance(table, dict):
        raise FileError(f"{key} is {table!r}, expected a table: this is no complete drafter")
    return table


def refuse_unknown(name: str, table: Mapping[str, Any], known: set[str] | frozenset[str]) -> None:
    """Raise FileError for keys of a table that are not among the known ones."""
    unknown = sorted(set(table) - known)
    if unknown:
        raise FileError(
            f"{name} has keys that this dspine does not know: {', '.join(unknown[:5])}; running "
            "without them would be wrong, so update dspine or remove what this drafter does not "
            "need"
        )


def whole(name: str, value: object) -> int:
    """A whole number, not a truth value."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise FileError(f"{name} is {value!r}, expected a whole number")
    return value


def number(name: str, value: object) -> float:
    """A number as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FileError(f"{name} is {value!r}, expected a number")
    try:
        return float(value)
    except OverflowError as error:
        raise FileError(
            f"{name} is too large for a number: copy or download the folder again"
        ) from error
