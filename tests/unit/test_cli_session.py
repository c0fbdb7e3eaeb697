"""`dspine run --session FILE`: a conversation over several commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspine.cli import run as run_command
from dspine.cli.main import run_cli
from dspine.cli.options import Options
from dspine.engine.engine import Engine
from dspine.engine.session_file import read_session
from tests.support.fake_engine import EOS, VOCAB, make_engine
from tests.support.fake_target import FakeTarget

TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]"


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_engine(_options: Options) -> Engine:
        def next_token(tokens: list[int]) -> int:
            return ord("!") if tokens[-1] == ord("]") else EOS

        target = FakeTarget(next_token, VOCAB, n_ctx=200)  # type: ignore[arg-type]
        return make_engine(target, template=TEMPLATE, made_with={"target": "t"})

    monkeypatch.setattr(run_command, "open_engine", open_engine)


def contents(file: Path) -> list[str]:
    return [f"{m['role'][0]}:{m['content']}" for m in read_session(file).messages]


def test_commands_continue_the_conversation_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.session"
    assert run_cli(["run", "--session", str(file), "-sys", "s", "one"]) == 0
    assert capsys.readouterr().out == "!\n"
    assert contents(file) == ["s:s", "u:one", "a:!"]
    assert run_cli(["run", "--session", str(file), "--json", "two"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["text"] == "!"
    assert document["stats"]["cached_tokens"] == len("~[s]s[u]one[a]!")
    assert contents(file) == ["s:s", "u:one", "a:!", "u:two", "a:!"]
    assert run_cli(["run", "--session", str(file), "three"]) == 0
    assert "from memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--raw", "--session", "{new}"], "--session and --raw exclude each other"),
        (["--compare", "--session", "{new}"], "--session and --compare exclude each other"),
        (["--session", "{new}/deeper"], "does not exist: create it first"),
        (["--session", "{old}", "-sys", "x"], "one that has begun"),
        (["--session", "{other}"], "not a saved session"),
    ],
)
def test_what_does_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    old, other = tmp_path / "old", tmp_path / "other"
    assert run_cli(["run", "--session", str(old), "one"]) == 0
    other.write_text("my notes, which nobody may overwrite")
    before = old.read_bytes(), other.read_bytes()
    names = {"new": tmp_path / "new", "old": old, "other": other}
    assert run_cli(["run", "two", *(word.format(**names) for word in arguments)]) == 2
    assert text in capsys.readouterr().err
    assert (old.read_bytes(), other.read_bytes()) == before
    assert not (tmp_path / "new").exists()
