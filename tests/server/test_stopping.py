"""How a server ends: told to while it loads, with a model that cannot be loaded, an engine that
fails."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dspine.engine.engine import Engine
from dspine.server.engine_thread import BusyError, EngineThread
from tests.support.fake_engine import VOCAB, make_engine
from tests.support.fake_target import FakeTarget
from tests.support.served import PATIENCE, make_service, says, serving, until

ROOT = Path(__file__).resolve().parents[2]
START = """
import dspine.cli.serve as serve
from dspine.cli.main import main
from dspine.errors import FileError
from tests.support.fake_engine import VOCAB, make_engine
from tests.support.fake_target import FakeTarget
from tests.support.served import TEMPLATE, says
"""

# A load that stays inside the C library, where no signal and no exception ends it.
NEVER_LOADED = """
import ctypes
import dspine.cli.serve as serve
serve.open_engine = lambda *_, **__: ctypes.CDLL(None).sleep(600)
from dspine.cli.main import main
main()
"""


NEVER_FOUND = """
import logging, sys
def load(*_, **__):
    logging.getLogger("dspine.load").info("reading the target")
    sys.stdin.readline()
    raise FileError("model.gguf has no layers: take another file")
serve.open_engine = load
main()
"""

CRASHES = """
def load(*_, **__):
    raise ZeroDivisionError("nobody expected this")
serve.open_engine = load
main()
"""

# A device that is lost in the middle of the first answer, and that never lets go.
LOST = """
import time
class Lost(FakeTarget):
    def decode(self, *arguments):
        if sum(len(tokens) for _, tokens in self.decoded) > 60:
            raise RuntimeError("the device is lost")
        super().decode(*arguments)
def load(*_, **__):
    engine = make_engine(Lost(says("x" * 500), VOCAB, n_ctx=1000), template=TEMPLATE)
    engine.close = lambda: time.sleep(600)
    return engine
serve.open_engine = load
main()
"""

# The signal comes between the line that others wait for and the first turn of the server.
EARLY = """
import os, signal
announce = serve.announce
def announced(*arguments):
    announce(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
serve.announce = announced
main()
"""


def test_stopping_does_not_wait_for_the_load_which_frees_its_engine_later() -> None:
    may_load = threading.Event()
    made: list[Engine] = []

    def load() -> Engine:
        assert may_load.wait(3 * PATIENCE)
        made.append(make_engine(FakeTarget(says(""), VOCAB)))
        return made[0]

    thread = make_service(FakeTarget(says(""), VOCAB), load=load).thread
    thread.start()
    stopping = threading.Thread(target=thread.stop, args=(9 * PATIENCE,))
    stopping.start()
    stopping.join(PATIENCE)
    try:
        assert not stopping.is_alive()
        assert _seen(thread) == ("stopped", False, False)
        with pytest.raises(BusyError, match="stopping"):
            _ = thread.engine
    finally:
        may_load.set()
    thread.stop(PATIENCE)
    until(lambda: thread.has_ended)
    assert _seen(thread) == ("stopped", True, True) and len(made) == 1
    with pytest.raises(BusyError, match="stopping"):
        _ = thread.engine


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_the_server_at_once(
    number: signal.Signals, tmp_path: Path
) -> None:
    with running(NEVER_LOADED, tmp_path, "--drain", "600") as (process, log):
        assert _health(process, log) == 503
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0, log.read_text()
    assert log.read_text().endswith("\nstopped before the model was loaded\n")
    assert "Traceback" not in log.read_text()


def test_a_signal_before_the_server_runs_ends_it_in_order(tmp_path: Path) -> None:
    with running(START + EARLY, tmp_path) as (process, log):
        assert process.wait(PATIENCE) == 0, log.read_text()
    assert log.read_text().endswith("\nstopped before the model was loaded\n")


def test_a_model_that_cannot_be_loaded_ends_the_server_with_a_sentence(tmp_path: Path) -> None:
    with running(START + NEVER_FOUND, tmp_path, "--drain", "600") as (process, log):
        assert _health(process, log) == 503
        # A client in the middle of its request, which never ends, holds nothing up.
        address = _address(log)
        with socket.create_connection((address.hostname or "", address.port or 0)) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            assert process.wait(PATIENCE) == 2, log.read_text()
    assert log.read_text().count("\nloading: reading the target\n") == 1
    last = log.read_text().splitlines()[-1]
    assert last == "dspine: model.gguf has no layers: take another file"
    assert log.read_text().count("no layers") == 1 and "Traceback" not in log.read_text()


def test_an_error_that_nobody_expected_ends_it_too_and_its_trace_is_in_the_log(
    tmp_path: Path,
) -> None:
    with running(START + CRASHES, tmp_path) as (process, log):
        assert process.wait(PATIENCE) == 3, log.read_text()
    lines = log.read_text().splitlines()
    assert lines[-1].startswith("dspine: the engine failed (ZeroDivisionError: nobody expected")
    traces = [json.loads(line).get("trace", "") for line in lines if line.startswith("{")]
    assert sum("ZeroDivisionError" in trace for trace in traces) == 1


def test_an_engine_that_fails_later_tells_its_clients_and_ends_the_server(tmp_path: Path) -> None:
    with running(START + LOST, tmp_path, "--drain", "600") as (process, log):
        while _health(process, log) != 200:
            time.sleep(0.05)
        body = json.dumps({"prompt": "A:", "stream": True, "speculative": {"n_max": 0}}).encode()
        address = f"{_address(log).geturl()}/v1/completions"
        with urllib.request.urlopen(
            urllib.request.Request(address, body), timeout=PATIENCE
        ) as reply:
            told = [line for line in reply.read().decode().split("\n\n") if line]
        assert process.wait(PATIENCE) == 3, log.read_text()
    assert '"text":"x"' in told[0] and told[-1] == "data: [DONE]"
    assert "went wrong inside the server" in told[-2] and "lost" not in told[-2]
    assert log.read_text().splitlines()[-1] == (
        "dspine: the engine makes no answers any more (RuntimeError: the device is lost): start "
        "the server again"
    )


def test_an_answer_that_fails_alone_ends_nothing() -> None:
    class Brittle(FakeTarget):
        fails = False

        def decode(self, *arguments: Any) -> None:
            if self.fails:
                self.fails = False
                raise RuntimeError("once")
            super().decode(*arguments)

    target = Brittle(says("Hi."), VOCAB, n_ctx=256)
    service = make_service(target)
    with serving(service) as client:
        for _ in range(3):
            target.fails = True
            body = {"prompt": "A:", "max_tokens": 9}
            assert client.post("/v1/completions", json=body).status_code == 500
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code == 200 and reply.json()["choices"][0]["text"] == "Hi."
        assert client.get("/health").status_code == 200


@contextmanager
def running(
    code: str, folder: Path, *options: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """`dspine serve` on a free port, after `code`; the process, whose input waits, and its log."""
    log = folder / "server.log"
    command = [sys.executable, "-c", code, "serve", "--port", "0", *options]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=stream, cwd=ROOT)
    try:
        yield process, log
    finally:
        process.kill()
        process.communicate()


def _seen(thread: EngineThread) -> tuple[str, bool, bool]:
    return thread.state, thread.has_ended, thread.was_loaded


def _address(log: Path) -> urllib.parse.ParseResult:
    found = re.search(r"listening on (http://\S+)", log.read_text())
    assert found is not None
    return urllib.parse.urlparse(found.group(1))


def _health(process: subprocess.Popen[bytes], log: Path) -> int:
    """The status of its first answer."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit and process.poll() is None:
        try:
            if "listening on" in log.read_text():
                address = f"{_address(log).geturl()}/health"
                with urllib.request.urlopen(address, timeout=PATIENCE) as reply:
                    return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text()}")
