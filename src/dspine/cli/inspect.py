"""`dspine inspect`: what a model or drafter file is, without loading it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from dspine.cli.options import Options, settings_command
from dspine.cli.output import print_json


@settings_command("inspect", click.Argument(["file"], type=click.Path(path_type=Path)))
def command(options: Options, file: Path) -> None:
    """Tell what FILE is: a GGUF, a safetensors file or a checkpoint folder."""
    from dspine.files.inspect import inspect_path

    facts = inspect_path(file)
    if options.switch("json"):
        print_json(facts)
        return
    for line in outline(facts):
        click.echo(line)


def outline(facts: Mapping[str, object], depth: int = 0) -> Iterator[str]:
    """Facts as indented lines; empty ones are left out."""
    indent = "  " * depth
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        if value is None or value == "" or value == {} or value == []:
            continue
        if isinstance(value, Mapping):
            yield f"{indent}{printable(name)}"
            yield from outline({str(key): part for key, part in value.items()}, depth + 1)
        else:
            yield f"{indent}{printable(name):<{width}}  {shown(value)}"


def shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(shown(part) for part in value)
    return printable(str(value))


def printable(text: str) -> str:
    """Texts come from files of strangers: nothing in them may steer the terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)
