"""What a child process found about the CPU kernels on this machine, kept beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dspine.machine import cpu_model

ANY = "auto"
"""The family that proves fastest."""
_TEST_SECONDS = 120
NO_RESULT = f"no result within {_TEST_SECONDS} seconds"
RETRY_SECONDS = 3600.0
"""After a test that came to no end, which may be the fault of a busy machine."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The `family` (its key) that passed the self-test, and in `note` why it was chosen.

    None with a `complaint`: the test failed, for `tried` if it came so far. None with a note alone:
    ggml's own kernels are the better choice.
    """

    family: str | None = None
    note: str = ""
    complaint: str = ""
    tried: str = ""


Tester = Callable[[Path, Path, str, Sequence[str]], Verdict]
"""Kernels, folder of the library, family or ANY, families to leave out."""


def run_test(path: Path, folder: Path, wanted: str = ANY, without: Sequence[str] = ()) -> Verdict:
    """Test the kernels `path` with the library in `folder` in a child: the family `wanted`, or the
    fastest but for those in `without`.
    """
    command = [sys.executable, "-m", "dspine.kernels.selftest", str(path), str(folder), wanted]
    try:
        done = subprocess.run(
            [*command, *without],
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict(complaint=NO_RESULT)
    except OSError as error:
        return Verdict(complaint=str(error))
    lines = done.stdout.strip().splitlines()
    with suppress(ValueError, TypeError):
        if done.returncode == 0 and lines:
            return Verdict(**json.loads(lines[-1]))
    tried = lines[0].removeprefix("family ") if lines and lines[0].startswith("family ") else ""
    if done.returncode < 0:
        return Verdict(complaint=f"the process was ended by signal {-done.returncode}", tried=tried)
    lines = lines or done.stderr.strip().splitlines()
    complaint = lines[-1] if lines else f"exit status {done.returncode}"
    return Verdict(complaint=complaint, tried=tried)


def verdict(path: Path, folder: Path, wanted: str, tester: Tester = run_test) -> Verdict:
    """What the self-test found, from the last time on this machine and library or from now."""
    facts = _facts(path, folder)
    file = path.with_suffix(f".{wanted}.json")
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(file.read_text())
        kept = Verdict(**known) if known.pop("facts") == facts else None
        if kept is not None and not (kept.complaint == NO_RESULT and _age(file) > RETRY_SECONDS):
            return kept
    found = _judge(path, folder, wanted, tester)
    _write(file, {"facts": facts, **asdict(found)})
    return found


def kept_in(folder: Path) -> bool | None:
    """Whether the last verdict in a folder of kernels was for them; None where there is none."""
    files = sorted(folder.glob(f"*.{ANY}.json"), key=lambda file: file.stat().st_mtime_ns)
    if not files:
        return None
    with suppress(OSError, ValueError, KeyError):
        return json.loads(files[-1].read_text())["family"] is not None
    return None


def _judge(path: Path, folder: Path, wanted: str, tester: Tester) -> Verdict:
    """The verdict on `wanted`; with ANY, a family that fails leaves its place to the next."""
    first: Verdict | None = None
    without: list[str] = []
    while True:
        found = tester(path, folder, wanted, without)
        if not found.complaint:
            if first is None:
                return found
            note = f"{first.tried} kernels failed their self-test ({first.complaint})"
            return Verdict(found.family, f"{note}; {found.note}" if found.note else note)
        first = first or found
        if wanted != ANY or not found.tried or found.tried in without:
            return first
        without.append(found.tried)


def _facts(path: Path, folder: Path) -> list[str | int]:
    found: list[str | int] = [cpu_model(), str(folder.resolve())]
    for file in (path, folder / "libggml-cpu.so", folder / "libggml-base.so"):
        stat = file.stat()
        found += [stat.st_size, stat.st_mtime_ns]
    return found


def _age(file: Path) -> float:
    """Seconds since the file was written."""
    return time.time() - file.stat().st_mtime


def _write(file: Path, content: dict[str, object]) -> None:
    """Keep a verdict; a folder that cannot be written only costs the next self-test."""
    with suppress(OSError):
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as out:
            json.dump(content, out)
        Path(out.name).replace(file)
