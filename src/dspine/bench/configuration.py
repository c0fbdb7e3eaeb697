"""What is compared: a way to decode (plain, n-gram, drafter, auto) with options, from a text.

`dspine,draft=3,ctk=q8_0` is the drafter alone at 3 drafts with a quantised key cache;
`draft=1/3/7` makes one configuration of each value.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspine.errors import UsageError
from dspine.ggml.kernels import FAMILIES

WAYS: Mapping[str, str] = {
    "plain": "none",
    "ngram": "ngram",
    "drafter": "dspine",
    "dspine": "dspine",
    "dflash": "dspine",
    "dflash2": "dspine",
    "auto": "auto",
}
"""Name in a configuration -> proposer of `dspine.load`. The kinds of drafter are one proposer:
the file given with md says which it is."""

_KEYS: Mapping[str, tuple[str, str]] = {
    "m": ("model", "text"),
    "md": ("drafter", "text"),
    "draft": ("spec_draft_n_max", "count"),
    "c": ("n_ctx", "count"),
    "t": ("n_threads", "count"),
    "b": ("n_batch", "count"),
    "ngl": ("n_gpu_layers", "number"),
    "fa": ("flash_attention", "flash"),
    "ctk": ("cache_type_k", "text"),
    "ctv": ("cache_type_v", "text"),
    "rollback": ("rollback", "text"),
    "match": ("ngram_min_match", "count"),
}
"""Short name -> option of `dspine.load` and how its text is read."""
_FLASH: Mapping[str, bool | None] = {"on": True, "off": False, "auto": None}
_PLAIN_ONLY_OFF = ("draft", "match")


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to answer: options of `dspine.load`, and variables of its process."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        return self.options.get("proposer") == "none"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "options": dict(self.options),
            "environment": dict(self.environment),
        }


def parse_configurations(
    texts: Sequence[str], common: Mapping[str, Any], *, has_drafter: bool
) -> list[Configuration]:
    """All configurations of some texts; `common` holds for each that does not say otherwise.

    Without texts: plain, n-gram and, with a drafter, the drafter alone and auto. Raises UsageError
    for an unknown word, with the known ones, and for two configurations of one name.
    """
    if not texts:
        texts = ["plain", "ngram", *(["dspine", "auto"] if has_drafter else [])]
    found = [one for text in texts for one in _parse(text, common)]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two configurations are called {name!r}: give one another name with name=TEXT"
            )
    return found


def _parse(text: str, common: Mapping[str, Any]) -> list[Configuration]:
    way, *words = [part.strip() for part in text.split(",")]
    if way not in WAYS:
        raise UsageError(
            f"configuration {text!r} begins with {way!r}: begin with one of {', '.join(WAYS)}"
        )
    choices: list[tuple[str, list[str]]] = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value or key not in {*_KEYS, "name", "kernels"}:
            raise UsageError(
                f"configuration {text!r} has {word!r}: give KEY=VALUE with one of "
                f"{', '.join((*_KEYS, 'kernels', 'name'))}"
            )
        if way == "plain" and key in _PLAIN_ONLY_OFF:
            raise UsageError(f"configuration {text!r} is plain and has {word!r}: leave it out")
        whole = key in ("m", "md", "name")
        choices.append((key, [value] if whole else value.split("/")))
    made = []
    for values in itertools.product(*(options for _, options in choices)):
        pairs = list(zip((key for key, _ in choices), values, strict=True))
        made.append(_configuration(text, way, pairs, common))
    return made


def _configuration(
    text: str, way: str, pairs: Sequence[tuple[str, str]], common: Mapping[str, Any]
) -> Configuration:
    options: dict[str, Any] = {**common, "proposer": WAYS[way]}
    environment: dict[str, str] = {}
    name = ",".join([way, *(f"{key}={value}" for key, value in pairs if key not in ("m", "md"))])
    for key, value in pairs:
        if key == "name":
            name = value
        elif key == "kernels":
            if value not in ("on", "off", *FAMILIES):
                raise UsageError(
                    f"configuration {text!r}: kernels is {value!r}, use on or off, or one of "
                    f"{', '.join(FAMILIES)}"
                )
            environment["DSPINE_KERNELS"] = value
        else:
            option, kind = _KEYS[key]
            options[option] = _value(text, key, value, kind)
    if way == "plain":
        options.pop("spec_draft_n_max", None)
    return Configuration(name, options, environment)


def _value(text: str, key: str, value: str, kind: str) -> Any:
    if kind == "text":
        return value
    if kind == "flash":
        if value not in _FLASH:
            raise UsageError(f"configuration {text!r}: {key} is {value!r}, use on, off or auto")
        return _FLASH[value]
    try:
        number = int(value)
    except ValueError:
        number = -2
    if number < (1 if kind == "count" else -1):
        raise UsageError(f"configuration {text!r}: {key} is {value!r}, give a whole number")
    return number
