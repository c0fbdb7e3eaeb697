"""`dspine train`: the steps from a target to a drafter, each its own command."""

from __future__ import annotations

import click

from dspine.cli import train_fit

command = click.Group(
    "train", help="Make a drafter for a target: answers, then features, fit, and eval."
)
command.add_command(train_fit.command)
