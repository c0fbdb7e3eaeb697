"""Where the prompt of `dspine run` comes from."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from dspine.cli.prompt import read_prompt
from dspine.errors import DspineError, FileError, UsageError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_argument_option_and_file_give_the_text_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(" drei\nZeilen\n", encoding="utf-8")
    assert read_prompt(" one ", None, None, Terminal()) == " one "
    assert read_prompt(None, "two", None, Terminal()) == "two"
    assert read_prompt(None, None, file, Terminal()) == " drei\nZeilen\n"


@pytest.mark.parametrize("file", [None, Path("-")])
def test_standard_input_is_read_when_nothing_else_is_given(file: Path | None) -> None:
    assert read_prompt(None, None, file, io.StringIO("piped")) == "piped"


def test_a_prompt_from_two_places_names_both() -> None:
    with pytest.raises(UsageError, match=r"given 2 times \(argument, -f\)"):
        read_prompt("text", None, Path("file"), Terminal())


def test_no_prompt_at_a_terminal_shows_how_to_give_one() -> None:
    with pytest.raises(UsageError, match="dspine run"):
        read_prompt(None, None, None, Terminal())


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_empty_prompt_is_refused_from_everywhere(text: str, tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.write_text(text)
    given: list[tuple[str | None, str | None, Path | None]] = [
        (text, None, None),
        (None, text, None),
        (None, None, file),
    ]
    for argument, option, path in given:
        with pytest.raises(UsageError, match="empty"):
            read_prompt(argument, option, path, Terminal())
    with pytest.raises(UsageError, match="empty"):
        read_prompt(None, None, None, io.StringIO(text))


def test_a_missing_file_and_one_that_is_no_text_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot read .*gone: No such file"):
        read_prompt(None, None, tmp_path / "gone", Terminal())
    with pytest.raises(FileError, match="cannot read"):
        read_prompt(None, None, tmp_path, Terminal())
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\xff")
    with pytest.raises(DspineError, match=r"not UTF-8 text \(byte 2\)"):
        read_prompt(None, None, binary, Terminal())
