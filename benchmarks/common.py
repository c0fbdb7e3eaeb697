"""What every benchmark needs: prompts, the machine and commit it ran on, and where results go."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMPTS = HERE / "prompts"
RESULTS = HERE / "results"
_MEMORY = ("VmRSS", "RssAnon", "VmHWM")
PROGRAM = (sys.executable, "-c", "from dspine.cli.main import main; main()")
"""Begins a command line of dspine, whatever is on the path."""

TASKS = ("gsm8k", "humaneval", "mt-bench")


def prompts(tasks: Sequence[str] = TASKS, count: int | None = None) -> list[tuple[str, str, str]]:
    """(task, id, prompt) of the first `count` prompts of each task."""
    rows = []
    for task in tasks:
        lines = (PROMPTS / f"{task}.jsonl").read_text(encoding="utf-8").split("\n")
        for line in [text for text in lines if text][:count]:
            row = json.loads(line)
            rows.append((task, row["id"], row["prompt"]))
    return rows


def provenance() -> dict[str, Any]:
    """Machine, versions, commit and command line of this run."""
    from dspine.bench.result import machine_facts, versions

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *(Path(word).name for word in sys.argv)]),
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "machine": {
            **machine_facts(),
            "vector": _vector_features(),
            "memory_gib": _memory_gib(),
        },
        "versions": versions(),
    }


def save(name: str, document: Mapping[str, Any], output: Path | None = None) -> Path:
    """Write a result with its provenance; the file's path."""
    path = output or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**provenance(), **document}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def parser(description: str) -> argparse.ArgumentParser:
    """Options that all benchmarks share."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("-m", "--model", type=Path, help="target GGUF (default: the default pair)")
    made.add_argument("-md", "--model-draft", type=Path, help="drafter GGUF")
    made.add_argument("-t", "--threads", type=int, help="threads (default: one a core)")
    made.add_argument("--count", type=int, help="prompts of each task (default: all 20)")
    made.add_argument("-n", "--predict", type=int, default=128, help="tokens of an answer")
    made.add_argument("-o", "--output", type=Path, help="where the JSON goes")
    return made


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Plain columns, the first left-aligned, the others right-aligned."""
    cells = [list(header), *([str(x) for x in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first = row[0].ljust(widths[0])
        rest = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([first, *rest]))
    return "\n".join(lines)


def memory_mib(process: int | None = None) -> dict[str, float]:
    """MiB of a process (default: this one): resident now (VmRSS), of that without pages of files
    (RssAnon), and the most it ever had (VmHWM). Linux only; SystemExit elsewhere.
    """
    status = Path(f"/proc/{process or 'self'}/status")
    if not status.exists():
        raise SystemExit("this system does not tell a process's memory: run it on Linux")
    found = re.findall(r"^(\w+):\s+(\d+) kB", status.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: int(size) / 1024 for name, size in found if name in _MEMORY}


def wait_for_server(process: subprocess.Popen[bytes], log: Path, seconds: float) -> str:
    """The address of a `dspine serve` that writes to `log`, once it answers; SystemExit if it
    ends or takes longer.
    """
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and process.poll() is None:
        found = re.search(r"listening on (http://\S+)", log.read_text(encoding="utf-8"))
        if found is not None:
            try:
                with urllib.request.urlopen(f"{found.group(1)}/health", timeout=5):
                    return found.group(1)
            except OSError:
                pass
        time.sleep(0.1)
    raise SystemExit(f"the server did not start: {log.read_text(encoding='utf-8')}")


def _git(*arguments: str) -> str | None:
    done = subprocess.run(
        ["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def _vector_features() -> list[str]:
    interesting = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
    flags = _cpuinfo("flags").split()
    return [name for name in interesting if name in flags]


def _memory_gib() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()[0]
    except OSError:
        return None
    return round(int(text.split()[1]) / 2**20)
