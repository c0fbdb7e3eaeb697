"""Turns settings into click options, and their parsed values into one typed object."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from dspine.cli.other_flags import instead_of
from dspine.errors import UsageError
from dspine.settings import Setting, Value, resolve, settings_of

EARLIER_NAMES = dict.fromkeys(("--draft", "--draft-n", "--draft-max"), "--spec-draft-n-max")
"""Flags as llama.cpp called them before."""


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of one command line, by name; asking for the wrong type is a TypeError."""

    values: Mapping[str, Value]

    def path(self, name: str) -> Path | None:
        value = self.values[name]
        if value is None or isinstance(value, Path):
            return value
        raise TypeError(f"{name} is not a path")

    def number(self, name: str) -> int:
        value = self.values[name]
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise TypeError(f"{name} is not a whole number")

    def positive(self, name: str) -> int | None:
        """A whole number whose 0 (or -1) stands for a default chosen elsewhere."""
        value = self.number(name)
        return value if value > 0 else None

    def real(self, name: str) -> float:
        value = self.values[name]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise TypeError(f"{name} is not a number")

    def paths(self, name: str) -> tuple[Path, ...]:
        return tuple(Path(text).expanduser() for text in self.texts(name))

    def text(self, name: str) -> str | None:
        value = self.values[name]
        if value is None or isinstance(value, str):
            return value
        raise TypeError(f"{name} is not a text")

    def choice(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise TypeError(f"{name} has no value")
        return value

    def switch(self, name: str) -> bool:
        value = self.values[name]
        if isinstance(value, bool):
            return value
        raise TypeError(f"{name} is not a switch")

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.values[name]
        if isinstance(value, tuple):
            return value
        raise TypeError(f"{name} is not a list")


def whole_numbers(options: Options, name: str) -> tuple[int, ...] | None:
    """Numbers from a text such as 1,8,15; None when nothing was given."""
    text = options.text(name)
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        flag = "--" + name.replace("_", "-")
        raise UsageError(f"{flag} is {text!r}: give whole numbers, as in 1,8,15") from None


def required_path(options: Options, name: str, example: str) -> Path:
    path = options.path(name)
    if path is None:
        raise UsageError(f"no {name} is given: name it with {example}")
    return path


def own_weights(options: Options) -> str | None:
    """Weight type of the target's copy for a long job, None for its own file."""
    weights = options.choice("weights")
    return None if weights == "own" else weights


def present_names(arguments: Sequence[str], with_value: Collection[str]) -> list[str]:
    """The arguments of a command with today's names for flags that llama.cpp has renamed.

    What follows a flag of `with_value` is its value, a prompt for example, and stays as it is.
    Raises UsageError for short flags that dspine does not have: -ctkd would else be -c with a
    value.
    """
    found: list[str] = []
    is_value = False
    for place, argument in enumerate(arguments):
        if argument == "--" and not is_value:
            return [*found, *arguments[place:]]
        name, equals, value = argument.partition("=")
        answer = None if is_value or name.startswith("--") else instead_of(name)
        if answer is not None:
            raise UsageError(answer)
        if name in EARLIER_NAMES and not is_value:
            present = EARLIER_NAMES[name]
            click.echo(f"dspine: {name} is called {present} now", err=True)
            argument = present + equals + value
        is_value = not is_value and argument in with_value
        found.append(argument)
    return found


class SettingsCommand(click.Command):
    """A command whose help shows its settings under their groups, and that knows flags by the
    names which they had earlier.
    """

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        options = [one for one in self.params if isinstance(one, click.Option)]
        with_value = {name for one in options if not one.is_flag for name in one.opts}
        return super().parse_args(context, present_names(args, with_value))

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None:
                group = getattr(parameter, "group", "Options")
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


class SettingOption(click.Option):
    """A click option made from a Setting: text in, resolved value out."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.group = setting.group
        extra: dict[str, Any] = {}
        if setting.kind == "switch":
            extra = {"is_flag": True, "flag_value": "on"}
        elif setting.kind == "list":
            extra = {"multiple": True}
        super().__init__(
            [setting.name, *setting.flags],
            type=click.STRING,
            default=None,
            metavar=None if setting.kind == "switch" else placeholder(setting),
            help=help_text(setting),
            callback=self._resolve,
            **extra,
        )

    def _resolve(self, _context: click.Context, _parameter: click.Parameter, given: Any) -> Value:
        flag = "/".join(self.setting.flags[:2])
        if self.setting.kind == "list" and given:
            return tuple(part for text in given for part in self._listed(text, flag))
        text = given if isinstance(given, str) else None
        return resolve(self.setting, text, flag, os.environ)

    def _listed(self, text: str, flag: str) -> tuple[str, ...]:
        parts = self.setting.parse(text, flag)
        assert isinstance(parts, tuple)
        return parts


def placeholder(setting: Setting) -> str:
    return setting.placeholder or "|".join(setting.choices)


def help_text(setting: Setting) -> str:
    shown = setting.shown_default
    return f"{setting.help}  [{shown}]" if shown and setting.kind != "switch" else setting.help


def settings_command(
    name: str, *arguments: click.Parameter
) -> Callable[[Callable[..., int | None]], click.Command]:
    """Make a command of `function(options, **arguments)` with all the settings of `name`."""
    settings = settings_of(name)

    def decorate(function: Callable[..., int | None]) -> click.Command:
        def call(**values: Any) -> int | None:
            chosen = {setting.name: values.pop(setting.name) for setting in settings}
            return function(Options(chosen), **values)

        return SettingsCommand(
            name.rpartition(" ")[2],
            callback=call,
            params=[*arguments, *(SettingOption(setting) for setting in settings)],
            help=function.__doc__,
            short_help=(function.__doc__ or "").strip().partition("\n")[0],
        )

    return decorate
