"""Finds out, in a child process, whether this build of the library survives a decode.

Some compilers (gcc before 11.5, 12.4 and 13.3) build a library that dies at its first decode on
CPUs with AMX. The child decodes one token of the model that is about to be used; when a signal
ends it, a second child tries without the extra buffers that use AMX.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dspine.errors import DspineError, LibraryError
from dspine.llama.header import read_header
from dspine.llama.library import Library
from dspine.machine import cache_folder, cpu_model

CURE = (
    "CMAKE_ARGS=\"-DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'\" pip install --force-reinstall "
    "--no-cache-dir llama-cpp-python==0.3.36"
)
_FORMAT = 1
_TIMEOUT_SECONDS = 600
_CRASHED = 0x80000000  # Windows reports a crash as an exit status from here on

Command = Callable[[Path, Library, bool], Sequence[str]]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What the children showed.

    `ok` means that the model can be used, with `use_extra_buffers` as it says. `reason` and
    `cure` are empty when nothing is wrong.
    """

    ok: bool
    use_extra_buffers: bool
    reason: str = ""
    cure: str = ""

    @property
    def status(self) -> str:
        """ok, fallback or broken."""
        return ("ok" if self.use_extra_buffers else "fallback") if self.ok else "broken"

    @property
    def notice(self) -> str | None:
        """A sentence for the user when the model runs, but slower than it could."""
        if self.status != "fallback":
            return None
        return f"{self.reason}; running without extra buffers, which is slower. Cure: {self.cure}"

    def require_usable(self) -> None:
        """LibraryError when the model cannot be decoded with this library."""
        if not self.ok:
            raise LibraryError(f"{self.reason}: try another model, or build again: {self.cure}")


def probe(
    model_path: Path,
    library: Library,
    *,
    command: Command | None = None,
    folder: Path | None = None,
) -> ProbeResult:
    """Result for this machine, library and kind of model, from the cache when it is there.

    `folder` is where results are kept (default: the user's cache folder); `command` builds the
    child's command line, for tests. A child that ends with an ordinary error says
    nothing about the library: the result is ok and not kept, the load that follows will report
    the error.
    """
    store = (folder or cache_folder()) / "probe"
    file = store / f"{_key(model_path, library)}.json"
    known = _read(file)
    if known is not None:
        return known
    result = _run(model_path, library, command or child_command)
    if result is None:
        return ProbeResult(ok=True, use_extra_buffers=True)
    if result.ok:  # a damaged file must not speak for every model of its kind
        _write(file, result)
    return result


def child_command(model_path: Path, library: Library, extra_buffers: bool) -> list[str]:
    """Command line of a child that decodes one token."""
    return [
        sys.executable,
        "-m",
        "dspine.llama.probe",
        str(model_path),
        str(library.path),
        "extra" if extra_buffers else "plain",
    ]


def _run(model_path: Path, library: Library, command: Command) -> ProbeResult | None:
    first = _child(command(model_path, library, True))
    if first is None or first == "":
        return ProbeResult(ok=True, use_extra_buffers=True) if first is None else None
    second = _child(command(model_path, library, False))
    if second is None:
        return ProbeResult(
            ok=True,
            use_extra_buffers=False,
            reason=f"this build of llama.cpp was ended by {first} at its first decode",
            cure=CURE,
        )
    if second == "":
        return None
    return ProbeResult(
        ok=False,
        use_extra_buffers=False,
        reason=(
            f"llama.cpp was ended by {second} while it decoded one token of {model_path}, with "
            f"and without extra buffers, so either this file is damaged or this build is broken"
        ),
        cure=CURE,
    )


def _child(arguments: Sequence[str]) -> str | None:
    """None when the child succeeded, the name of the signal that ended it, else ""."""
    try:
        done = subprocess.run(
            arguments,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    code = done.returncode
    if code == 0:
        return None
    if code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
        return f"signal {-code}"
    return f"exception {code:#x}" if code >= _CRASHED else ""


def _key(model_path: Path, library: Library) -> str:
    facts = library.file.stat()
    parts = [
        str(_FORMAT),
        cpu_model(),
        str(library.file.resolve()),
        str(facts.st_mtime_ns),
        str(facts.st_size),
        model_kind(model_path),
        library.kernels.text,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def model_kind(model_path: Path) -> str:
    """Which kernels a model uses: its architecture and the types of its tensors.

    Falls back to the file itself (path, size, time) when the header cannot be read.
    """
    header = read_header(model_path)
    if header is None:
        facts = model_path.stat()
        return f"{model_path.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    return f"{header.architecture} {list(header.tensor_types)}"


def _read(file: Path) -> ProbeResult | None:
    """A kept result, or None when there is none or it is damaged."""
    try:
        found = json.loads(file.read_text())
        usable, extra = found["ok"], found["use_extra_buffers"]
        reason, cure = found["reason"], found["cure"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if not (isinstance(usable, bool) and isinstance(extra, bool)):
        return None
    return ProbeResult(usable, extra, str(reason), str(cure))


def _write(file: Path, result: ProbeResult) -> None:
    """Keep a result; a cache folder that cannot be written only costs the next probe."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as out:
            json.dump(asdict(result), out)
        Path(out.name).replace(file)


def _main(arguments: Sequence[str]) -> int:
    """The child: decode one token, then leave; a crash is the answer too."""
    from dspine.llama.batch import Batch
    from dspine.llama.context import Context
    from dspine.llama.library import find_library
    from dspine.llama.model import Model

    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    model_path, folder, buffers = arguments
    try:
        find_library(Path(folder))
        with (
            Model.load(Path(model_path), use_extra_buffers=buffers == "extra") as model,
            Context(model, n_ctx=min(256, model.context_train), n_threads=2) as context,
        ):
            batch = Batch(1)
            batch.add(0, 0)
            context.decode(batch)
            context.argmax(0)
    except DspineError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
