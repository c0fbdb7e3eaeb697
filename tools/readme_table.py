"""Writes the README's measured table from benchmarks/results/demo_pair.json, and checks it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULT = ROOT / "benchmarks" / "results" / "demo_pair.json"
BEGIN, END = "<!-- demo-pair -->", "<!-- /demo-pair -->"
TASKS = {"gsm8k": "maths", "humaneval": "code", "mt-bench": "prose", "all": "all"}
NAMES = {
    "llama-cpp-python": "`llama_cpp.Llama`, its defaults (half of the cores)",
    "plain": "dspine, plain",
    "ngram": "dspine, n-gram alone",
    "dspine": "dspine, DSpine alone",
    "auto": "dspine, auto",
}


def render(result: dict[str, Any]) -> str:
    """Speeds, ratios to plain and acceptance lengths, with what they were measured on."""
    figures = result["results"]
    lines = [
        "| tokens/s (times plain) | " + " | ".join(TASKS.values()) + " | acceptance length |",
        "| --- |" + " ---: |" * (len(TASKS) + 1),
    ]
    for name, shown in NAMES.items():
        cells = []
        for task in TASKS:
            speed = figures[name][task]["tokens_per_second"]
            ratio = speed / figures["plain"][task]["tokens_per_second"]
            cells.append(f"{speed:.1f} ({ratio:.2f})")
        length = figures[name]["all"]["acceptance_length"]
        lines.append(f"| {shown} | " + " | ".join(cells) + f" | {length:.2f} |")
    machine = result["machine"]
    vector = "/".join(machine["vector"]) or "no vector extensions"
    lines += [
        "",
        (
            f"{result['pair'][0]}, temperature 0, {result['predict']} tokens for 60 prompts "
            f"(20 each of GSM8K, HumanEval, MT-Bench); {machine['cpu']}, {machine['cores']} cores "
            f"({vector}), {result['date'][:10]}, commit {result['commit'][:9]}, "
            "`benchmarks/demo_pair.py`."
        ),
    ]
    return "\n".join(lines)


def difference(readme: Path = README, result: Path = RESULT) -> str | None:
    """A sentence when README and result disagree, else None; both may be still to come."""
    text = readme.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        return f"{readme.name} has no table between {BEGIN} and {END}"
    between = text.split(BEGIN, 1)[1].split(END, 1)[0].strip()
    if not result.exists():
        return f"{result.name} is missing: run benchmarks/demo_pair.py" if between else None
    if between != render(json.loads(result.read_text(encoding="utf-8"))):
        return f"{readme.name}'s table differs from {result.name}: run `make docs`"
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into the README")
    write = parser.parse_args(arguments).write
    if not RESULT.exists():
        print(f"{RESULT.name} is missing: benchmarks/demo_pair.py makes it")
        return int(difference() is not None)
    table = render(json.loads(RESULT.read_text(encoding="utf-8")))
    if write:
        before, rest = README.read_text(encoding="utf-8").split(BEGIN, 1)
        after = rest.split(END, 1)[1]
        README.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    else:
        print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
