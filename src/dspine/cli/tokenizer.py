"""`dspine tokenizer export`: the tokenizer of a GGUF as tokenizer.json."""

from __future__ import annotations

from pathlib import Path

import click

from dspine.cli.models import named_file
from dspine.cli.options import Options, settings_command
from dspine.default_pair import choose_pair
from dspine.errors import UsageError

command = click.Group("tokenizer", help="The tokenizer of a target, for other programs.")


@settings_command("tokenizer export")
def export(options: Options) -> None:
    """Write tokenizer.json from a GGUF, for clients that count tokens themselves."""
    from dspine.files.tokenizer_export import write_tokenizer

    model, _ = choose_pair(named_file(options, "model", "hf_repo", options.text("hf_file")), None)
    path = options.path("output") or Path("tokenizer.json")
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.parent.is_dir():
        raise UsageError(f"the folder of {path} does not exist: create it first")
    write_tokenizer(model, path, overwrite=options.switch("force"))
    click.echo(f"{path}: the tokenizer of {model.name}")


command.add_command(export)
