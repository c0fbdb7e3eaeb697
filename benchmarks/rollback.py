"""Memory and time of taking drafts back on a hybrid target: snapshots beside one checkpoint.

Half of the drafts on offer are right, rounded down, so that every block that takes all of them
rolls back. Fixed widths take all; `adaptive` is a checkpoint with the policy that cuts them as
they pay. The weights are random, of Qwen3.5-0.8B's sizes: the text is noise, times and bytes are
those of a real one.

    python benchmarks/rollback.py
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from statistics import mean, median
from time import perf_counter
from typing import Any, cast

import common
import geometries

from dspine.engine.adaptive import AdaptiveWidth
from dspine.engine.calibrate import row_counts, time_rows
from dspine.engine.choose import GreedyChooser
from dspine.engine.costs import CostTable, StepCosts
from dspine.engine.emit import Emitter
from dspine.engine.llama_target import LlamaTarget
from dspine.engine.loop import Run, StepResult
from dspine.engine.plain import PlainStepper
from dspine.engine.proposal import NOTHING, Ask, Proposal
from dspine.engine.proposers import NoProposer
from dspine.engine.rollback import MAX_REPLAY, RollbackMode, make_rollback
from dspine.engine.sequence import TokenSequence
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.width import FixedWidth, WidthPolicy
from dspine.llama.context import Context
from dspine.llama.model import Model, load_safely
from dspine.machine import physical_cores

WIDTHS = (2, 4, 8, 16)
MOST = 16
PLAIN_STEPS = 24
"""Plain tokens beside each adaptive answer, which is compared with them."""
PROMPT = [int(x) for x in range(200, 232)]
N_CTX, N_BATCH = 512, 64
AT_ONCE = ("MALLOC_MMAP_THRESHOLD_", "65536")
"""The C library then gives freed memory back at once, and resident sizes can be compared."""


class Scripted(NoProposer):
    """Offers `width - 1` drafts; the first half, rounded down, are what the target says."""

    def __init__(self, answer: Sequence[int], width: int, policy: WidthPolicy) -> None:
        self._answer, self._width, self._policy = answer, width, policy

    def propose(self, ask: Ask) -> Proposal:
        at = ask.position - len(PROMPT) + 1
        right = self._answer[at : at + (self._width - 1) // 2]
        wrong = [(self._answer[at + len(right)] + 1) % 1000] * (self._width - 1 - len(right))
        drafts = (*right, *wrong)[: min(ask.limit, self._width - 1)]
        self._policy.ask([Proposal(drafts, (0.6,) * len(drafts), "ngram")], ask, None)
        return self._policy.choose(NOTHING)


def start(target: LlamaTarget) -> Run:
    """A run whose prompt is in memory."""
    target.decode(PROMPT[:-1], 0, "none")
    emitter = Emitter(lambda _: b"", lambda _: False, max_tokens=None)
    return Run(target, TokenSequence(PROMPT), emitter, GreedyChooser(target))


def plain(model: Model, threads: int, count: int) -> tuple[list[int], CostTable, dict[str, Any]]:
    """The answer that the others must repeat, costs of rows, milliseconds a token, memory."""
    before = common.memory_mib()["RssAnon"]
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
        facts: dict[str, Any] = {
            "token_ms": median(times),
            "resident_mib": common.memory_mib()["RssAnon"] - before,
            "state_mib": context.state.bytes_per_copy(0) / 2**20,
        }
        # As at a start of the engine: what the policies know.
        rows = time_rows({True: target}, list(range(300, 400)), row_counts(MOST), depth=32).ms[True]
        facts["rows_ms"] = rows
        return run.sequence.tokens[len(PROMPT) :], CostTable(rows, {}, 32), facts


def measure(
    model: Model,
    mode: RollbackMode,
    width: int,
    answer: Sequence[int],
    threads: int,
    steps: int,
    costs: CostTable,
    *,
    adaptive: bool = False,
) -> dict[str, Any]:
    """One mode at one width: memory, time of a step, time of saving and restoring alone."""
    known = StepCosts(costs, MOST + MAX_REPLAY)
    policy: WidthPolicy = FixedWidth({"ngram": width - 1}, known)
    if adaptive:
        policy = AdaptiveWidth(known, most_drafts=MOST - 1)
    before = common.memory_mib()["RssAnon"]
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
        beside: list[float] = []
        if adaptive:
            alike = PlainStepper(start(target))
            beside = [alike.step().verify_ms for _ in range(PLAIN_STEPS)]
            target.clear()
        run = start(target)
        proposer, rollback = Scripted(answer, width, policy), make_rollback(mode, target)
        stepper = SpeculativeStepper(run, proposer, policy, rollback)
        stepper.begin(0)
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
            "resident_mib": common.memory_mib()["RssAnon"] - before,
            "steps": len(results),
            "step_ms": seconds * 1000.0 / len(results),
            "step_ms_median": median(times),
            "tokens_per_step": emitted / len(results),
            "tokens_per_second": emitted / seconds,
            "same_text": run.sequence.tokens[len(PROMPT) :] == list(answer[:emitted]),
        }
        facts["drafts_per_step"] = sum(result.drafted for result in results) / len(results)
        if adaptive:
            facts["plain_ms_beside"] = mean(beside)
            facts["against_plain"] = mean(beside) * emitted / (seconds * 1000.0)
        elif mode == "checkpoint":
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
    modes: dict[str, dict[int, dict[str, Any]]] = {
        "snapshots": {},
        "checkpoint": {},
        "adaptive": {},
    }
    with load_safely(path) as model:
        answer, costs, base = plain(model, threads, 8 * arguments.steps + 32)
        for width in WIDTHS:
            for mode, widths in modes.items():
                adaptive = mode == "adaptive"
                facts = measure(
                    model,
                    cast("RollbackMode", "checkpoint" if adaptive else mode),
                    width,
                    answer,
                    threads,
                    len(answer) if adaptive else arguments.steps,
                    costs,
                    adaptive=adaptive,
                )
                facts["extra_mib"] = facts["resident_mib"] - base["resident_mib"]
                facts["extra_copies"] = facts["extra_mib"] / base["state_mib"]
                widths[width] = facts
    report(modes, base)
    document = {
        "model": path.name,
        "threads": threads,
        "plain": base,
        "modes": modes,
    }
    common.save("rollback", document, arguments.output)
    print(json.dumps(document))


def report(modes: Mapping[str, Mapping[int, Mapping[str, Any]]], base: Mapping[str, Any]) -> None:
    """Print a row for each mode and width."""
    rows = [
        (
            f"{mode}, width {width}",
            f"{facts['extra_mib']:.1f}",
            f"{facts['extra_copies']:.2f}",
            f"{facts['step_ms']:.0f}",
            f"{facts['step_ms_median']:.0f}",
            f"{facts['tokens_per_step']:.2f}",
            f"{facts['tokens_per_second']:.2f}",
            f"{facts['against_plain']:.2f}" if "against_plain" in facts else "",
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
        "of plain",
        "same text",
    )
    print(common.table(header, rows))
    print(f"plain: {base['token_ms']:.0f} ms a token; one copy: {base['state_mib']:.1f} MiB")


if __name__ == "__main__":
    main()
