"""Compiles the CPU kernels with the machine's compiler, once per source, compiler and library."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

from dspine.errors import LibraryError

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # A sum must come out the same wherever it is inlined: multiply-adds only where we wrote them.
    "-ffp-contract=off",
)
_FAMILY_FLAGS = {"avx2_": ("-mavx2", "-mfma", "-mf16c")}
"""By the beginning of a file's name. The other files must run on every processor."""
_TIMEOUT_SECONDS = 300


def is_supported() -> bool:
    """Whether there are kernels for this kind of machine at all."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def source_folder() -> Path:
    """Folder of the C++ sources inside the installed package."""
    return Path(str(resources.files("dspine.native")))


def library_path(cache: Path, ggml_version: str) -> Path:
    """Where the compiled kernels for these sources and this ggml are kept."""
    digest = hashlib.sha256(f"{ggml_version} {_FLAGS} {_FAMILY_FLAGS}".encode())
    for file in _sources():
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return cache / "kernels" / f"dspine-kernels-{digest.hexdigest()[:16]}.so"


def build(target: Path) -> None:
    """Compile into `target`; LibraryError without a compiler, or with the compiler's complaint."""
    compiler = find_compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = []
        for file in _sources():
            if file.suffix == ".cpp":
                objects.append(str(Path(folder) / f"{file.stem}.o"))
                _run([*compiler, *_flags(file), "-c", str(file), "-o", objects[-1]])
        made = Path(folder) / target.name
        _run([*compiler, "-shared", "-o", str(made), *objects])
        made.replace(target)


def find_compiler() -> list[str]:
    """Command of a C++ compiler: $CXX, or the first that is installed."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [[name] for name in _COMPILERS]:
        if shutil.which(command[0]):
            return command
    raise LibraryError(
        f"no C++ compiler found (looked for {', '.join(chosen[:1] or _COMPILERS)}): install one "
        f"(Debian and Ubuntu: apt install g++) or set CXX"
    )


def _sources() -> list[Path]:
    return sorted(f for f in source_folder().iterdir() if f.suffix in (".cpp", ".h"))


def _flags(file: Path) -> list[str]:
    extra = (flags for start, flags in _FAMILY_FLAGS.items() if file.name.startswith(start))
    return [*_FLAGS, *(flag for flags in extra for flag in flags)]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibraryError(f"the CPU kernels cannot be compiled: {error}") from error
    if done.returncode:
        complaint = next(
            (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()
        )
        raise LibraryError(f"the CPU kernels cannot be compiled with {command[0]}: {complaint}")
