"""`dspine compare`: what differs between two results, and whether it is more than chance."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from dspine.cli.measuring import print_table
from dspine.cli.options import Options, settings_command
from dspine.cli.output import print_json, warn


@settings_command(
    "compare",
    click.Argument(["first"], metavar="A.json", type=click.Path(path_type=Path)),
    click.Argument(["second"], metavar="B.json", type=click.Path(path_type=Path)),
)
def command(options: Options, first: Path, second: Path) -> None:
    """Compare two results of `dspine bench` or `dspine eval` on the prompts they share."""
    from dspine.bench.result import read_result
    from dspine.bench.significance import compare_results
    from dspine.bench.tables import changes_table

    results = [read_result(path) for path in (first, second)]
    for path, result in zip((first, second), results, strict=True):
        if not result.is_complete:
            warn(f"{path} is of a run that was broken off")
    changes = compare_results(*results)
    if options.switch("json"):
        rows = [{**asdict(one), "significant": one.is_significant} for one in changes]
        print_json({"changes": rows})
    elif options.switch("md"):
        click.echo(changes_table(changes).markdown())
    else:
        print_table(changes_table(changes))
