"""What one option is: flags, type, default, variable, help, and how text becomes its value.

A flag wins over its environment variable, which wins over the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from dspine.errors import UsageError

Kind = Literal["path", "int", "float", "text", "choice", "switch", "list"]
Value: TypeAlias = Path | int | float | str | bool | tuple[str, ...] | None

TRUE_WORDS = ("1", "on", "true", "yes", "enabled")
FALSE_WORDS = ("0", "off", "false", "no", "disabled", "")


@dataclass(frozen=True, slots=True)
class Variant:
    """What one command says of an option that several share."""

    help: str
    default_text: str | None = None
    """None: as for the others."""
    default: Value = None
    """None: as for the others."""
    least: float | None = None
    """None: as for the others."""
    group: str = ""
    """Where its help stands; empty: as for the others."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One option. `name` is its long flag with underscores, and the end of its variable."""

    name: str
    flags: tuple[str, ...]
    kind: Kind
    default: Value
    group: str
    help: str
    commands: tuple[str, ...]
    choices: tuple[str, ...] = ()
    least: float | None = None
    placeholder: str = ""
    default_text: str = ""
    """What the default means, where the bare value would not tell."""
    variants: Mapping[str, Variant] = field(default_factory=dict)
    """Commands for which it means something else in part."""
    in_environment: bool = True
    """False for what belongs to one call alone, such as the prompt."""
    separator: str = ""
    """Between the values of a list in one text; empty where a value may be any text."""

    def of(self, command: str) -> Setting:
        """The setting as this command understands it."""
        variant = self.variants.get(command)
        if variant is None:
            return self
        text = self.default_text if variant.default_text is None else variant.default_text
        return replace(
            self,
            help=variant.help,
            default_text=text,
            default=self.default if variant.default is None else variant.default,
            least=self.least if variant.least is None else variant.least,
            group=variant.group or self.group,
            variants={},
        )

    @property
    def env(self) -> str | None:
        return f"DSPINE_{self.name.upper()}" if self.in_environment else None

    @property
    def shown_default(self) -> str:
        if self.default_text:
            return self.default_text
        if self.kind == "switch":
            return "on" if self.default else "off"
        return "" if self.default in (None, ()) else str(self.default)

    def parse(self, text: str, origin: str) -> Value:
        """Turn `text` from `origin` (a flag or a variable, named in the error) into a value."""
        match self.kind:
            case "switch":
                return self._parse_switch(text, origin)
            case "choice":
                if text.lower() not in self.choices:
                    raise UsageError(f"{origin} is {text!r}: choose one of {_listed(self.choices)}")
                return text.lower()
            case "int" | "float":
                return self._parse_number(text, origin)
            case "path":
                if not text:
                    raise UsageError(f"{origin} is empty: give a file or folder")
                return Path(text).expanduser()
            case "list":
                return self._parse_list(text)
            case "text":
                return text

    def _parse_switch(self, text: str, origin: str) -> bool:
        if text.lower() in TRUE_WORDS:
            return True
        if text.lower() in FALSE_WORDS:
            return False
        raise UsageError(f"{origin} is {text!r}: use on or off (also 1, 0, true, false)")

    def _parse_list(self, text: str) -> tuple[str, ...]:
        if not self.separator:
            return (text,)
        parts = (part.strip() for part in text.split(self.separator))
        return tuple(part for part in parts if part)

    def _parse_number(self, text: str, origin: str) -> int | float:
        wanted = "a whole number" if self.kind == "int" else "a number"
        try:
            number = int(text) if self.kind == "int" else float(text)
        except ValueError:
            raise UsageError(f"{origin} is {text!r}: it must be {wanted}") from None
        # `not >=` rather than `<`, so that nan is refused as well.
        if self.least is not None and not number >= self.least:
            raise UsageError(f"{origin} is {text}: it must be at least {self.least:g}")
        return number


def resolve(
    setting: Setting, given: str | None, flag: str, environment: Mapping[str, str]
) -> Value:
    """The value of `setting`: the flag's text, else its variable's, else the default."""
    if given is not None:
        return setting.parse(given, flag)
    if setting.env is not None and setting.env in environment:
        return setting.parse(environment[setting.env], f"the variable {setting.env}")
    return setting.default


def _listed(words: tuple[str, ...]) -> str:
    return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]
