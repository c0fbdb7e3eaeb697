"""`dspine bench` with real processes on the default pair."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dspine.bench.configuration import Configuration
from dspine.bench.processes import WorkerProcess
from dspine.errors import UsageError
from tests.support.rows import rows_are_invariant

REQUEST = {
    "prompt": "Count from 1 to 10.",
    "raw": False,
    "max_tokens": 12,
    "temperature": 0.0,
    "seed": 1,
    "depth": 0,
}


def test_plain_and_drafted_answers_come_from_processes_of_their_own(
    default_target: Path, default_drafter: Path
) -> None:
    options = {"model": str(default_target), "n_threads": 1, "n_ctx": 512}
    ways = (
        Configuration("plain", {**options, "proposer": "none"}),
        Configuration(
            "dspine",
            {
                **options,
                "drafter": str(default_drafter),
                "proposer": "dspine",
                "spec_draft_n_max": 3,
            },
        ),
    )
    answers = []
    for way in ways:
        worker = WorkerProcess(way)
        try:
            answers += worker.answer([REQUEST])
            [deep] = worker.answer([{**REQUEST, "depth": 64, "filler": "Some text. " * 40}])
            assert deep["prompt_tokens"] == answers[-1]["prompt_tokens"] + 64
            with pytest.raises(UsageError, match=rf"'{way.name}': .*exceed the context of 512"):
                worker.answer([{**REQUEST, "depth": 600, "filler": "Some text. " * 400}])
            # It goes on after an error, and nothing is kept from one answer to the next.
            assert worker.answer([REQUEST])[0]["tokens"] == answers[-1]["tokens"]
        finally:
            worker.close()
    plain, drafted = answers
    assert drafted["drafted"] > 0 and plain["drafted"] == 0
    assert drafted["peak_mib"] > plain["peak_mib"] > 100
    assert len(plain["tokens"]) == 12


def test_answers_at_once_are_those_of_one_at_a_time(
    default_target: Path, default_drafter: Path, users_cache: Path
) -> None:
    options = {
        "model": str(default_target),
        "drafter": str(default_drafter),
        "proposer": "dspine",
        "spec_draft_n_max": 3,
        "n_threads": 1,
        "n_ctx": 512,
        "parallel": 2,
    }
    other = {**REQUEST, "prompt": "Name three rivers."}
    environment = {"DSPINE_CACHE_DIR": str(users_cache)}
    worker = WorkerProcess(Configuration("dspine", options, environment))
    try:
        alone = [*worker.answer([REQUEST]), *worker.answer([other])]
        together = worker.answer([REQUEST, other])
        with pytest.raises(UsageError, match="exceed the context of 256"):
            worker.answer([REQUEST, {**REQUEST, "depth": 300, "filler": "Some text. " * 400}])
        again = worker.answer([other, other])
    finally:
        worker.close()
    assert together[0]["span_ms"] == together[1]["span_ms"]
    assert all(row["span_ms"] >= row["wall_ms"] for row in together)
    assert [len(row["tokens"]) for row in together] == [12, 12]
    if rows_are_invariant(users_cache):
        assert [row["tokens"] for row in together] == [row["tokens"] for row in alone]
        assert [row["tokens"] for row in again] == [alone[1]["tokens"]] * 2
        assert [row["accepted"] for row in together] == [row["accepted"] for row in alone]


def test_a_configuration_that_cannot_load_says_why(tmp_path: Path) -> None:
    missing = tmp_path / "none.gguf"
    with pytest.raises(UsageError, match=r"configuration 'plain': .*none\.gguf"):
        WorkerProcess(Configuration("plain", {"model": str(missing), "proposer": "none"}))


LISTENS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
"""Programs that a shell starts in the background ignore Ctrl-C otherwise."""


def test_ctrl_c_ends_every_process_and_keeps_the_answers(
    tmp_path: Path, default_target: Path
) -> None:
    path = tmp_path / "r.json"
    part = tmp_path / "r.json.part"
    command = [
        *(sys.executable, "-c", LISTENS + "from dspine.cli.main import main; main()", "bench"),
        *("-m", str(default_target)),
        *("--config", "plain", "-n", "8", "-t", "1", "-r", "500", "-c", "512", "-o", str(path)),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        limit = time.monotonic() + 180
        while not (part.exists() and part.read_text().count("\n") > 3):
            assert program.poll() is None and time.monotonic() < limit
            time.sleep(0.05)
        program.send_signal(signal.SIGINT)
        _, complaints = program.communicate(timeout=180)
    assert program.returncode == 130, complaints
    document = json.loads(path.read_text())
    assert not document["complete"] and len(document["measurements"]) >= 2
    assert "Traceback" not in complaints
    # Its worker is gone: nobody else has this file's name on the command line or the answer pipe.
    assert part.read_text().count('"configuration":"plain"') == len(document["measurements"])
