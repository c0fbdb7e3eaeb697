"""Every program in examples/ runs, on the default target, and shows what it promises."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dspine.engine import assemble, calibrate

FOLDER = Path(__file__).resolve().parents[2] / "examples"
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example as a program and returns what it printed."""

    def rows(targets: Any, _tokens: Any, counts: Sequence[int], **_: Any) -> calibrate.RowTiming:
        return calibrate.RowTiming({on: {n: 10.0 + n for n in counts} for on in targets})

    def drafts(_drafter: Any, _size: int, widths: Sequence[int], **_: Any) -> calibrate.DraftTiming:
        return calibrate.DraftTiming({width: 10.0 + width for width in widths})

    # A machine on which drafting pays, so that what is drafted depends on the texts alone.
    monkeypatch.setattr(calibrate, "time_rows", rows)
    monkeypatch.setattr(calibrate, "time_drafter", drafts)
    monkeypatch.setattr(assemble, "physical_cores", lambda: 1)

    def program(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return program


def test_stream_answer(run: Run) -> None:
    printed = run("stream_answer.py", "Count from one to ten.", "-n", "8")
    prefill, *answer, finish = printed.strip().split("\n")
    assert re.fullmatch(r"\[\d+ prompt tokens in \d+ ms\]", prefill)
    assert "".join(answer).strip()
    assert re.search(r"\[length: 8 tokens, [1-8] verifies, acceptance length \d\.\d\d,", finish)


def test_several(run: Run) -> None:
    prompts = ("Name a colour.", "Name a city.", "Name a number.")
    printed = run("several.py", *prompts, "-n", "5", "-np", "2")
    assert all(f"> {prompt}" in printed for prompt in prompts)
    assert len(re.findall(r"\[answer [123]: [1-5] tokens, (length|stop)\]", printed)) == 3


def test_compare(run: Run) -> None:
    head, row = run("compare.py", "-n", "8", "Repeat: one two three one two three.").splitlines()
    assert head.split() == ["plain", "specul.", "ratio", "length", "text"]
    assert re.fullmatch(r" +\d+\.\d +\d+\.\d +\d+\.\d\d +\d\.\d\d  (the same|differs .*)", row)
    assert "an error" not in row


def test_inspect_events_colours_what_was_drafted(run: Run) -> None:
    repeat = "Repeat exactly: alpha beta gamma delta alpha beta gamma delta alpha beta gamma"
    printed = run("inspect_events.py", repeat, "-n", "24", "--proposer", "ngram")
    body = printed.split("\n\n", 1)[1]
    counts = dict(re.findall(r"(ngram|plain steps): (\d+) verifies", body))
    coloured = re.findall(r"\033\[33m(.*?)\033\[0m", body, re.DOTALL)
    assert "ngram" in counts and coloured
    assert "\033[32m" not in body


def test_chat(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "talk.session"
    printed = run("chat.py", "Name a colour.", "Another?", "-n", "6", "--file", str(file))
    counts = re.findall(r"\[(\d+) tokens from memory, (\d+) decoded\]", printed)
    (none, whole), (kept, new) = [(int(a), int(b)) for a, b in counts]
    assert none == 0 and kept >= whole and new < kept
    assert len(re.findall(r"acceptance length \d\.\d\d", printed)) == 2
    printed = run("chat.py", "One more?", "-n", "6", "--file", str(file))
    again = re.search(r"\[(\d+) tokens from memory", printed)
    assert again is not None and int(again[1]) > kept


def test_json_answer(run: Run) -> None:
    first, second = run("json_answer.py", "Make up a short book. Answer in JSON.").splitlines()
    assert re.fullmatch(r"'.{0,40}', (novel|poetry|history|science), \d{1,4} pages", first)
    assert re.fullmatch(r"least certain: '.*', probability [01]\.\d{3}", second)
    cut = run("json_answer.py", "-n", "3")
    assert cut.startswith("cut after 3 tokens, so it is not whole: {")


def test_train_tiny(run: Run, tmp_path: Path) -> None:
    printed = run("train_tiny.py", str(tmp_path), "-n", "10", "-t", "1", "--steps", "2")
    assert re.search(r"\d+ of [1-9]\d* drafts accepted", printed)
    assert (tmp_path / "drafter.gguf").exists()


def test_no_example_is_left_out() -> None:
    tested = set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text(encoding="utf-8")))
    assert tested == {path.name for path in FOLDER.glob("*.py")}
