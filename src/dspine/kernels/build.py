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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

from dspine.errors import LibraryError
from dspine.machine import usable_cores

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # A sum must come out the same wherever it is inlined: multiply-adds only where we wrote them.
    "-ffp-contract=off",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni")
FAMILY_FLAGS: Mapping[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avxvnni": (*_AVX2, "-mavxvnni"),
    "avx512": _AVX512,
    "amx": (*_AVX512, "-mamx-tile", "-mamx-int8"),
}
"""By family, for files that begin with its key and `_`. All others must run on every processor."""
_OPTIONAL = ("avxvnni", "avx512", "amx")
_BUILT_ON = {"amx": "avx512"}
"""Families that use kernels of another one."""
_LIST = "families.cpp"
"""Names the families, so it is compiled last."""
_SLOW = ("_k_quants", "_small", "_four_bit")
"""Ends of the names of sources that take longest: they begin first."""
_TIMEOUT_SECONDS = 300


def is_supported() -> bool:
    """Whether there are kernels for this kind of machine at all."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def source_folder() -> Path:
    """Folder of the C++ sources inside the installed package."""
    return Path(str(resources.files("dspine.native")))


def library_path(cache: Path, ggml_version: str) -> Path:
    """Where the compiled kernels for these sources and this ggml are kept."""
    digest = hashlib.sha256(f"{ggml_version} {_FLAGS} {dict(FAMILY_FLAGS)}".encode())
    for file in _sources():
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return cache / "kernels" / f"dspine-kernels-{digest.hexdigest()[:16]}.so"


def build(
    target: Path, family_flags: Mapping[str, tuple[str, ...]] = FAMILY_FLAGS
) -> dict[str, str]:
    """Compile into `target`; LibraryError without a compiler, or with the compiler's complaint.

    A family that this compiler cannot compile (an old one does not know the instructions) is left
    out, but for AVX2; the result is the complaint by such family. `family_flags` are other flags
    for the same families.
    """
    compiler = find_compiler()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:

        def compile_one(file: Path, *more: str) -> str:
            made = Path(folder) / f"{file.stem}.o"
            _run([*compile_command(file, made, compiler, family_flags), *more])
            return str(made)

        sources = [f for f in _sources() if f.suffix == ".cpp" and f.name != _LIST]
        sources.sort(key=_takes_long, reverse=True)
        objects, left_out = [], {}
        with ThreadPoolExecutor(usable_cores()) as pool:
            started = [(_family(file), pool.submit(compile_one, file)) for file in sources]
            for family, future in started:
                try:
                    objects.append((family, future.result()))
                except LibraryError as error:
                    if family not in _OPTIONAL:
                        pool.shutdown(cancel_futures=True)
                        raise
                    left_out[family] = str(error)
        for family, other in _BUILT_ON.items():
            if other in left_out:
                left_out.setdefault(family, left_out[other])
        without = [f"-DDSPINE_WITHOUT_{family.upper()}" for family in left_out]
        whole = [made for family, made in objects if family not in left_out]
        whole.append(compile_one(source_folder() / _LIST, *without))
        made = Path(folder) / target.name
        _run([*compiler, "-shared", "-o", str(made), *whole])
        made.replace(target)
    return left_out


def compile_command(
    source: Path,
    target: Path,
    compiler: Sequence[str] = (),
    family_flags: Mapping[str, tuple[str, ...]] = FAMILY_FLAGS,
) -> list[str]:
    """How one source is compiled, by default with the compiler of this machine."""
    family, part_of_it, _ = source.stem.partition("_")
    flags = family_flags.get(family, ()) if part_of_it else ()
    command = [*(compiler or find_compiler()), *_FLAGS, *flags]
    return [*command, "-c", str(source), "-o", str(target)]


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


def _family(file: Path) -> str:
    """The family that a source belongs to, "" for what all share."""
    family = file.stem.partition("_")[0]
    return family if family in FAMILY_FLAGS else ""


def _takes_long(file: Path) -> bool:
    return file.stem.endswith(_SLOW)


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
