"""The memory that `dspine plan` predicts beside what a process has at most.

Each case is loaded in a process of its own, which measures the machine anew and answers one prompt
longer than a batch; its peak of resident memory is compared with the plan's.

    python benchmarks/plan_memory.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import geometries

import dspine
from dspine.default_pair import default_drafter, default_target
from dspine.llama.library import find_library
from dspine.machine import cpu_flags
from dspine.plan.from_file import read_drafter_geometry, read_geometry
from dspine.plan.memory import Mode, Setup, plan_memory
from dspine.plan.packing import Kernels, stock_kernels

SENTENCE = "Tell me about the weather of this week, day by day and in full sentences. "
N_CTX, ANSWER = 4096, 16
N_BATCH = 512


@dataclass(frozen=True, slots=True)
class Case:
    """What is loaded. Without a drafter drafts come from n-grams."""

    name: str
    target: Path
    drafter: Path | None
    mode: Mode
    drafts: int


def cases(names: list[str] | None = None) -> list[Case]:
    """The default pair, and random weights in the sizes of published models."""
    found = [Case("default pair", default_target(), default_drafter(), "trim", 7)]
    others: tuple[tuple[str, str, Mode], ...] = (
        ("qwen3.5-0.8b", "q8_0", "checkpoint"),
        ("qwen3.5-0.8b", "q8_0", "snapshots"),
        ("qwen2.5-0.5b", "q4_k_m", "trim"),
        ("qwen2.5-1.5b", "q4_k_m", "trim"),
    )
    for name, mixture, mode in others:
        label = f"{name} {mixture}" + ("" if mode == "trim" else f", {mode}")
        if names is None or label in names:
            found.append(Case(label, geometries.model(name, mixture), None, mode, 15))
    return [case for case in found if names is None or case.name in names]


def predicted(case: Case, kernels: Kernels) -> dict[str, Any]:
    """The plan's peak and items, in MiB, with the CPU kernels that the process has."""
    drafter = None if case.drafter is None else read_drafter_geometry(case.drafter)
    setup = Setup(
        case.mode,
        case.drafts,
        n_batch=N_BATCH,
        adaptive=True,
        kernels=kernels,
    )
    plan = plan_memory(read_geometry(case.target), drafter, setup, N_CTX)
    return {
        "peak_mib": plan.peak_host / 2**20,
        "items_mib": {item.label: round(item.n_bytes / 2**20, 1) for item in plan.items},
        "loading_mib": round(plan.loading_bytes / 2**20, 1),
    }


def measured(case: Case, threads: int) -> tuple[float, Kernels]:
    """Peak resident memory in MiB of a process that loads the case and answers, and its kernels."""
    request = {
        "model": str(case.target),
        "drafter": None if case.drafter is None else str(case.drafter),
        "rollback": case.mode,
        "drafts": case.drafts,
        "threads": threads,
    }
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(request)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{case.name}: {done.stderr.strip()[-500:]}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return float(answer["peak_mib"]), "dspine" if answer["active"] else stock_kernels(cpu_flags())


def child(request: dict[str, Any]) -> None:
    """Load, answer, and print the peak."""
    with tempfile.TemporaryDirectory() as folder:
        engine = dspine.load(
            request["model"],
            request["drafter"],
            n_ctx=N_CTX,
            n_batch=N_BATCH,
            n_threads=request["threads"],
            # A number, so that a drafter which does not pay on a busy machine is kept.
            spec_draft_n_max=request["drafts"],
            rollback=request["rollback"],
            cache_dir=folder,
            probe=False,
        )
        with engine:
            # A little more than a batch, in a tokenizer of words as in one of bytes.
            prompt = SENTENCE * (1 + N_BATCH // len(engine.encode(SENTENCE, raw=True)))
            for _ in engine.generate(prompt, max_tokens=ANSWER, raw=True):
                pass
            active = find_library().kernels.active
            print(json.dumps({"peak_mib": common.memory_mib()["VmHWM"], "active": active}))


def main() -> None:
    """Predict and measure every case; the last line is one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.add_argument("--child", help="for this program's own processes")
    parser.add_argument("--case", action="append", help="only the cases of these names")
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(json.loads(arguments.child))
        return
    found = {}
    for case in cases(arguments.case):
        peak, kernels = measured(case, arguments.threads or 1)
        facts = {"kernels": kernels, **predicted(case, kernels), "measured_mib": peak}
        facts["error"] = facts["peak_mib"] / facts["measured_mib"] - 1.0
        found[case.name] = facts
    rows = [
        (name, f"{f['peak_mib']:.0f}", f"{f['measured_mib']:.0f}", f"{100 * f['error']:+.1f} %")
        for name, f in found.items()
    ]
    print(common.table(("peak of the process, MiB", "predicted", "measured", "error"), rows))
    document = {"context": N_CTX, "batch": N_BATCH, "cases": found}
    common.save("plan_memory", document, arguments.output)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
