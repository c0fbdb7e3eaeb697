"""`dspine train`: the steps from a target to a drafter, each its own command."""

from __future__ import annotations

import click

from dspine.cli import (
    train_answers,
    train_eval,
    train_features,
    train_fit,
    train_ngram,
    train_prompts,
)

command = click.Group(
    "train", help="Make a drafter for a target: prompts, answers, features, then fit, and eval."
)
for step in (train_prompts, train_answers, train_features, train_ngram, train_fit, train_eval):
    command.add_command(step.command)
