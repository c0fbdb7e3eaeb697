"""The `dspine` program: its commands, and how every error becomes one line and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from functools import cache

import click

from dspine.cli import INTERRUPTED
from dspine.cli.other_flags import instead_of
from dspine.errors import DspineError

TRAINING_MODULES = ("torch", "safetensors")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="dspine", message="dspine %(version)s")
def cli() -> None:
    """Make a local model answer faster without changing what it says."""


@cache
def add_commands() -> None:
    """Give `cli` its commands. Not when this module is imported: importing them takes a moment,
    in which Ctrl-C is to end the program as quietly as later.
    """
    from dspine.cli import (
        bench,
        chat,
        compare_results,
        convert,
        doctor,
        evaluate,
        export,
        inspect,
        plan,
        quantize,
        run,
        serve,
        tokenizer,
        train,
    )

    for module in (
        run,
        chat,
        serve,
        plan,
        bench,
        evaluate,
        compare_results,
        doctor,
        inspect,
        convert,
        export,
        quantize,
        tokenizer,
        train,
    ):
        cli.add_command(module.command)


def main() -> None:
    try:
        code = run_cli(sys.argv[1:])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the work is done: leave quietly
    except KeyboardInterrupt:  # a second one, while the first was being handled
        code = INTERRUPTED
    sys.exit(code)


def run_cli(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors are printed here and nowhere else."""
    try:
        add_commands()
        code = cli.main(list(arguments), prog_name="dspine", standalone_mode=False)
    except click.Abort:  # click makes this of Ctrl-C and has ended the line already
        return INTERRUPTED
    except click.ClickException as error:
        return complain(usage_sentence(error), error.exit_code)
    except DspineError as error:
        return complain(str(error), error.exit_code)
    except Exception as error:  # noqa: BLE001 - the last barrier before the user
        if os.environ.get("DSPINE_DEBUG"):
            traceback.print_exc()
        return complain(explain(error), 1)
    return code if isinstance(code, int) else 0


def explain(error: Exception) -> str:
    """One sentence for an error that nobody raised on purpose."""
    if isinstance(error, ModuleNotFoundError) and error.name in TRAINING_MODULES:
        return (
            f"training needs {error.name}, which is not installed: run "
            f"`pip install 'dspine[train]'`, in a clone `pip install -e '.[train]'`"
        )
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"cannot use {error.filename}: {error.strerror}"
    return (
        f"something went wrong inside dspine ({type(error).__name__}: {error}); "
        f"run again with DSPINE_DEBUG=1 to see where"
    )


def complain(sentence: str, code: int) -> int:
    click.echo(f"dspine: {' '.join(sentence.split())}", err=True)
    return code


def usage_sentence(error: click.ClickException) -> str:
    if isinstance(error, click.NoSuchOption):
        answer = instead_of(error.option_name)
        if answer is not None:
            return answer
    message = error.format_message().rstrip(".")
    message = message.replace(". Did you mean ", ": did you mean ")
    message = message.replace(". (Did you mean ", " (did you mean ")
    if message.endswith("?"):
        return message
    context = getattr(error, "ctx", None)
    return f"{message}; see `{context.command_path} --help`" if context else message
