"""Every option once. The command line, the flag table in the docs and the server read this list."""

from __future__ import annotations

from dspine.settings.answering import ANSWER_SETTINGS
from dspine.settings.data import DATA_SETTINGS
from dspine.settings.fit import FIT_SETTINGS
from dspine.settings.measuring import MEASURING_SETTINGS
from dspine.settings.planning import PLANNING_SETTINGS, shared
from dspine.settings.running import LIBRARY_SETTINGS, RUN_SETTINGS
from dspine.settings.sampling import SAMPLING_SETTINGS
from dspine.settings.serving import SERVING_SETTINGS
from dspine.settings.setting import Setting, Value, resolve

__all__ = ["SETTINGS", "Setting", "Value", "resolve", "settings_of"]

SETTINGS: tuple[Setting, ...] = (
    *map(shared, (*RUN_SETTINGS, *ANSWER_SETTINGS, *LIBRARY_SETTINGS)),
    *SAMPLING_SETTINGS,
    *DATA_SETTINGS,
    *FIT_SETTINGS,
    *MEASURING_SETTINGS,
    *SERVING_SETTINGS,
    *PLANNING_SETTINGS,
)


def settings_of(command: str) -> tuple[Setting, ...]:
    """The settings of one command, in the order of its help."""
    return tuple(setting.of(command) for setting in SETTINGS if command in setting.commands)
