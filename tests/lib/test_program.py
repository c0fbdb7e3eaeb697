"""The program as a person runs it on the default pair: a process of its own, files and flags."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspine.engine.session_file import read_session
from dspine.files.checkpoint import write_checkpoint
from dspine.files.pairing import describe_target
from dspine.files.schema import TrainingRecord, tensor_specs
from tests.support.tiny_drafter import TinyPair
from tests.support.tiny_models import tiny_llama
from tests.support.tiny_pair import config_for

PROGRAM = [sys.executable, "-c", "from dspine.cli.main import main; main()"]
QUESTION = "Write a Python function that adds two numbers."
QUICK = ("-t", "1", "-c", "512", "--no-calibrate")


def program(*arguments: object, code: int = 0, given: str | None = None) -> tuple[str, str]:
    """Standard output and standard error of one run that ends with `code`."""
    done = subprocess.run(
        [*PROGRAM, *map(str, arguments)], capture_output=True, text=True, input=given, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def document(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(program(*arguments, "--json")[0])
    return found


@pytest.fixture(scope="module")
def pair(pytestconfig: pytest.Config) -> tuple[object, ...]:
    """Flags of the default pair: none at all, unless another drafter is under test."""
    named = pytestconfig.getoption("--drafter")
    return () if named is None else ("-md", named)


def test_compare_gives_one_document(
    pair: tuple[object, ...], default_target: Path, default_drafter: Path
) -> None:
    found = document(
        "run", *pair, *QUICK, "--compare", "--spec-draft-n-max", "3", "-n", "48", QUESTION
    )
    plain, fast = found["plain"], found["speculative"]
    assert found["identical"] is (found["divergence"] is None)
    if found["identical"]:
        assert plain["text"] == fast["text"]
    else:
        assert found["divergence"]["reproduced"] is True
        assert found["divergence"]["position"] < 48
        assert plain["text"] != fast["text"]
    assert plain["text"].strip()
    assert found["ratio"] == pytest.approx(fast["tokens_per_second"] / plain["tokens_per_second"])
    assert plain["acceptance_length"] == 1
    assert fast["acceptance_length"] > 1
    assert fast["proposers"]["dspine"]["drafted"] > 0
    assert plain["token_count"] == len(plain["tokens"]) <= 48


def test_text_goes_to_standard_output_and_speed_to_standard_error(
    pair: tuple[object, ...], default_target: Path, default_drafter: Path, tmp_path: Path
) -> None:
    limits = (*QUICK, "-n", "24")
    answer = document("run", *pair, *limits, QUESTION)
    assert answer["model"] == str(default_target)
    assert answer["drafter"] == str(default_drafter)
    assert answer["finish_reason"] == "length"
    assert answer["stats"]["drafted"] > 0

    out, err = program("run", *pair, *limits, given=QUESTION)
    assert out == answer["text"] + "\n"
    assert err.count("\n") == 1
    assert err.startswith("24 tokens in ")
    assert "acceptance length" in err

    (tmp_path / "question.txt").write_text(QUESTION)
    out, err = program("run", "--plain", *limits, "-f", tmp_path / "question.txt")
    assert out.strip()
    assert err.rstrip().endswith("plain")


def test_doctor_says_what_rows_cost_and_which_library_was_found(pair: tuple[object, ...]) -> None:
    found = document("doctor", *pair, "-t", "1", "-c", "512")
    assert found["ok"] is True
    assert Path(found["library"]["path"]).is_dir()
    assert found["library"]["version"] == "0.3.36"
    assert found["rows_ms"].keys() >= {"1", "2", "4", "8", "16"}
    assert 0 < found["rows_ms"]["1"] <= found["rows_ms"]["16"]
    assert found["target"]["architecture"] == "llama"
    assert found["speculation"]["width"] >= 1
    assert found["speculation"]["pays"] is (found["speculation"]["width"] > 1)


def test_inspect_tells_target_and_drafter_apart(
    default_target: Path, default_drafter: Path, tmp_path: Path
) -> None:
    target, drafter = document("inspect", default_target), document("inspect", default_drafter)
    assert (target["role"], drafter["role"]) == ("target", "drafter")
    assert drafter["pair"]["vocab_hash"] == describe_target(default_target).vocab_hash
    assert drafter["training"]["acceptance_curve"]
    out, _ = program("inspect", default_drafter)
    assert "block_size" in out
    out, err = program("inspect", tmp_path / "gone.gguf", code=2)
    assert out == ""
    assert err == f"dspine: {tmp_path / 'gone.gguf'} does not exist: check the path\n"


def test_convert_makes_a_drafter_that_runs(default_target: Path, tmp_path: Path) -> None:
    folder, output = tmp_path / "checkpoint", tmp_path / "drafter.gguf"
    made = TinyPair(config_for(default_target, draft_vocab_size=4096), seed=4)
    names = {spec.gguf_name: spec.torch_name for spec in tensor_specs(made.config)}
    write_checkpoint(
        folder,
        made.config,
        describe_target(default_target),
        TrainingRecord((0.5,) * (made.config.block_size - 1)),
        {names[name]: value for name, value in made.tensors.items()},
        made.draft_vocab,
    )
    out, err = program("convert", folder, output, "--dtype", "f16", "-m", default_target)
    assert out.startswith(str(output))
    assert err == ""
    assert document("inspect", output)["geometry"]["draft_vocab_size"] == 4096

    answer = document(
        "run", "-md", output, *QUICK, "--proposer", "dspine", "--spec-draft-n-max", "3",
        "-n", "8", QUESTION,
    )  # fmt: skip
    assert answer["drafter"] == str(output)
    assert answer["stats"]["drafted"] > 0

    before = output.read_bytes()
    for arguments, told in (
        ((folder, output), "exists"),
        ((folder, tmp_path / "x.gguf", "-m", tiny_llama(tmp_path / "tiny.gguf")), "trained for"),
        ((tmp_path / "gone", tmp_path / "x.gguf"), "gone"),
        ((folder, tmp_path / "x.gguf", "--dtype", "q3_k"), "--dtype is 'q3_k'"),
    ):
        out, err = program("convert", *arguments, code=2)
        assert out == ""
        assert err.startswith("dspine: ") and err.count("\n") == 1
        assert told in err
    assert output.read_bytes() == before
    assert not (tmp_path / "x.gguf").exists()


def test_control_c_in_the_middle_keeps_a_prefix_of_the_answer(pair: tuple[object, ...]) -> None:
    command = [*PROGRAM, *map(str, ("run", *pair, *QUICK, "--spec-draft-n-max", "3", QUESTION))]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert started.stdout is not None
    begun = b""
    while len(begun) < 40:
        begun += os.read(started.stdout.fileno(), 40)
    started.send_signal(signal.SIGINT)
    rest, err = started.communicate(timeout=300)
    assert started.returncode == 130, err
    assert b"Traceback" not in err
    text = (begun + rest).decode()
    assert text.endswith("\n")
    assert "tokens/s" in err.decode()
    count = int(err.decode().partition(" tokens in ")[0])
    # With room left at its end, the whole answer is drafted in the same blocks.
    limits = ("--spec-draft-n-max", "3", "-n", str(count + 16))
    whole = document("run", *pair, *QUICK, *limits, QUESTION)
    assert len(whole["tokens"]) > count
    assert whole["text"].startswith(text[:-1])


INTERRUPTED_CHAT = """
import signal
from dspine.cli import chat_loop, main

echo, pieces = chat_loop.click.echo, []

def interrupting(text=None, **options):
    echo(text, **options)
    pieces.append(text)
    if len(pieces) == 3:
        signal.raise_signal(signal.SIGINT)

chat_loop.click.echo = interrupting
main.main()
"""


def test_chat_from_a_pipe_reuses_what_was_said_and_goes_on_after_control_c(
    pair: tuple[object, ...], tmp_path: Path
) -> None:
    file = tmp_path / "talk.session"
    limits = (*QUICK, "--spec-draft-n-max", "3", "-n", "16", "--session", file)
    command = [sys.executable, "-c", INTERRUPTED_CHAT, "chat", *pair, *limits]
    done = subprocess.run(
        list(map(str, command)),
        input="Name three colours.\nWhich of them is warm?\n/stats\nAnd cold?\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    messages = read_session(file).messages
    assert [m["role"] for m in messages] == ["user", "assistant"] * 3
    answers = [m["content"] for m in messages[1::2]]
    assert all(answers)
    assert done.stdout.startswith(f"{answers[0]}\n{answers[1]}\nlast answer: ")
    assert done.stdout.endswith(f"\n{answers[2]}\n")

    first, *others = done.stderr.splitlines()
    assert 1 <= int(first.split()[0]) < 16
    held = int(re.findall(r"prompt (\d+) at", first)[0])
    assert len(others) == 2
    for line in others:
        new, reused = map(int, re.findall(r"prompt (\d+) new at .* (\d+) from memory", line)[0])
        assert reused >= held
        assert new < 32
        held = new + reused
