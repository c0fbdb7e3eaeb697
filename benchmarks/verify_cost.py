"""What a verify of n rows costs against one row and against ggml's kernels, with prompt, load and
memory, in one run per target.

    python benchmarks/verify_cost.py [--targets default,qwen2.5-0.5b-q4_k_m]

Both kinds of kernels take turns in two processes; stock's better attention setting counts. The
Qwen targets have real sizes and random weights (`geometries.py`). Targets that are left out keep
what they have in results/verify_cost.json. Run it on an idle machine; the last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import children
import common
import geometries

from dspine.default_pair import default_target
from dspine.engine.llama_target import LlamaTarget
from dspine.llama.context import Context
from dspine.llama.library import find_library
from dspine.llama.model import Model

ROWS = (1, 2, 4, 8, 16)
DEPTH = 256
PROMPT = 512
TARGETS = (
    "default",
    *(f"qwen2.5-{size}-{mixture}" for size in ("0.5b", "1.5b") for mixture in geometries.MIXTURES),
)
SETTINGS = {"stock": (False, True), "dspine": (True,)}
"""Flash attention; with our kernels it is always on."""

LOADS = 3
TURNS_AT_LEAST = 3
RESULT = common.RESULTS / "verify_cost.json"


class Worker:
    """One kind of kernels on one target, in a process of its own."""

    def __init__(self, path: Path, threads: int) -> None:
        kernels = find_library().kernels.text
        self._threads = threads
        began = perf_counter()
        self._model = Model.load(path)
        self._contexts = {True: self._context(True)}
        self._tokens = [(7919 * i + 11) % self._model.vocab_size for i in range(PROMPT + max(ROWS))]
        self._contexts[True].decode(self._tokens[:1], 0, "all")
        self._contexts[True].logits(0)
        self._loaded = {"ms": 1e3 * (perf_counter() - began), "kernels": kernels}

    def loaded(self) -> dict[str, Any]:
        """Time from opening the file to the first logits."""
        return self._loaded

    def prompt(self, flash: bool) -> float:
        """Milliseconds of a prompt; its first DEPTH tokens stay for `rows`."""
        if flash not in self._contexts:
            self._contexts[flash] = self._context(flash)
        target = self._contexts[flash]
        target.clear()
        began = perf_counter()
        target.decode(self._tokens[:PROMPT], 0, "none")
        spent = perf_counter() - began
        target.trim(DEPTH)
        return 1e3 * spent

    def rows(self, flash: bool, count: int, repeats: int) -> list[float]:
        """Milliseconds of decodes of `count` rows with logits, after DEPTH tokens."""
        target, times = self._contexts[flash], []
        for _ in range(repeats):
            began = perf_counter()
            target.decode(self._tokens[DEPTH : DEPTH + count], DEPTH, "all")
            target.logits(count - 1)
            times.append(1e3 * (perf_counter() - began))
            target.trim(DEPTH)
        return times

    def memory(self) -> dict[str, float]:
        """MiB of this process: resident, that without pages of files, and the most it had."""
        found = common.memory_mib()
        return {
            "resident": found["VmRSS"],
            "private": found["RssAnon"],
            "peak": found["VmHWM"],
        }

    def _context(self, flash: bool) -> LlamaTarget:
        return LlamaTarget(
            Context(
                self._model,
                n_ctx=PROMPT + max(ROWS),
                n_threads=self._threads,
                flash_attention=flash,
                max_outputs=max(ROWS),
            )
        )


def measure(path: Path, threads: int, seconds: float) -> dict[str, Any]:
    """Load, memory, prompt and rows of both, in turns for about `seconds`."""
    began = perf_counter()
    with path.open("rb") as file:
        while file.read(1 << 24):
            pass  # the first load must not be the only one that reads the disk
    arguments = (Path(__file__), str(path), "--threads", str(threads))
    loads: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        workers = {}
        for turn in range(LOADS):
            for kind in children.KINDS:
                worker = children.Child(kind, *arguments)
                loaded = worker.ask("loaded")
                children.check_kernels(kind, loaded["kernels"])
                loads[kind].append(loaded["ms"])
                if turn + 1 < LOADS:
                    worker.close()
                else:
                    workers[kind] = stack.enter_context(worker)
        cases = [(kind, flash) for kind in children.KINDS for flash in SETTINGS[kind]]
        prompts: dict[str, list[float]] = defaultdict(list)
        memory = {}
        for kind, worker in workers.items():
            prompts[_name(kind, True)].append(worker.ask("prompt", flash=True))
            worker.ask("rows", flash=True, count=max(ROWS), repeats=1)
            memory[kind] = worker.ask("memory")
        prompts[_name("stock", False)].append(workers["stock"].ask("prompt", flash=False))
        times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        turn = 0
        while turn < TURNS_AT_LEAST or perf_counter() - began < seconds:
            for count in ROWS:
                for kind, flash in cases:
                    found = workers[kind].ask("rows", flash=flash, count=count, repeats=3)
                    times[_name(kind, flash)][count] += found[1:]  # the first builds the graph
            turn += 1
    return summary(path, loads, prompts, memory, times)


def summary(
    path: Path,
    loads: dict[str, list[float]],
    prompts: dict[str, list[float]],
    memory: dict[str, dict[str, float]],
    times: dict[str, dict[int, list[float]]],
) -> dict[str, Any]:
    middle = {
        name: {str(n): statistics.median(values) for n, values in table.items()}
        for name, table in times.items()
    }
    stock_names = [_name("stock", flash) for flash in SETTINGS["stock"]]
    # The better setting for verifying as a whole, as calibration would choose it.
    better = min(stock_names, key=lambda name: sum(middle[name].values()))
    stock, ours = middle[better], middle[_name("dspine", True)]
    prompt = {name: statistics.median(values) for name, values in prompts.items()}
    load = {kind: statistics.median(values) for kind, values in loads.items()}
    return {
        "file": path.name,
        "file_mib": path.stat().st_size / 2**20,
        "turns": len(next(iter(times.values()))[ROWS[0]]),
        "rows_ms": middle,
        "rows_best_ms": {
            name: {str(n): min(values) for n, values in table.items()}
            for name, table in times.items()
        },
        "prompt_ms": prompt,
        "load_ms": load,
        "memory_mib": memory,
        "stock_setting": better,
        "cost_of_rows": {
            "stock": {n: ms / stock["1"] for n, ms in stock.items()},
            "dspine": {n: ms / ours["1"] for n, ms in ours.items()},
        },
        "dspine_over_stock": {
            "rows": {n: ours[n] / stock[n] for n in ours},
            "prompt": prompt[_name("dspine", True)] / min(prompt[name] for name in stock_names),
            "load": load["dspine"] / load["stock"],
            "resident": memory["dspine"]["resident"] / memory["stock"]["resident"],
        },
    }


def _name(kind: str, flash: bool) -> str:
    return f"{kind}, flash attention {'on' if flash else 'off'}"


def show(name: str, found: dict[str, Any]) -> None:
    """The table of one target."""
    ours = found["rows_ms"][_name("dspine", True)]
    stock = found["rows_ms"][found["stock_setting"]]
    lines = [
        (f"{found['stock_setting']}, ms", *(f"{ms:.1f}" for ms in stock.values())),
        ("dspine, ms", *(f"{ms:.1f}" for ms in ours.values())),
        ("stock, rows", *(f"{x:.2f}" for x in found["cost_of_rows"]["stock"].values())),
        ("dspine, rows", *(f"{x:.2f}" for x in found["cost_of_rows"]["dspine"].values())),
        ("dspine / stock", *(f"{x:.2f}" for x in found["dspine_over_stock"]["rows"].values())),
    ]
    print(common.table((name, *ours), lines))
    rest = {k: round(v, 2) for k, v in found["dspine_over_stock"].items() if k != "rows"}
    print(f"dspine / stock: {rest}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="for each target, about")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        worker = Worker(args.child, args.threads)
        names = ("loaded", "prompt", "rows", "memory")
        children.serve({name: getattr(worker, name) for name in names})
        return
    kept = {}
    if args.output.exists():
        kept = json.loads(args.output.read_text(encoding="utf-8"))["targets"]
    for name in args.targets.split(","):
        found = measure(_file(name), args.threads, args.seconds)
        show(name, found)
        here = common.provenance()
        kept[name] = {**{k: here[k] for k in ("date", "commit", "modified")}, **found}
        document = {"threads": args.threads, "depth": DEPTH, "prompt": PROMPT, "targets": kept}
        common.save("verify_cost", document, args.output)
    print(json.dumps(document))


def _file(name: str) -> Path:
    if name == "default":
        return default_target()
    geometry = next((g for g in geometries.GEOMETRIES if name.startswith(f"{g}-")), None)
    if geometry is None:
        raise SystemExit(f"{name} is no target: choose among {', '.join(TARGETS)}")
    return geometries.model(geometry, name.removeprefix(f"{geometry}-"))


if __name__ == "__main__":
    main()
