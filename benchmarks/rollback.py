"""Memory and time of taking drafts back on a hybrid target: snapshots beside one checkpoint.

Every step accepts half of its drafts, rounded down, so that every step rolls back. The weights
are random, of Qwen3.5-0.8B's sizes: the text is noise, times and bytes are those of a real one.

    python benchmarks/rollback.py
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

import common
import geometries

from dspine.engine.choose import GreedyChooser
from dspine.engine.emit import Emitter
from dspine.engine.llama_target import LlamaTarget
from dspine.engine.loop import Run, StepResult
from dspine.engine.plain import PlainStepper
from dspine.engine.proposal import Ask, Proposal
from dspine.engine.proposers import NoProposer
from dspine.engine.rollback import MAX_REPLAY, RollbackMode, make_rollback
from dspine.engine.sequence import TokenSequence
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.width import FixedWidth
from dspine.llama.context import Context
from dspine.llama.model import Model, load_safely
from dspine.machine import physical_cores

WIDTHS = (2, 4, 8, 16)
PROMPT = [int(x) for x in range(200, 232)]
N_CTX, N_BATCH = 512, 64
AT_ONCE = ("MALLOC_MMAP_THRESHOLD_", "65536")
"""The C library then gives freed memory back at once, and resident sizes can be compared."""


class Scripted(NoProposer):
    """Drafts `width - 1` tokens; the first half, rounded down, are what the target says."""

    def __init__(self, answer: Sequence[int], width: int) -> None:
        self._answer, self._width = answer, width

    def propose(self, ask: Ask) -> Proposal:
        at = ask.position - len(PROMPT) + 1
        right = self._answer[at : at + (self._width - 1) // 2]
        wrong = [(self._answer[at + len(right)] + 1) % 1000] * (self._width - 1 - len(right))
        drafts = (*right, *wrong)[: min(ask.limit, self._width - 1)]
        return Proposal(drafts, (1.0,) * len(drafts), "ngram")


def resident_bytes() -> int:
    """Memory of this process that is in use now, without mapped files (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell a process's memory: run it on Linux")


def start(target: LlamaTarget) -> Run:
    """A run whose prompt is in memory."""
    target.decode(PROMPT[:-1], 0, "none")
    emitter = Emitter(lambda _: b"", lambda _: False, max_tokens=None)
    return Run(target, TokenSequence(PROMPT), emitter, GreedyChooser(target))


def plain(model: Model, threads: int, count: int) -> tuple[list[int], dict[str, Any]]:
    """The answer that the others must repeat, milliseconds a token, and memory."""
    before = resident_bytes()
    with Context(
        model, n_ctx=N_CTX, n_batch=N_BATCH, n_threads=threads, max_outputs=16 + MAX_REPLAY
    ) as context:
        target = LlamaTarget(context)
        # The widest batch of all, so that working memory is there from the start.
        target.decode(PROMPT[: 16 + MAX_REPLAY], 0, "all")
        target.clear()
        run = start(target)
        stepper = PlainStepper(run)
        times = [stepper.step().verify_ms for _ in range(count)]
        facts = {
            "token_ms": median(times),
            "resident_mib": (resident_bytes() - before) / 2**20,
            "state_mib": context.state.bytes_per_copy(0) / 2**20,
        }
        return run.sequence.tokens[len(PROMPT) :], facts


def measure(
    model: Model, mode: RollbackMode, width: int, answer: Sequence[int], threads: int, steps: int
) -> dict[str, Any]:
    """One mode at one width: memory, time of a step, time of saving and restoring alone."""
    before = resident_bytes()
    with Context(
        model,
        n_ctx=N_CTX,
        n_batch=N_BATCH,
        n_threads=threads,
        max_outputs=16 + MAX_REPLAY,
        snapshots=width - 1 if mode == "snapshots" else 0,
    ) as context:
        target = LlamaTarget(context)
        target.decode(PROMPT[: 16 + MAX_REPLAY], 0, "all")
        target.clear()
        run = start(target)
        stepper = SpeculativeStepper(
            run, Scripted(answer, width), FixedWidth({"ngram": width - 1}),
            make_rollback(mode, target),
        )  # fmt: skip
        stepper.prompt_done()
        results: list[StepResult] = []
        started = perf_counter()
        times: list[float] = []
        while len(results) < steps and run.sequence.emitted + width < len(answer):
            step_started = perf_counter()
            results.append(stepper.step())
            times.append((perf_counter() - step_started) * 1000.0)
        seconds = perf_counter() - started
        emitted = run.sequence.emitted
        facts: dict[str, Any] = {
            "resident_mib": (resident_bytes() - before) / 2**20,
            "steps": len(results),
            "step_ms": seconds * 1000.0 / len(results),
            "step_ms_median": median(times),
            "tokens_per_step": emitted / len(results),
            "tokens_per_second": emitted / seconds,
            "same_text": run.sequence.tokens[len(PROMPT) :] == list(answer[:emitted]),
        }
        if mode == "checkpoint":
            facts |= alone(target)
        return facts


def alone(target: LlamaTarget) -> dict[str, float]:
    """Milliseconds of one checkpoint and of one restore after a row."""
    saving, restoring = [], []
    for _ in range(9):
        started = perf_counter()
        target.checkpoint()
        saving.append((perf_counter() - started) * 1000.0)
        target.decode([300], target.length(), "none")
        target.wait()
        started = perf_counter()
        target.restore()
        restoring.append((perf_counter() - started) * 1000.0)
    return {"checkpoint_ms": median(saving), "restore_ms": median(restoring)}


def main() -> None:
    """Measure every mode and width in turn; the last line is one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=10, help="steps of each setting")
    arguments = parser.parse_args()
    if os.environ.get(AT_ONCE[0]) != AT_ONCE[1]:
        os.environ[AT_ONCE[0]] = AT_ONCE[1]
        os.execv(sys.executable, [sys.executable, *sys.argv])
    path = arguments.model or geometries.model("qwen3.5-0.8b", "q8_0")
    threads = arguments.threads or physical_cores()
    modes: dict[str, dict[int, dict[str, Any]]] = {"snapshots": {}, "checkpoint": {}}
    with load_safely(path) as model:
        answer, base = plain(model, threads, 8 * arguments.steps + 32)
        for width in WIDTHS:
            for mode, widths in modes.items():
                facts = measure(
                    model, cast("RollbackMode", mode), width, answer, threads, arguments.steps
                )
                facts["extra_mib"] = facts["resident_mib"] - base["resident_mib"]
                facts["extra_copies"] = facts["extra_mib"] / base["state_mib"]
                widths[width] = facts
    rows = [
        (
            f"{mode}, width {width}",
            f"{facts['extra_mib']:.1f}",
            f"{facts['extra_copies']:.2f}",
            f"{facts['step_ms']:.0f}",
            f"{facts['step_ms_median']:.0f}",
            f"{facts['tokens_per_step']:.2f}",
            f"{facts['tokens_per_second']:.2f}",
            "yes" if facts["same_text"] else "no",
        )
        for mode, widths in modes.items()
        for width, facts in widths.items()
    ]
    header = (
        "",
        "extra MiB",
        "copies",
        "step ms",
        "median",
        "tokens/step",
        "tokens/s",
        "same text",
    )
    print(common.table(header, rows))
    print(f"plain: {base['token_ms']:.0f} ms a token; one copy: {base['state_mib']:.1f} MiB")
    document = {
        "model": path.name,
        "threads": threads,
        "plain": base,
        "modes": modes,
    }
    common.save("rollback", document, arguments.output)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
