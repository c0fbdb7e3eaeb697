"""From prompts to a drafter that runs, by the commands a user types, on a tiny target."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dspine.cli.main import run_cli
from dspine.cli.options import Options, whole_numbers
from dspine.cli.train_answers import answer_options
from dspine.cli.train_features import feature_options
from dspine.cli.train_fit import fit_options, show
from dspine.errors import UsageError
from dspine.settings import Value, settings_of
from dspine.train.answers import AnswerOptions
from dspine.train.features import FeatureOptions
from dspine.train.options import FitOptions
from tests.support.tiny_models import tiny_llama
from tests.support.training import pattern_shards


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run(*arguments: object) -> None:
    assert run_cli([str(argument) for argument in arguments]) == 0


def test_the_whole_way_from_prompts_to_a_running_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_llama(tmp_path / "target.gguf", seed=2)
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"id": i, "source": "letters", "prompt": "abc" * (i + 1)}) + "\n"
            for i in range(12)
        )
    )
    model = ("-m", target, "-t", "1")
    run("train", "answers", *model, "--prompts", prompts, "-o", answers,
        "--max-tokens", "24", "--greedy-share", "1", "--slots", "4")  # fmt: skip
    assert "12 more answers" in capsys.readouterr().out
    assert len(answers.read_text().splitlines()) == 12

    shards, held_out = tmp_path / "shards", tmp_path / "held-out"
    run("train", "features", *model, "--answers", answers, "-o", shards, "--max-tokens", "64",
        "--held-out-output", held_out, "--held-out-one-in", "3", "--taps", "0,1")  # fmt: skip
    told = capsys.readouterr().out
    assert "12 sequences" in told
    assert "the target confirms" in told

    run("train", "features", *model, "--answers", answers, "-o", shards, "--max-tokens", "64",
        "--held-out-output", held_out, "--held-out-one-in", "3", "--taps", "0,1")  # fmt: skip
    assert "0 sequences" in capsys.readouterr().out, "a second run has nothing to do"

    table = tmp_path / "letters.ngram.npz"
    run("train", "ngram", "-m", target, "--answers", answers, "-o", table)
    assert re.search(r"\d+ entries, \d+\.\d kB\n", capsys.readouterr().out)
    assert table.stat().st_size > 0

    fitted = tmp_path / "run"
    run("train", "fit", *model, "--shards", shards, "--held-out", held_out, "-o", fitted,
        "--steps", "3", "--num-layers", "1", "--block-size", "4", "--window", "16",
        "--transfer-rank", "8", "--message-size", "8", "--top-k", "4", "--draft-vocab-size", "0",
        "--anchors-per-step", "8")  # fmt: skip
    told = capsys.readouterr().out
    assert "after 3 steps" in told
    assert "acceptance length" in told

    run("train", "eval", fitted, *model, "--shards", held_out, "--json")
    measured = json.loads(capsys.readouterr().out)
    assert measured["acceptance_length"] >= 1
    assert len(measured["acceptance_curve"]) == 3
    assert set(measured["by_source"]) == {"letters"}

    drafter = tmp_path / "drafter.gguf"
    run("convert", fitted, drafter, "--dtype", "f16", "-m", target)
    capsys.readouterr()
    run("run", *model, "-md", drafter, "-c", "128", "-n", "16", "--raw", "--json",
        "--proposer", "dspine", "--spec-draft-n-max", "3", "abcabc")  # fmt: skip
    assert json.loads(capsys.readouterr().out)["stats"]["drafted"] > 0

    assert run_cli(["convert", str(fitted), str(drafter)]) == 2
    assert "--force" in capsys.readouterr().err
    run("convert", fitted, drafter, "--force")
    assert capsys.readouterr().err == ""

    blind = ("train", "fit", *model, "--shards", shards, "-o", tmp_path / "blind", "--steps", "1",
             "--num-layers", "1", "--block-size", "4", "--window", "16", "--transfer-rank", "8",
             "--message-size", "8", "--top-k", "4", "--draft-vocab-size", "0",
             "--anchors-per-step", "8")  # fmt: skip
    run(*blind)
    assert "again with --held-out FOLDER" in capsys.readouterr().err
    run("convert", tmp_path / "blind", drafter, "--force")
    assert "does not say how many drafts are accepted" in capsys.readouterr().err
    run("run", *model, "-md", drafter, "-c", "128", "-n", "2", "--raw", "abcabc")
    assert "as if it were 40% at every slot" in capsys.readouterr().err
    assert run_cli([*map(str, blind), "--held-out", str(tmp_path)]) == 4
    assert f"no feature shard in the held-out folder {tmp_path}" in capsys.readouterr().err
    run(*blind, "--held-out", held_out)
    run("convert", tmp_path / "blind", drafter, "--force")
    assert capsys.readouterr().err == "", "the second run measured and wrote it down"


LIMITED = (
    "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000));"
    "from dspine.cli.main import main; main()"
)
"""The program where no file may grow beyond 50 kB, which a checkpoint does."""


def test_a_disk_that_takes_no_more_ends_the_run_and_room_continues_it(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target.gguf", hidden_size=32, num_heads=2, num_kv_heads=1)
    pattern_shards(tmp_path / "shards", target, taps=(0, 2), sequences=6, seed=1)
    command = [
        "train", "fit", "-m", target, "-t", "1", "--shards", tmp_path / "shards",
        "-o", tmp_path / "run", "--steps", "2", "--num-layers", "1", "--block-size", "4",
        "--window", "16", "--transfer-rank", "8", "--message-size", "8", "--top-k", "4",
        "--mask-token-id", "3", "--draft-vocab-size", "0", "--anchors-per-step", "8",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("dspine: ")]
    assert "checkpoint-00000002 could not be written" in sentence
    assert "run the same command again once there is room" in sentence
    assert "Traceback" not in done.stderr
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()]
    run(*command)
    assert (tmp_path / "run" / "checkpoint-00000002" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["answers"], "no output is given: name it with -o FILE"),
        (["features"], "no output is given: name it with -o FOLDER"),
        (["fit"], "no output is given"),
        (["ngram", "-o", "x.npz"], "no answer file"),
        (["answers", "-o", "x.jsonl"], "no prompt file: name one or several with --prompts"),
        (["features", "-o", "x"], "name answer files with --answers FILE or plain text"),
        (["fit", "-o", "run", "--shards", "none"], "exactly one sets the length"),
        (["fit", "-o", "run", "--steps", "3"], "name theirs with --shards FOLDER"),
        (["eval", "nothing", "--shards", "x"], "nothing does not exist"),
        (["eval", "nothing"], "name the folder of held-out shards with --shards FOLDER"),
        (["features", "-o", "x", "--taps", "1;2"], "--taps is '1;2'"),
        (["features", "-o", "x", "--prompts", "a", "--prompts", "b"], "2 prompt files"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(["train", *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_another_library_reaches_the_commands_that_decode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_llama(tmp_path / "target.gguf", seed=2)
    given = ["-m", str(target), "--library", str(tmp_path), "-o", str(tmp_path / "out")]
    for more in (["answers", "--prompts", "p"], ["features", "--answers", "a"]):
        assert run_cli(["train", *more, *given]) == 3
        assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", [None, 3])
def test_threads_mean_the_same_for_every_training_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int | None
) -> None:
    target = tiny_llama(tmp_path / "target.gguf", seed=2)
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    for module in ("trainer", "answers", "features"):
        monkeypatch.setattr(f"dspine.train.{module}.physical_cores", lambda: 5)
    monkeypatch.setattr("dspine.cli.train_eval.physical_cores", lambda: 5)
    model = ["-m", str(target), *(["-t", str(given)] if given else [])]
    nothing = ["--shards", str(tmp_path / "none")]
    run_cli(["train", "fit", *model, *nothing, "-o", str(tmp_path / "run"), "--steps", "1"])
    run_cli(["train", "eval", *model, *nothing, str(tmp_path)])
    run_cli(["train", "answers", *model, "--prompts", "gone", "-o", str(tmp_path / "a")])
    run_cli(["train", "features", *model, "--answers", "gone", "-o", str(tmp_path / "f")])
    assert chosen == [given or 5] * 4


def test_the_learning_rate_is_shown_with_few_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show({"step": 10, "elapsed": 1.0, "lr": 0.0009875432109876, "loss": 2.5})
    assert capsys.readouterr().out == "step 10 · 1.0 s · loss 2.5 · lr 0.000988\n"


def defaults(command: str, **given: Value) -> Options:
    """The options of a command line that names only `given`."""
    values = {setting.name: setting.default for setting in settings_of(command)}
    assert given.keys() <= values.keys()
    return Options({**values, **given})


def test_the_command_line_has_the_defaults_of_the_library() -> None:
    """They are written down twice, because settings may not import torch."""
    target, output = Path("target.gguf"), Path("output")
    assert fit_options(
        defaults("train fit", model=target, output=output, shards=("s",), steps=3)
    ) == FitOptions(target=target, output=output, shards=(Path("s"),), steps=3)
    assert feature_options(
        defaults("train features", model=target, output=output, seed=0)
    ) == FeatureOptions(target=target, output=output, answers=())
    assert answer_options(
        defaults("train answers", model=target, output=output, seed=0)
    ) == AnswerOptions(target=target, output=output, prompts=())


@pytest.mark.parametrize(
    ("given", "ce_share", "alignment"),
    [
        ({"kind": "dspine", "alignment_weight": 0.0}, 0.1, 0.0),
        ({"kind": "dspine", "ce_share": 0.0}, 0.0, 0.5),
        ({"kind": "dflash"}, 1.0, 0.5),
        ({"kind": "dflash2", "ce_share": 0.25}, 0.25, 0.5),
    ],
)
def test_kind_and_weights_reach_the_run(
    given: dict[str, Value], ce_share: float, alignment: float
) -> None:
    target, output = Path("target.gguf"), Path("output")
    base = defaults("train fit", model=target, output=output, shards=("s",), steps=3)
    options = fit_options(Options({**base.values, **given, "causal": True, "no_injection": False}))
    assert (options.geometry.kind, options.geometry.causal) == (given["kind"], True)
    assert options.loss_schedule.ce_share(1.0) == ce_share
    assert options.loss_schedule.beta(1000) == alignment


def test_numbers_are_separated_by_commas() -> None:
    assert whole_numbers(defaults("train features", taps="1,8, 15"), "taps") == (1, 8, 15)
    assert whole_numbers(defaults("train features"), "taps") is None
    with pytest.raises(UsageError, match=r"--block-widths is '': .* as in 1,8,15"):
        whole_numbers(defaults("train fit", block_widths=""), "block_widths")
