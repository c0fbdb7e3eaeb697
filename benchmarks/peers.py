"""The same prompts by other programs and by ours, in one run.

llama-cpp-python with its defaults and with its prompt-lookup decoding, dspine plain, with n-gram
and as auto decides; and llama-server where it is on the path or given, plain and with a DFlash
drafter at its default of 3 drafts. Every prompt is answered by each in turn. Without -t each
program chooses its number of threads, with it all have the same. Run it on an idle machine:

    python benchmarks/peers.py [-t N] [--llama-server PATH] [--dflash FILE]
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
from runners import (
    Runner,
    Tally,
    engine_runner,
    llama_cpp_python,
    llama_server,
    measure,
    server_version,
)

import dspine
from dspine.default_pair import choose_pair
from dspine.engine.engine import Engine
from dspine.llama.library import find_library


def main() -> None:
    """Run everything, print a table and, as the last line, one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.add_argument("--llama-server", help="llama-server (default: the one on the path)")
    parser.add_argument("--dflash", type=Path, help="DFlash drafter GGUF for llama-server and us")
    arguments = parser.parse_args()
    model, drafter = choose_pair(arguments.model, arguments.model_draft)
    binary = arguments.llama_server or shutil.which("llama-server")
    programs: dict[str, str] = {}
    with ExitStack() as stack:
        runners: dict[str, Runner] = {
            name: llama_cpp_python(str(model), stack, lookup=lookup, threads=arguments.threads)
            for name, lookup in (
                ("llama-cpp-python", False),
                ("llama-cpp-python, prompt lookup", True),
            )
        }
        foreign = list(runners)
        if binary is not None:
            programs["llama-server"] = server_version(binary)
            plain = ["-m", str(model)]
            if arguments.threads is not None:
                plain += ["-t", str(arguments.threads)]
            runners["llama-server"] = llama_server(binary, plain, stack)
            if arguments.dflash is not None:
                speculative = ["-md", str(arguments.dflash), "--spec-type", "draft-dflash"]
                runners["llama-server, DFlash"] = llama_server(
                    binary, [*plain, *speculative], stack
                )
            foreign = list(runners)

        def add(name: str, drafts: Path | None, **options: Any) -> Engine:
            engine = dspine.load(model, drafts, n_threads=arguments.threads, **options)
            stack.enter_context(engine)
            runners[name] = engine_runner(engine, plain=name == "plain")
            return engine

        tokenise = add("plain", drafter, proposer="none")
        add("ngram", drafter, proposer="ngram")
        add("auto", drafter, proposer="auto")
        if arguments.dflash is not None:
            add("auto, DFlash", arguments.dflash, proposer="auto")
            add("DFlash, 3 drafts", arguments.dflash, proposer="dspine", spec_draft_n_max=3)
        tallies = measure(runners, tokenise, arguments.count, arguments.predict, foreign=foreign)
    report(tallies)
    document = {
        "programs": programs or {"llama-server": "not on this machine"},
        "kernels": find_library().kernels.text,
        "prompts": arguments.count,
        "predict": arguments.predict,
        "temperature": 0,
        "threads": arguments.threads,
        "dflash": arguments.dflash.name if arguments.dflash else None,
        "pair": [model.name, drafter.name if drafter else None],
        "results": {
            name: {task: tally.to_json() for task, tally in tasks.items()}
            for name, tasks in tallies.items()
        },
    }
    common.save("peers", document, arguments.output)
    print(json.dumps({name: tasks["all"].to_json() for name, tasks in tallies.items()}))


def report(tallies: dict[str, dict[str, Tally]]) -> None:
    """Tokens per second by task, and over those of our plain loop."""
    columns = (*common.TASKS, "all")
    rows = []
    for name, tasks in tallies.items():
        row: list[object] = [name]
        for task in columns:
            plain = tallies["plain"][task].to_json()["tokens_per_second"]
            speed = tasks[task].to_json()["tokens_per_second"]
            row.append(f"{speed:.1f} ({speed / plain:.2f}x)")
        rows.append(row)
    print(common.table(["tokens/s (to plain)", *columns], rows))


if __name__ == "__main__":
    main()
