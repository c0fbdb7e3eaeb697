"""The default pair on 60 prompts: llama-cpp-python, plain, n-gram, DSpine and auto in one run.

Every prompt is answered by each configuration in turn, so that a slow minute of the machine hits
all of them. Speeds are of decoding only, prefill apart. Run it on an idle machine:

    python benchmarks/demo_pair.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import common

import dspine
from dspine.default_pair import choose_pair
from dspine.engine.engine import Engine
from dspine.engine.stats import Stats
from dspine.llama.library import find_library


@dataclass(slots=True)
class Tally:
    """What one configuration did on one task (or on all)."""

    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    host_ms: float = 0.0
    proposers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * 4))
    differing: int = 0

    def add(self, stats: Stats) -> None:
        """Count one answer."""
        self.tokens += stats.tokens
        self.seconds += stats.wall_ms / 1000
        self.steps += stats.steps
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.draft_ms += stats.draft_ms
        self.verify_ms += stats.verify_ms
        self.host_ms += stats.host_ms
        for name, share in stats.proposers.items():
            kept = self.proposers[name]
            for i, value in enumerate((share.steps, share.drafted, share.accepted, share.emitted)):
                kept[i] += value

    def add_foreign(self, tokens: int, seconds: float) -> None:
        """Count an answer of a program that reports nothing but time."""
        self.tokens += tokens
        self.steps += tokens
        self.seconds += seconds

    def to_json(self) -> dict[str, Any]:
        """Totals and the figures derived from them."""
        steps = max(1, self.steps)
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(self.tokens / self.seconds, 2) if self.seconds else 0.0,
            "acceptance_length": round(self.tokens / steps, 4),
            "acceptance_rate": round(self.accepted / self.drafted, 4) if self.drafted else 0.0,
            "draft_ms": round(self.draft_ms / steps, 3),
            "verify_ms": round(self.verify_ms / steps, 3),
            "host_ms": round(self.host_ms / steps, 3),
            "proposers": {
                name: dict(zip(("steps", "drafted", "accepted", "emitted"), counts, strict=True))
                for name, counts in self.proposers.items()
            },
            "answers_unlike_plain": self.differing,
        }


WORKER = "--llama-cpp-python-worker"

Runner = Callable[[list[int], int, Tally], tuple[int, ...]]


def main() -> None:
    """Run everything, print a table and, as the last line, one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.add_argument(
        "--fixed", type=int, nargs="*", default=[3, 7], help="extra runs of DSpine at N drafts"
    )
    arguments = parser.parse_args()
    model, drafter = choose_pair(arguments.model, arguments.model_draft)
    with ExitStack() as stack:
        runners = {"llama-cpp-python": _llama_cpp_python(str(model), stack)}
        plans: dict[str, Any] = {}

        def add(name: str, **options: Any) -> Engine:
            engine = dspine.load(model, drafter, n_threads=arguments.threads, **options)
            stack.enter_context(engine)
            runners[name] = _engine(engine, plain=name == "plain")
            plans[name] = {
                "plan": None if engine.plan is None else asdict(engine.plan),
                "drafting_off": engine.disabled_reason,
            }
            return engine

        tokenise = add("plain", proposer="none")
        for proposer in ("ngram", "dspine", "auto"):
            add(proposer, proposer=proposer)
        for drafts in arguments.fixed:
            add(f"dspine, {drafts} drafts", proposer="dspine", spec_draft_n_max=drafts)
        tallies = _measure(runners, tokenise, arguments.count, arguments.predict)
    _report(tallies)
    document = {
        "kernels": find_library().kernels.text,
        "prompts": arguments.count,
        "predict": arguments.predict,
        "temperature": 0,
        "pair": [model.name, drafter.name if drafter else None],
        "plans": plans,
        "results": {
            name: {task: tally.to_json() for task, tally in tasks.items()}
            for name, tasks in tallies.items()
        },
    }
    common.save("demo_pair", document, arguments.output)
    print(json.dumps(_summary(tallies)))


def _measure(
    runners: dict[str, Runner], tokenise: Engine, count: int | None, predict: int
) -> dict[str, dict[str, Tally]]:
    tallies: dict[str, dict[str, Tally]] = {name: defaultdict(Tally) for name in runners}
    work = common.prompts(count=count)
    for name, runner in runners.items():  # warm-up: buffers, threads, page cache
        runner(tokenise.encode("Say hello."), 16, Tally())
        print(f"ready: {name}", file=sys.stderr)
    for number, (task, _, prompt) in enumerate(work):
        tokens = tokenise.encode(prompt)
        names = list(runners)
        answers = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            answers[name] = runners[name](tokens, predict, tallies[name][task])
        for name in names:
            if name != "llama-cpp-python" and answers[name] != answers["plain"]:
                tallies[name][task].differing += 1
        print(f"{number + 1} of {len(work)} prompts", file=sys.stderr)
    for tasks in tallies.values():
        tasks["all"] = _sum([tasks[task] for task in common.TASKS])
    return tallies


def _engine(engine: Engine, *, plain: bool) -> Runner:
    def run(tokens: list[int], predict: int, tally: Tally) -> tuple[int, ...]:
        result = engine.complete(tokens, max_tokens=predict, plain=plain)
        tally.add(result.stats)
        return result.tokens

    return run


def _llama_cpp_python(model: str, stack: ExitStack) -> Runner:
    """`llama_cpp.Llama` in a process of its own, which no kernels of dspine can reach."""
    worker = stack.enter_context(
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), WORKER, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(worker.terminate)
    requests, replies = worker.stdin, worker.stdout
    assert requests is not None and replies is not None

    def run(tokens: list[int], predict: int, tally: Tally) -> tuple[int, ...]:
        print(json.dumps({"tokens": tokens, "predict": predict}), file=requests, flush=True)
        reply = json.loads(replies.readline())
        tally.add_foreign(max(0, len(reply["tokens"]) - 1), reply["seconds"])
        return tuple(reply["tokens"])

    return run


def _work(model: str) -> None:
    """The worker: `llama_cpp.Llama` with its defaults, but for a context that holds the prompts."""
    from llama_cpp import Llama

    llama = Llama(model, n_ctx=2048, verbose=False)
    end = llama.token_eos()
    for line in sys.stdin:
        request = json.loads(line)
        answer: list[int] = []
        started = last = perf_counter()
        for token in llama.generate(request["tokens"], temp=0.0, reset=True):
            last = perf_counter()
            if not answer:
                started = last  # the first token comes with the prompt
            answer.append(token)
            if token == end or len(answer) == request["predict"]:
                break
        print(json.dumps({"tokens": answer, "seconds": last - started}), flush=True)


def _sum(parts: list[Tally]) -> Tally:
    whole = Tally()
    for part in parts:
        for name in ("tokens", "seconds", "steps", "drafted", "accepted", "differing"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        for name in ("draft_ms", "verify_ms", "host_ms"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        for proposer, counts in part.proposers.items():
            kept = whole.proposers[proposer]
            for i, value in enumerate(counts):
                kept[i] += value
    return whole


def _report(tallies: dict[str, dict[str, Tally]]) -> None:
    columns = (*common.TASKS, "all")
    rows = []
    for name, tasks in tallies.items():
        row: list[object] = [name]
        for task in columns:
            figures = tasks[task].to_json()
            plain = tallies["plain"][task].to_json()["tokens_per_second"]
            speed = figures["tokens_per_second"]
            row.append(f"{speed:.1f} ({speed / plain:.2f}x)")
            row.append(f"{figures['acceptance_length']:.2f}")
        rows.append(row)
    header = ["tokens/s (to plain), accepted"]
    for task in columns:
        header += [task, "al"]
    print(common.table(header, rows))


def _summary(tallies: dict[str, dict[str, Tally]]) -> dict[str, Any]:
    return {
        name: {
            task: [figures["tokens_per_second"], figures["acceptance_length"]]
            for task in (*common.TASKS, "all")
            for figures in (tasks[task].to_json(),)
        }
        for name, tasks in tallies.items()
    }


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        _work(sys.argv[2])
    else:
        main()
