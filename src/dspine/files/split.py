"""Names of the parts of a model that was split into files."""

from __future__ import annotations

import re

_SPLIT_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")


def split_names(name: str) -> tuple[str, ...]:
    """The names of all parts of the model whose part or only file is called `name`, in order."""
    match = _SPLIT_NAME.match(name)
    if match is None or not 1 < int(match["count"]) < 10000:
        return (name,)
    count = int(match["count"])
    return tuple(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1))
