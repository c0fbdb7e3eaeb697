"""Where the prompt of `dspine run` comes from: argument, -p, -f or standard input."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from dspine.errors import FileError, UsageError


def read_prompt(
    argument: str | None, option: str | None, file: Path | None, standard_input: TextIO
) -> str:
    """The one prompt that was given; UsageError for none, several, or an empty one."""
    given = {"argument": argument, "-p": option, "-f": file}
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1:
        raise UsageError(f"the prompt is given {len(used)} times ({', '.join(used)}): keep one")
    if argument is not None:
        text = argument
    elif option is not None:
        text = option
    elif file is not None and str(file) != "-":
        text = read_text(file)
    elif file is None and standard_input.isatty():
        raise UsageError('there is no prompt: write it as in `dspine run "Why is the sky blue?"`')
    else:
        text = standard_input.read()
    if not text.strip():
        raise UsageError("the prompt is empty: give some text to answer")
    return text


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text (byte {error.start}): convert it") from None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}; check the path") from None
