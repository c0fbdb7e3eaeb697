"""What `/set` changes in a chat: the options of an answer, checked as on the command line."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from dspine.cli.options import Options
from dspine.cli.session import read_answer
from dspine.errors import UsageError
from dspine.settings import Setting, Value, settings_of

NOT_HERE = ("no_history",)
OTHER_NAMES = {
    "temperature": "temp",
    "max_tokens": "predict",
    "n": "predict",
    "color": "color_tokens",
}
DEFAULT = "default"


OWN_SETTINGS = (
    Setting(
        name="drafting",
        flags=(),
        kind="switch",
        default=True,
        group="Speed",
        help="Draft tokens; off decodes plainly.",
        commands=(),
    ),
    Setting(
        name="width",
        flags=(),
        kind="int",
        default=0,
        least=0,
        default_text="as the command line says",
        group="Speed",
        help="Rows of a verify at most, the anchor and its drafts, instead of what "
        "--spec-draft-n-max says, up to the drafter's block; 0 is as it was.",
        commands=(),
    ),
)
"""Settings of a chat alone: on the command line they are --plain and --spec-draft-n-max."""


def offered() -> dict[str, Setting]:
    """All that can be set in a chat, by name, in the order of the list."""
    shared = [
        setting
        for setting in settings_of("chat")
        if (setting.group in ("Output", "Sampling") and setting.name not in NOT_HERE)
        or setting.name in ("chat_template_kwargs", "no_cache_prompt")
    ]
    return {setting.name: setting for setting in (*OWN_SETTINGS, *shared)}


class ChatSettings:
    """The values of a chat; a wrong one is refused and the old one stays."""

    def __init__(self, options: Options) -> None:
        """Begins with the command line. Raises UsageError for what cannot be."""
        self._settings = offered()
        self._options = options
        self._values: dict[str, Value] = {"drafting": not options.switch("plain"), "width": 0}
        self.arguments()

    @property
    def color_tokens(self) -> bool:
        return self._all().switch("color_tokens")

    def set(
        self, name: str, text: str, check: Callable[[Mapping[str, Any]], None] = lambda _: None
    ) -> str:
        """Change one value, `default` for that of the program; the new state as a line.

        `check` raises UsageError for arguments that only the model can refuse.
        """
        setting = self._find(name)
        value: Value
        if text == DEFAULT:
            value = setting.default
        elif setting.kind == "list":
            value = _words(setting.name, text)
        else:
            value = setting.parse(text, setting.name)
        before = dict(self._values)
        self._values[setting.name] = value
        try:
            check(self.arguments())
        except UsageError:
            self._values = before
            raise
        return self._line(setting)

    def show(self, name: str) -> str:
        """One value, and what it means."""
        setting = self._find(name)
        return f"{self._line(setting)}  ({setting.help})"

    def lines(self) -> list[str]:
        """All values."""
        return [self._line(setting) for setting in self._settings.values()]

    def arguments(self) -> dict[str, Any]:
        """What `Engine.generate` is asked for."""
        values = self._all()
        width = values.number("width")
        return {
            **read_answer(values).arguments(),
            "plain": not values.switch("drafting"),
            "cache_prompt": not values.switch("no_cache_prompt"),
            "max_drafts": None if width == 0 else width - 1,
        }

    def _all(self) -> Options:
        return Options({**self._options.values, **self._values})

    def _find(self, name: str) -> Setting:
        wanted = name.lstrip("-").replace("-", "_")
        setting = self._settings.get(OTHER_NAMES.get(wanted, wanted))
        if setting is None:
            names = [*self._settings, *OTHER_NAMES]
            near = difflib.get_close_matches(wanted, names, 1)
            hint = f"did you mean {near[0]}?" if near else "/set alone lists them"
            raise UsageError(f"there is no setting {name}: {hint}")
        return setting

    def _line(self, setting: Setting) -> str:
        value = self._all().values[setting.name]
        return f"{setting.name} {_shown(setting, value)}"


def _shown(setting: Setting, value: Value) -> str:
    if value == setting.default and setting.default_text:
        return f"{DEFAULT} ({setting.default_text})"
    match value:
        case None | ():
            return "none"
        case bool():
            return "on" if value else "off"
        case tuple():
            return shlex.join(value)
        case _:
            return str(value)


def _words(name: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:
        raise UsageError(f"{name} is {text!r}: a quotation mark is missing") from None
