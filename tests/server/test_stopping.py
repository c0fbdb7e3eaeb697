"""A stop while the model is loading: nobody waits for the load."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from dspine.engine.engine import Engine
from dspine.server.engine_thread import BusyError, EngineThread
from tests.support.fake_engine import VOCAB, make_engine
from tests.support.fake_target import FakeTarget
from tests.support.served import PATIENCE, make_service, says, until

# A load that stays inside the C library, where no signal and no exception ends it.
NEVER_LOADED = """
import ctypes
import dspine.cli.serve as serve
serve.open_engine = lambda *_, **__: ctypes.CDLL(None).sleep(600)
from dspine.cli.main import main
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
    log = tmp_path / "server.log"
    command = [sys.executable, "-c", NEVER_LOADED, "serve", "--port", "0", "--drain", "600"]
    with log.open("w") as stream:
        process = subprocess.Popen(command, stderr=stream)
    try:
        assert _health(process, log) == 503
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert log.read_text().endswith("\nstopped before the model was loaded\n")
    assert "Traceback" not in log.read_text()


def _seen(thread: EngineThread) -> tuple[str, bool, bool]:
    return thread.state, thread.has_ended, thread.was_loaded


def _health(process: subprocess.Popen[bytes], log: Path) -> int:
    """The status of its first answer."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit and process.poll() is None:
        found = re.search(r"listening on (http://\S+)", log.read_text())
        try:
            if found:
                with urllib.request.urlopen(f"{found.group(1)}/health", timeout=PATIENCE) as reply:
                    return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text()}")
