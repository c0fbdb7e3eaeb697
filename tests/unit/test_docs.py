"""The pages in docs say what the code says: files, functions, commands, variables, keys."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dspine.cli.main import add_commands, cli
from dspine.engine.load import load
from dspine.files.drafter_keys import to_metadata
from dspine.settings import SETTINGS
from tests.support.drafter_files import PAIR, RECORD, SMALL

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "dspine"
WALK = ROOT / "docs" / "how-it-works.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NOT_SETTINGS = {"DSPINE_DEBUG", "DSPINE_KERNELS"}


def resolve(path: str) -> Path:
    """Paths on the page are below the package, or name their top folder."""
    return ROOT / path if (ROOT / path.split("/")[0]).is_dir() else PACKAGE / path


def blocks(page: Path, language: str) -> Iterator[str]:
    yield from re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def command_lines(program: str) -> list[tuple[str, list[str]]]:
    """(page, words after the program) of every shown command, up to a pipe or redirection."""
    found = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if words and words[0] == program:
                    end = next((i for i, w in enumerate(words) if w in ("|", ">", "<")), None)
                    found.append((page.name, words[1:end]))
    return found


def test_every_file_on_the_walk_exists() -> None:
    named = set(re.findall(r"`([\w/.-]+\.py)`", WALK.read_text(encoding="utf-8")))
    assert len(named) > 50
    assert [path for path in sorted(named) if not resolve(path).is_file()] == []


def test_every_module_is_on_the_walk() -> None:
    named = set(re.findall(r"`([\w/.-]+\.py)`", WALK.read_text(encoding="utf-8")))
    modules = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if file.name != "__init__.py"
    }
    assert sorted(modules - named) == [], f"say in {WALK.name} what these are for"


def test_every_name_on_the_walk_is_in_its_file() -> None:
    pairs = re.findall(r"`(\w+)` in\s`([\w/.-]+\.py)`", WALK.read_text(encoding="utf-8"))
    assert len(pairs) > 25
    for name, path in pairs:
        text = resolve(path).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(?:(?:def|class) {name}\b|{name} =)", text, re.MULTILINE), (
            f"{WALK.name} looks for {name} in {path}"
        )


def test_every_shown_command_exists() -> None:
    lines = command_lines("dspine")
    assert len(lines) > 10
    for page, words in lines:
        add_commands()
        command: click.Command = cli
        while isinstance(command, click.Group):
            name, *words = words or ["--help"]
            if name.startswith("-"):
                words = [name, *words]
                break
            assert name in command.commands, f"{page} shows {name}"
            command = command.commands[name]
        context = click.Context(command)
        known = {option for p in command.get_params(context) for option in p.opts}
        for word in words:
            if re.match(r"--?[a-z]", word):
                assert word.split("=")[0] in known, f"{page} shows {command.name} {word}"


def test_every_shown_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    shown = [words for _, words in command_lines("make")]
    assert shown
    for words in shown:
        assert {word for word in words if "=" not in word} <= targets


def test_every_variable_is_a_setting() -> None:
    known = {setting.env for setting in SETTINGS} | NOT_SETTINGS
    for page in PAGES:
        named = set(re.findall(r"\bDSPINE_[A-Z_]*[A-Z]\b", page.read_text(encoding="utf-8")))
        assert named <= known, page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_are_python_and_load_knows_its_arguments(page: Path) -> None:
    known = set(inspect.signature(load).parameters)
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "dspine.load":
                assert {k.arg for k in node.keywords if k.arg} <= known


def test_the_key_table_is_complete() -> None:
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    section = text.split("### Keys", 1)[1].split("\n### ", 1)[0]
    listed = set(re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE))
    written = set(to_metadata(SMALL, PAIR, RECORD))
    assert listed == written | {"general.file_type", "general.name"}


def messages() -> Iterator[str]:
    """Every text in the sources; what is filled in is left out."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
                yield "".join(str(part) for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield re.sub(r"\{\w*\}|%\.\d+f%%|%s", "\0", node.value)


def test_every_message_that_is_explained_exists() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    heads = re.findall(r'^\*\*(".*?)\*\*', page, re.MULTILINE)
    # What is filled in: dots, numbers, a signal, words that say which way, names of flags.
    filled = re.compile(r"\.\.\.|[:;]|\b[NM]%|SIGSEGV|\bwith(?:out)?\b|--?[a-z][a-z-]+")
    known = list(messages())
    looked_at = 0
    for quoted in re.findall(r'"([^"]*)"', "\n".join(heads)):
        for piece in (piece.strip(" ,.") for piece in filled.split(quoted)):
            assert not piece or any(piece in text for text in known), f"nothing says {piece!r}"
            looked_at += bool(piece)
    assert looked_at > 20
