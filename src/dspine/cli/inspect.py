"""`dspine inspect`: what a model or drafter file is, without loading it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dspine.cli.options import Options, settings_command
from dspine.cli.output import print_json, size


@settings_command("inspect", click.Argument(["file"], type=click.Path(path_type=Path)))
def command(options: Options, file: Path) -> None:
    """Tell what FILE is (a GGUF, a safetensors file or a checkpoint folder), without loading it.

    What it is, its sizes, which target a drafter is for, and what dspine does with it. Of drafters
    in a foreign layout the names are shown beside those that ours would have.
    """
    from dspine.files.hub import local_file
    from dspine.files.inspect import inspect_path

    facts = with_outlook(inspect_path(local_file(file)))
    if options.switch("json"):
        print_json(facts)
        return
    for line in outline(facts):
        click.echo(line)


def with_outlook(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts of a target, and what dspine would do with it."""
    if facts["role"] != "target":
        return facts
    from dspine.engine.outlook import target_outlook
    from dspine.plan.presets import published_for

    outlook = target_outlook(
        facts["architecture"],
        is_recurrent=facts["geometry"]["recurrent"],
        layers=facts["geometry"]["layers"],
        bytes_by_type={name: row["bytes"] for name, row in facts["tensors"]["by_type"].items()},
    )
    geometry = facts["geometry"]
    outlook["drafters"] = list(
        published_for(
            facts["architecture"],
            geometry.get("embedding_length", 0),
            geometry["layers"],
            facts["pair"]["vocab_size"],
        )
    ) or ["none known for these sizes: `dspine train` makes one"]
    first = ("path", "format", "kind", "role", "note", "name", "architecture")
    rest = {name: value for name, value in facts.items() if name not in first}
    return {**{name: facts[name] for name in first}, "dspine": outlook, **rest}


def outline(facts: Mapping[str, object], depth: int = 0) -> Iterator[str]:
    """Facts as indented lines; empty ones are left out."""
    indent = "  " * depth
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        if value is None or value == "" or value == {} or value == []:
            continue
        if isinstance(value, Mapping) and is_table(value):
            rows = [{name: key, **row} for key, row in value.items()]
            yield from (f"{indent}{line}" for line in columns(rows))
        elif isinstance(value, Mapping):
            yield f"{indent}{printable(name)}"
            yield from outline({str(key): part for key, part in value.items()}, depth + 1)
        elif isinstance(value, list) and isinstance(value[0], Mapping):
            yield f"{indent}{printable(name)}"
            yield from (f"{indent}  {line}" for line in columns(value))
        else:
            yield f"{indent}{printable(name):<{width}}  {shown(value)}"


def is_table(value: Mapping[str, Any]) -> bool:
    """Whether the parts are rows with the same fields, each of one value."""
    parts = list(value.values())
    return all(
        isinstance(part, Mapping)
        and part.keys() == parts[0].keys()
        and not any(isinstance(field, Mapping | list) for field in part.values())
        for part in parts
    )


def columns(rows: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """Rows of the same fields under their names."""
    cells = [list(rows[0]), *([cell(*item) for item in row.items()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield "  ".join(padded).rstrip()


def cell(name: str, value: object) -> str:
    return size(value) if name == "bytes" and isinstance(value, int) else shown(value)


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(shown(part) for part in value)
    return printable(str(value))


def printable(text: str) -> str:
    """Texts come from files of strangers: nothing in them may steer the terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)
