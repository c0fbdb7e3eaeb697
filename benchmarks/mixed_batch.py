"""A prompt chunk and the verifies of running answers: one decode for each, or one for both.

    python benchmarks/mixed_batch.py

Three ways, in turn, with dspine's kernels and with ggml's (each its usual attention setting):

apart    caches apart, a decode of the chunk and one of all verifies
one      caches apart, one decode with both, as the scheduler does it for all pieces of a prompt but
         the last; the library divides it into passes itself
unified  one cache for all sequences, one decode with both, which is a single pass

The chunk's sequence comes after those that verify (`behind`) or among them (`between`; apart, it
then adds rows without meaning to the verifies, and in one decode its own). Every row's logits, and
those of one more row after it, are compared with the same sequence decoded alone in a context of
its own. Kinds of kernels that are left out (`--kinds`) keep what they have in
results/mixed_batch.json. Run it on an idle machine; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import children
import common
import numpy as np
import numpy.typing as npt

from dspine.default_pair import default_target
from dspine.engine.llama_target import LlamaTarget, LlamaTargets
from dspine.engine.target import LogitRows, Rows
from dspine.llama.context import Context
from dspine.llama.library import find_library
from dspine.llama.model import Model

SEQUENCES, DEPTH, CHUNK = 4, 256, 64
RUNNING, ROWS = (1, 2, 3), (1, 4, 8)
WAYS = ("apart", "one", "unified")
PARTS = ("verify", "chunk")
"""Of `apart`: what the two decodes cost by themselves."""
FLASH = {"dspine": True, "stock": False}
TURNS_AT_LEAST = 2
RESULT = common.RESULTS / "mixed_batch.json"
LAYOUTS = ("behind", "between")

Case = tuple[str, int, int]
"""Layout, running answers, rows of each."""
CASES: list[Case] = [
    (layout, running, rows)
    for layout in LAYOUTS
    for running in RUNNING
    for rows in ROWS
    if layout == "behind" or running > 1
]


def sequences(layout: str, running: int) -> tuple[list[int], int]:
    """Numbers of those that verify, and of the one whose prompt is read."""
    reading = running if layout == "behind" else 1
    return [number for number in range(running + 1) if number != reading], reading


class Worker:
    """One kind of kernels on the target, in a process of its own."""

    def __init__(self, path: Path, threads: int, flash: bool) -> None:
        self._kernels = find_library().kernels.text
        model = Model.load(path)
        numbers = np.random.default_rng(1).integers(
            1, model.vocab_size, (SEQUENCES, DEPTH + CHUNK + 1)
        )
        self._tokens: list[list[int]] = numbers.tolist()

        def context(cells: int, *, sequences: int = 1, shared: bool = False) -> Context:
            return Context(
                model,
                n_ctx=cells,
                n_sequences=sequences,
                n_threads=threads,
                flash_attention=flash,
                shared_cache=shared,
                max_outputs=CHUNK + SEQUENCES * max(ROWS),
            )

        cells = 2 * DEPTH
        self._own = LlamaTargets(context(cells, sequences=SEQUENCES))
        self._shared = LlamaTargets(context(cells * SEQUENCES, sequences=SEQUENCES, shared=True))
        self._alone = LlamaTarget(context(cells))
        for together in (self._own, self._shared):
            for target, tokens in zip(together.targets, self._tokens, strict=True):
                target.decode(tokens[:DEPTH], 0, "none")
        self._wanted = [self._logits_alone(tokens) for tokens in self._tokens]

    def kernels(self) -> str:
        """Which ones this process computes with."""
        return self._kernels

    def times(self, case: Case, repeats: int) -> dict[str, list[float]]:
        """Milliseconds of each way, after a first time that counts for nothing."""
        layout, running, rows = case
        found: dict[str, list[float]] = defaultdict(list)
        for turn in range(repeats + 1):
            for way in WAYS:
                together = self._shared if way == "unified" else self._own
                began = perf_counter()
                chunk_ms = 0.0
                for parts in self._decodes(way, layout, running, rows, "none"):
                    together.decode(parts)
                    together.wait()
                    chunk_ms = chunk_ms or 1e3 * (perf_counter() - began)
                ms = 1e3 * (perf_counter() - began)
                self._cut(together)
                if turn:
                    found[way].append(ms)
                    if way == "apart":
                        found["chunk"].append(chunk_ms)
                        found["verify"].append(ms - chunk_ms)
        return found

    def differences(self, case: Case) -> dict[str, dict[str, float]]:
        """Of each way: rows, those with other logits than alone, and the largest difference."""
        layout, running, rows = case
        return {way: self._compare(way, layout, running, rows) for way in WAYS}

    def _decodes(
        self, way: str, layout: str, running: int, rows: int, chunk_logits: LogitRows
    ) -> list[list[Rows]]:
        verifying, reading = sequences(layout, running)
        chunk = Rows(reading, self._tokens[reading][DEPTH : DEPTH + CHUNK], DEPTH, chunk_logits)
        verifies = [Rows(n, self._tokens[n][DEPTH : DEPTH + rows], DEPTH, "all") for n in verifying]
        if way != "apart":
            return [sorted([chunk, *verifies])]
        if layout == "between":
            verifies.append(Rows(reading, (0,) * rows, DEPTH + CHUNK, "none"))
        return [[chunk], sorted(verifies)]

    def _compare(self, way: str, layout: str, running: int, rows: int) -> dict[str, float]:
        together = self._shared if way == "unified" else self._own
        verifying, reading = sequences(layout, running)
        counts = {reading: CHUNK, **dict.fromkeys(verifying, rows)}
        found: dict[int, npt.NDArray[np.float32]] = {}
        for parts in self._decodes(way, layout, running, rows, "all"):
            together.decode(parts)
            together.wait()
            for part in parts:
                if part.logits == "all":
                    target = together.targets[part.sequence]
                    found[part.sequence] = _logits(target, counts[part.sequence])
        gaps: list[float] = []
        for number, count in counts.items():
            target = together.targets[number]
            target.trim(DEPTH + count)  # rows without meaning
            target.decode([self._tokens[number][DEPTH + count]], DEPTH + count, "all")
            target.wait()
            wanted = self._wanted[number][: count + 1]
            here = np.concatenate([found[number], _logits(target, 1)])
            gaps += np.abs(here - wanted).max(axis=1).tolist()
        self._cut(together)
        return {
            "rows": len(gaps),
            "different": sum(gap > 0 for gap in gaps),
            "largest_difference": max(gaps),
        }

    def _logits_alone(self, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Rows DEPTH and after, one by one, as plain decoding has them."""
        target = self._alone
        target.clear()
        target.decode(tokens[:DEPTH], 0, "none")
        rows = []
        for position in range(DEPTH, len(tokens)):
            target.decode(tokens[position : position + 1], position, "all")
            target.wait()
            rows.append(_logits(target, 1))
        return np.concatenate(rows)

    @staticmethod
    def _cut(together: LlamaTargets) -> None:
        for target in together.targets:
            target.trim(DEPTH)


def _logits(target: LlamaTarget, count: int) -> npt.NDArray[np.float32]:
    return np.stack([target.logits(row).copy() for row in range(count)])


def measure(
    kind: str, cases: list[Case], path: Path, threads: int, seconds: float
) -> list[dict[str, Any]]:
    """`cases` with one kind of kernels, in turns for about `seconds` from the start on."""
    began, turns = perf_counter(), 0
    times: dict[Case, dict[str, list[float]]] = {case: defaultdict(list) for case in cases}
    with children.Child(kind, Path(__file__), "-m", str(path), "-t", str(threads)) as worker:
        children.check_kernels(kind, worker.ask("kernels"))
        gaps = [worker.ask("differences", case=case) for case in cases]
        while turns < TURNS_AT_LEAST or perf_counter() - began < seconds:
            turns += 1
            for case in cases:
                for way, values in worker.ask("times", case=case, repeats=3).items():
                    times[case][way] += values
    return [
        summary(case, times[case], differences)
        for case, differences in zip(cases, gaps, strict=True)
    ]


def summary(
    case: Case, times: dict[str, list[float]], differences: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Medians, and ratios to `apart` as medians over the turns, in which all ways follow each
    other.
    """
    layout, running, rows = case
    return {
        "layout": layout,
        "running": running,
        "rows": rows,
        "turns": len(times["apart"]),
        "ms": {name: round(statistics.median(values), 3) for name, values in times.items()},
        "best_ms": {name: round(min(values), 3) for name, values in times.items()},
        "ratio": {
            way: [
                round(value, 4)
                for value in statistics.quantiles(
                    [ms / apart for ms, apart in zip(times[way], times["apart"], strict=True)]
                )
            ]
            for way in WAYS[1:]
        },
        "logits": differences,
    }


def show(kind: str, cases: list[dict[str, Any]]) -> None:
    """The table of one kind of kernels."""
    header = (kind, *(f"{name}, ms" for name in (*PARTS, *WAYS)), "one", "unified", "other rows")
    lines = []
    for case in cases:
        counts = [case["logits"][way] for way in WAYS]
        lines.append(
            (
                f"{case['layout']}, {case['running']} x {case['rows']}",
                *(f"{case['ms'][name]:.1f}" for name in (*PARTS, *WAYS)),
                *(f"{case['ratio'][way][1]:.3f}" for way in WAYS[1:]),
                " ".join(f"{count['different']}/{count['rows']}" for count in counts),
            )
        )
    print(common.table(header, lines), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-m", "--model", type=Path, help="target GGUF (default: the default one)")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--kinds", default=",".join(FLASH), help="kernels (default: all)")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="of a verify")
    parser.add_argument("--seconds", type=float, default=75, help="for each kind, about")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    path = args.model or default_target()
    if args.child:
        stock = find_library().kernels.text.startswith("stock")
        worker = Worker(path, args.threads, FLASH["stock" if stock else "dspine"])
        children.serve(
            {name: getattr(worker, name) for name in ("kernels", "times", "differences")}
        )
        return
    kept = {}
    if args.output.exists():
        kept = json.loads(args.output.read_text(encoding="utf-8"))["kinds"]
    for kind in args.kinds.split(","):
        rows = [int(count) for count in args.rows.split(",")]
        chosen = [case for case in CASES if case[2] in rows]
        cases = measure(kind, chosen, path, args.threads, args.seconds)
        show(kind, cases)
        here = common.provenance()
        kept[kind] = {
            **{name: here[name] for name in ("date", "commit", "modified")},
            "file": path.name,
            "threads": args.threads,
            "flash_attention": FLASH[kind],
            "cases": cases,
        }
        common.save("mixed_batch", {"depth": DEPTH, "chunk": CHUNK, "kinds": kept}, args.output)
    print(json.dumps(kept))


if __name__ == "__main__":
    main()
