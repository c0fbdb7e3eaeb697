"""`dspine train ngram`: a table of likely next tokens, counted in answer files."""

from __future__ import annotations

import click

from dspine.cli.options import Options, required_path, settings_command
from dspine.cli.output import size
from dspine.default_pair import default_target
from dspine.errors import UsageError


@settings_command("train ngram")
def command(options: Options) -> None:
    """Count which tokens follow one another in answers; the drafts of it cost nothing."""
    output = required_path(options, "output", "-o NAME.ngram.npz")
    answers = options.paths("answers")
    if not answers:
        raise UsageError("no answer file: name one or several with --answers FILE")
    from dspine.engine.ngram_table import build_table
    from dspine.files.pairing import describe_target
    from dspine.train.records import read_records

    vocab_size = describe_target(options.path("model") or default_target()).vocab_size
    records = read_records(answers, vocab_size=vocab_size)
    table = build_table(
        (record.answer for record in records), max_entries=options.positive("max_entries")
    )
    table.save(output)
    click.echo(f"{output}: {len(table)} entries, {size(output.stat().st_size)}")
