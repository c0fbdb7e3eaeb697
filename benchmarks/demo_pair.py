"""The default pair on 60 prompts: llama-cpp-python, plain, n-gram, DSpine and auto in one run.

Every prompt is answered by each configuration in turn, so that a slow minute of the machine hits
all of them. Speeds are of decoding only, prefill apart. Run it on an idle machine:

    python benchmarks/demo_pair.py
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import common
from runners import Tally, engine_runner, llama_cpp_python, measure

import dspine
from dspine.default_pair import choose_pair
from dspine.engine.engine import Engine
from dspine.llama.library import find_library


def main() -> None:
    """Run everything, print a table and, as the last line, one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.add_argument(
        "--fixed", type=int, nargs="*", default=[3, 7], help="extra runs of DSpine at N drafts"
    )
    arguments = parser.parse_args()
    model, drafter = choose_pair(arguments.model, arguments.model_draft)
    with ExitStack() as stack:
        runners = {"llama-cpp-python": llama_cpp_python(str(model), stack)}
        plans: dict[str, Any] = {}

        def add(name: str, **options: Any) -> Engine:
            engine = dspine.load(model, drafter, n_threads=arguments.threads, **options)
            stack.enter_context(engine)
            runners[name] = engine_runner(engine, plain=name == "plain")
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
        tallies = measure(
            runners, tokenise, arguments.count, arguments.predict, foreign=["llama-cpp-python"]
        )
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
    main()
