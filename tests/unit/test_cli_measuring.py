"""`dspine bench`, `eval` and `compare` with answerers that reply by a rule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dspine.bench import processes
from dspine.bench.configuration import Configuration
from dspine.bench.measurement import Measurement
from dspine.cli import INTERRUPTED
from dspine.cli.main import run_cli
from tests.support.bench_results import FakeAnswerer, measurement


class Workers:
    """Stands for the processes of configurations; Ctrl-C comes at answer `interrupt_at`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.configurations: list[Configuration] = []
        self.interrupt_at = -1
        self.tokens: dict[str, tuple[int, ...]] = {}

    def start(self, configuration: Configuration) -> FakeAnswerer:
        self.configurations.append(configuration)
        return FakeAnswerer(configuration, self.asked, self.reply)

    def reply(self, name: str, _request: Mapping[str, Any]) -> Measurement:
        if len(self.asked) == self.interrupt_at:
            raise KeyboardInterrupt
        return measurement(name, tokens=self.tokens.get(name, (1, 2, 3)), drafted_at=(2,))


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Workers:
    made = Workers()
    monkeypatch.setattr(processes, "WorkerProcess", made.start)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return made


BENCH = ("bench", "--tasks", "maths", "-r", "1", "--temps", "0")


def test_bench_prints_tables(workers: Workers, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli([*BENCH, "--config", "plain", "--config", "auto"]) == 0
    out = capsys.readouterr().out
    assert "configuration" in out and "1.00 [1.00, 1.00]" in out and "same" in out
    assert [one.name for one in workers.configurations] == ["plain", "auto"]
    assert all(one.options["model"].endswith(".gguf") for one in workers.configurations)


def test_bench_asks_at_both_temperatures_three_times_by_default(workers: Workers) -> None:
    assert run_cli(["bench", "--tasks", "sql", "--config", "plain"]) == 0
    asked = [request["temperature"] for _, request in workers.asked[1:]]
    assert asked == [0.0, 1.0] * 3
    assert all(request["max_tokens"] == 128 for _, request in workers.asked[1:])


def test_another_text_is_shown_in_red(
    workers: Workers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.tokens["auto"] = (1, 2, 9)
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *_: False)
    assert run_cli([*BENCH, "--config", "plain", "--config", "auto"]) == 0
    red = [line for line in capsys.readouterr().out.split("\n") if line.startswith("\x1b[31m")]
    assert len(red) == 3  # the configuration's line and one for each of the two prompts
    assert "2 differ" in red[0] and " 3 " in red[1] + " "


@pytest.mark.parametrize("form", ["json", "csv", "md"])
def test_other_forms_of_output(
    workers: Workers, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    assert run_cli([*BENCH, "--config", "plain", f"--{form}"]) == 0
    out = capsys.readouterr().out
    if form == "json":
        assert json.loads(out)["summary"][0]["configuration"] == "plain"
    else:
        assert out.startswith({"csv": "configuration,task", "md": "**temperature 0"}[form])


def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(
    workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    command = [*BENCH, "--config", "plain", "--config", "auto", "-o", str(path)]
    workers.interrupt_at = 5  # two warm-ups, two answers, and then
    assert run_cli(command) == INTERRUPTED
    document = json.loads(path.read_text())
    assert not document["complete"] and len(document["measurements"]) == 2
    assert "goes on from" in capsys.readouterr().err
    workers.interrupt_at = -1
    assert run_cli(command) == 0
    assert "after 2 answers" in capsys.readouterr().err
    document = json.loads(path.read_text())
    assert document["complete"] and len(document["measurements"]) == 4
    assert len(document["provenance"]) == 2
    assert list(tmp_path.glob("*.part")) == []


def test_anew_begins_from_nothing(workers: Workers, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    command = [*BENCH, "--config", "plain", "-o", str(path)]
    workers.interrupt_at = 3
    assert run_cli(command) == INTERRUPTED
    workers.interrupt_at = -1
    assert run_cli([*command, "--anew"]) == 0
    assert len(json.loads(path.read_text())["provenance"]) == 1


def test_eval_asks_the_drafter_for_all_its_slots(
    workers: Workers, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["eval", "--tasks", "gsm8k", "--limit", "2"]) == 0
    assert workers.configurations[0].options["spec_draft_n_max"] == 7
    assert workers.configurations[0].options["proposer"] == "dspine"
    assert "acceptance length over all tasks" in capsys.readouterr().out
    assert len(workers.asked) == 3


def test_eval_without_a_drafter_says_so(
    workers: Workers, default_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["eval", "-m", str(default_target)]) == 2
    assert "there is no drafter to measure" in capsys.readouterr().err


def test_compare_reads_two_results(
    workers: Workers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json")]
    for path in paths:
        assert run_cli([*BENCH, "--config", "plain", "-o", str(path)]) == 0
    capsys.readouterr()
    assert run_cli(["compare", *map(str, paths), "--json"]) == 0
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert {one["ratio"] for one in changes} == {1.0}
    assert not any(one["significant"] for one in changes)
    assert run_cli(["compare", str(paths[0]), str(tmp_path / "c.json")]) == 2
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--tasks", "gsm9k"], "there is no task 'gsm9k'"),
        (["--tasks", ","], "there is nothing to ask"),
        (["--temps", "warm"], "--temps is 'warm'"),
        (["--depth", "-1"], "--depth is '-1'"),
        (["--config", "fast"], "begin with one of"),
        (["--json", "--csv"], "exclude each other"),
        (["--plot", "a.pdf"], "neither .png nor .svg"),
        (["-o", "nowhere/r.json"], "does not exist: create it first"),
        (["-r", "0"], "it must be at least 1"),
    ],
)
def test_wrong_options_say_so_before_anything_is_loaded(
    workers: Workers, capsys: pytest.CaptureFixture[str], more: list[str], words: str
) -> None:
    assert run_cli(["bench", *more]) == 2
    assert words in capsys.readouterr().err
    assert workers.configurations == []


def test_prompts_of_equal_names_stay_apart(workers: Workers, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(f"From {folder}")
    files = [str(tmp_path / folder / "x.txt") for folder in ("a", "b")]
    command = ["bench", "--prompts", files[0], "--prompts", files[1], "--config", "plain"]
    assert run_cli([*command, "-r", "1", "--temps", "0"]) == 0
    assert [request["prompt"] for _, request in workers.asked[1:]] == ["From a", "From b"]
