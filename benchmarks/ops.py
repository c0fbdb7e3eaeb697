"""Where the milliseconds of a decode go, by kind of operation, with ggml's kernels and with ours.

    python benchmarks/ops.py [--rows 1,8] [--depths 256,2048] [-m FILE]

Two threads, both kinds in turn, flash attention on. A small library (`op_probe.cpp`) loaded before
the unmodified one notes when each thread begins an operation and when it waits; a decode without
notes beside it says how much the notes cost. Times of operations are means over threads. Waiting is
what threads spend at barriers between operations (a wait inside one of our products counts as
product); `outside` is the decode's time outside of the graph. Run it on an idle machine; the last
line is one JSON document.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import children
import common
import numpy as np

from dspine.default_pair import default_target
from dspine.engine.llama_target import LlamaTarget
from dspine.ggml.library import CTensor
from dspine.ggml.types import type_by_number
from dspine.kernels.build import find_compiler
from dspine.llama.context import Context
from dspine.llama.library import find_library
from dspine.llama.model import Model

ROWS = (1, 2, 4, 8, 16, 32)
DEPTHS = (256, 2048, 8192)
HEADS = ("output.weight", "token_embd.weight")
KINDS = {
    "FLASH_ATTN_EXT": "attention",
    "SOFT_MAX": "attention",
    "RMS_NORM": "norms",
    "NORM": "norms",
    "L2_NORM": "norms",
    "ROPE": "rope",
    "ADD": "elementwise",
    "MUL": "elementwise",
    "GLU": "elementwise",
    "UNARY": "elementwise",
    "SCALE": "elementwise",
    "CPY": "copies",
    "CONT": "copies",
    "DUP": "copies",
    "SET_ROWS": "copies",
    "GET_ROWS": "copies",
}
_GRAPH, _OPERATION, _WAIT, _RESUME, _END = range(5)


class Probe:
    """The notes of `op_probe.cpp` in this process."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.op_probe_events.restype = ctypes.c_int64
        name_of = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)
        llama = ctypes.CDLL(str(find_library().file))
        self._name_of = name_of(("ggml_op_name", llama))

    def switch(self, on: bool) -> None:
        """Forget all notes; take new ones from now on or not."""
        self._library.op_probe_switch(int(on))

    def by_kind(self) -> dict[str, float]:
        """Milliseconds by kind since the switch, as `account` counts them."""
        threads = [self._events(thread) for thread in range(self._library.op_probe_threads())]
        return account([events.tolist() for events in threads if len(events)], self._kind)

    def _events(self, thread: int) -> Any:
        address = ctypes.c_void_p()
        count = self._library.op_probe_events(thread, ctypes.byref(address))
        if not count:
            return np.empty((0, 3), dtype=np.int64)
        raw = (ctypes.c_int64 * (3 * count)).from_address(address.value or 0)
        return np.ctypeslib.as_array(raw).reshape(count, 3).copy()

    def _kind(self, pointer: int) -> str:
        tensor = CTensor.from_address(pointer)
        name = self._name_of(tensor.op).decode()
        if name != "MUL_MAT":
            return KINDS.get(name, f"other ({name.lower()})")
        weight = CTensor.from_address(tensor.src[0])
        label = weight.name.decode()
        if label in HEADS:
            return "head"
        return f"product {type_by_number(weight.type).name}" if "weight" in label else "attention"


def account(
    threads: Sequence[Sequence[Sequence[int]]], kind_of: Callable[[int], str]
) -> dict[str, float]:
    """Milliseconds by kind, means over threads; `graph` is the time from its start to its end.

    `threads` holds each thread's events (code, nanoseconds, operation) in order. An operation lasts
    until the next barrier, and on after a barrier inside of it.
    """
    found: dict[str, float] = defaultdict(float)
    kinds: dict[int, str] = {}
    for events in threads:
        kind, since = "waiting", 0
        for code, at, operation in events:
            if code == _GRAPH:
                found["graph"] -= at / 1e6
            elif code == _END:
                found["graph"] += at / 1e6
            if since:
                spent = (at - since) / 1e6 / len(threads)
                found["waiting" if code in (_OPERATION, _RESUME, _END) else kind] += spent
            if code == _OPERATION:
                if operation not in kinds:
                    kinds[operation] = kind_of(operation)
                kind = kinds[operation]
            since = 0 if code == _END else at
    return dict(found)


class Worker:
    """One kind of kernels, in a process of its own."""

    def __init__(self, path: Path, threads: int, most: int, probe: Path) -> None:
        self._kernels = find_library().kernels.text
        self._model = Model.load(path)
        self._probe = Probe(probe)
        self._context = Context(
            self._model,
            n_ctx=most + max(ROWS),
            n_threads=threads,
            flash_attention=True,
            max_outputs=max(ROWS),
        )
        self._target = LlamaTarget(self._context)
        size = most + max(ROWS)
        self._tokens = [(7919 * i + 11) % self._model.vocab_size for i in range(size)]

    def kernels(self) -> str:
        """What computes here."""
        return self._kernels

    def fill(self, length: int, file: str) -> int:
        """Decode a prompt of `length` tokens and keep the cache in `file`."""
        for start in range(0, length, self._target.n_batch):
            chunk = self._tokens[start : min(start + self._target.n_batch, length)]
            self._target.decode(chunk, start, "none")
        Path(file).write_bytes(self._context.state.save(0))
        return length

    def take(self, file: str) -> int:
        """Continue after the prompt in `file`."""
        return self._context.state.load(0, Path(file).read_bytes())

    def cut(self, length: int) -> bool:
        """Forget all but `length` tokens."""
        return self._target.trim(length)

    def decode(self, depth: int, count: int, repeats: int) -> list[dict[str, float]]:
        """Milliseconds of decodes by kind, each with one that takes no notes (`undisturbed`)."""
        found = []
        self._once(depth, count)
        for _ in range(repeats):
            undisturbed = self._once(depth, count)
            self._probe.switch(True)
            noted = self._once(depth, count)
            table = self._probe.by_kind()
            self._probe.switch(False)
            table["outside"] = noted - table.pop("graph")
            found.append({**table, "noted": noted, "undisturbed": undisturbed})
        return found

    def _once(self, depth: int, count: int) -> float:
        began = perf_counter()
        self._target.decode(self._tokens[depth : depth + count], depth, "all")
        self._target.logits(count - 1)
        spent = 1e3 * (perf_counter() - began)
        self._target.trim(depth)
        return spent


def compile_probe(folder: Path) -> Path:
    """`op_probe.cpp` as a shared library."""
    made = folder / "op_probe.so"
    source = Path(__file__).with_name("op_probe.cpp")
    flags = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
    subprocess.run([*find_compiler(), *flags, str(source), "-o", str(made), "-ldl"], check=True)
    return made


def show(depth: int, tables: dict[str, dict[str, dict[str, float]]]) -> None:
    """A row for each kind of operation, ggml and ours for each number of rows."""
    counts = list(tables["stock"])
    kinds = sorted({kind for by_count in tables.values() for t in by_count.values() for kind in t})
    last = ("waiting", "outside", "noted", "undisturbed")
    kinds = [*(k for k in kinds if k not in last), *last]
    header = [f"{depth} tokens, ms", *(f"{n} {who}" for n in counts for who in tables)]
    lines = [
        [kind, *(f"{tables[who][n].get(kind, 0.0):.2f}" for n in counts for who in tables)]
        for kind in kinds
    ]
    print(common.table(header, lines) + "\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", type=Path, help="target GGUF (default: the default one)")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--most", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        worker = Worker(args.child, args.threads, args.most, args.probe)
        functions = ("kernels", "fill", "take", "cut", "decode")
        children.serve({name: getattr(worker, name) for name in functions})
        return
    path = args.model or default_target()
    counts = [int(text) for text in args.rows.split(",")]
    depths = sorted((int(text) for text in args.depths.split(",")), reverse=True)
    document: dict[str, Any] = {"file": path.name, "threads": args.threads, "ms": {}}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        probe = compile_probe(folder)
        options = ("--threads", str(args.threads), "--most", str(depths[0]), "--probe", str(probe))
        preload = " ".join(filter(None, (str(probe), os.environ.get("LD_PRELOAD"))))
        workers = {
            kind: stack.enter_context(
                children.Child(kind, Path(__file__), str(path), *options, LD_PRELOAD=preload)
            )
            for kind in children.KINDS
        }
        for kind, child in workers.items():
            children.check_kernels(kind, child.ask("kernels"))
        workers["dspine"].ask("fill", length=depths[0], file=str(folder / "prompt"))
        workers["stock"].ask("take", file=str(folder / "prompt"))
        for depth in depths:
            notes: dict[str, dict[str, list[Any]]] = {k: defaultdict(list) for k in workers}
            for child in workers.values():
                child.ask("cut", length=depth)
            for _ in range(args.repeats):
                for count in counts:
                    for kind, child in workers.items():
                        notes[kind][str(count)] += child.ask(
                            "decode", depth=depth, count=count, repeats=1
                        )
            tables = {
                kind: {count: _median(found) for count, found in by_count.items()}
                for kind, by_count in notes.items()
            }
            show(depth, tables)
            document["ms"][str(depth)] = tables
    common.save("ops", document, args.output)
    print(json.dumps(document))


def _median(found: list[dict[str, float]]) -> dict[str, float]:
    """Of the decode whose time is the median: its parts add up, medians of parts would not."""
    middle = statistics.median_low(table["noted"] for table in found)
    return next(table for table in found if table["noted"] == middle)


if __name__ == "__main__":
    main()
