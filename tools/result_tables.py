"""Writes the measured tables of the docs from benchmarks/results, and checks that they agree.

A table stands between `<!-- table: NAME -->` and `<!-- /table -->`. README.md's own is in
`readme_table.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n)(.*?)(<!-- /table -->)", re.DOTALL)
DATASETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")
TASKS = {"gsm8k": "maths", "humaneval": "code", "mt-bench": "prose", "all": "all"}

Result = Mapping[str, Any]
Rows = Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Table:
    """Which result a table is made of, and how: its first row is the header."""

    result: str
    rows: Callable[[Result], Rows]


def plan_memory(result: Result) -> Rows:
    """Predicted and measured peaks."""
    rows = [["MiB", "predicted", "measured", "error"]]
    for name, case in result["cases"].items():
        peaks = [f"{case[key]:.0f}" for key in ("peak_mib", "measured_mib")]
        rows.append([name, *peaks, f"{100 * case['error']:+.1f} %"])
    return rows


def kernel_products(result: Result) -> Rows:
    """Times ggml's product takes of ours, by type and rows."""
    counts = list(next(iter(result["ms"].values())))
    rows = [["rows", *counts]]
    for kind, times in result["ms"].items():
        rows.append([kind.upper(), *(f"{times[n][0] / times[n][1]:.1f}" for n in counts)])
    return rows


def decode_rows(result: Result) -> Rows:
    """Milliseconds of a decode of n rows."""
    counts = list(next(iter(result["ms"].values())))
    rows = [["rows", *counts]]
    for name, times in result["ms"].items():
        rows.append([name, *(f"{times[n]:.1f}" for n in counts)])
    return rows


def verify_cost(result: Result) -> Rows:
    """Costs in plain decodes, and ours over stock's."""
    rows = [
        [
            *("target", "8 rows, ours (stock)", "16 rows, ours (stock)", "one row", "8 rows"),
            *(f"prompt of {result['prompt']}", "load", "memory"),
        ]
    ]
    for name, target in result["targets"].items():
        ours = target["rows_ms"]["dspine, flash attention on"]
        stock = target["rows_ms"][target["stock_setting"]]
        costs = [f"{ours[n] / ours['1']:.1f} ({stock[n] / stock['1']:.1f})" for n in ("8", "16")]
        over = target["dspine_over_stock"]
        ratios = [over["rows"]["1"], over["rows"]["8"], over["prompt"]]
        rows.append(
            [
                _model(name),
                *costs,
                *(f"{ratio:.2f}" for ratio in ratios),
                f"{over['load']:.1f}",
                f"{over['resident']:.2f}",
            ]
        )
    return rows


def rollback(result: Result) -> Rows:
    """Memory and speed of both ways back, by width."""
    modes = result["modes"]
    names = ("checkpoint", "snapshots")
    rows = [
        [
            "width",
            *(f"extra, {name}" for name in names),
            *(f"tokens/s, {name}" for name in names),
            "adaptive width, checkpoint",
        ]
    ]
    return rows + [
        [
            width,
            *(f"{modes[name][width]['extra_mib']:.1f} MiB" for name in names),
            *(f"{modes[name][width]['tokens_per_second']:.1f}" for name in names),
            f"{modes['adaptive'][width]['against_plain']:.2f} of plain",
        ]
        for width in modes["checkpoint"]
    ]


def depth(result: Result) -> Rows:
    """Acceptance and speed by the depth at which an answer begins."""
    drafts = result["drafts"]
    rows = [
        [
            *("context", "tokens a verify", "ms a token, plain"),
            *(f"{drafts} drafts of the network", "`auto`"),
        ]
    ]
    for count, found in result["depth"].items():
        speeds = [f"{found[key]:.2f} of plain" for key in ("speedup", "speedup_auto")]
        length, plain = found["acceptance_length"], found["plain_ms"]
        rows.append([count, f"{length:.2f}", f"{plain:.1f}", *speeds])
    return rows


def width(result: Result) -> Rows:
    """Speeds of replayed policies as multiples of plain decoding."""
    speeds = result["results"]["all prompts"]["speed"]
    shown = {
        "network, 1 draft": "dspine 1",
        "network, 3 drafts": "dspine 3",
        "network, 7 drafts": "dspine 7",
        "network, adaptive": "dspine adaptive",
        "network, adaptive, continued by lookups": "dspine adaptive, continued by lookups",
        "lookups, 3 drafts": "lookup 3",
        "lookups, 15 drafts": "lookup 15",
        "lookups, adaptive": "adaptive, lookups",
        "`auto`": "adaptive",
        "`auto` that has seen the text": "in hindsight",
        "one who knows the text": "all-knowing",
    }
    rows = [["times plain", *TASKS.values()]]
    for title, name in shown.items():
        rows.append([title, *(f"{speeds[name][task]:.2f}" for task in TASKS)])
    return rows


def leads(result: Result) -> Rows:
    """What drafts after a lookup bring, at several costs."""
    titles = (f"gain, {title}" for title in TASKS.values())
    rows = [["costs", "`auto`, times plain", *titles, "blocks after a lookup"]]
    for name, found in result["leads"].items():
        gains = [f"{100 * (found['gain'][task] - 1):+.1f} %" for task in TASKS]
        speed, share = found["speed"]["adaptive"]["all"], found["led_share"]
        rows.append([name, f"{speed:.2f}", *gains, f"{100 * share:.1f} % of steps"])
    return rows


def drafters(result: Result) -> Rows:
    """Acceptance lengths of drafters that were trained alike."""
    titles = ("GSM8K", "MATH-500", "HumanEval", "MBPP", "MT-Bench")
    rows = [
        [
            *("drafter", "blocks", "parameters without codes", *titles),
            *("all", "95 %", "single candidates", "expected chain", "ms a draft"),
        ]
    ]
    for name, drafter in result["drafters"].items():
        lengths = drafter["lengths"]
        whole = lengths["all"]
        low, high = whole["drafter"]["interval"]
        times = drafter.get("draft_ms")
        rows.append(
            [
                name,
                f"{drafter['anchors'] / 1e3:.1f} k",
                f"{drafter['trained_parameters'] / 1e6:.1f} M",
                *(f"{lengths[task]['drafter']['length']:.2f}" for task in DATASETS),
                f"{whole['drafter']['length']:.3f}",
                f"{low:.3f} to {high:.3f}",
                *(f"{whole[kind]['length']:.3f}" for kind in ("single", "expected")),
                f"{times[str(drafter['block'])]:.2f}" if times else "-",
            ]
        )
    return rows


def quantize(result: Result) -> Rows:
    """Sizes, draft times and acceptance of a drafter's types."""
    rows = [["type", "MB", "ms a draft", "acceptance length"]]
    for name, kind in result["types"].items():
        rows.append(
            [
                name.upper(),
                f"{kind['megabytes']:.1f}",
                f"{kind['draft_ms']:.1f}",
                f"{kind['acceptance_length']:.2f}",
            ]
        )
    return rows


def fingerprint(result: Result) -> Rows:
    """What is left of the drafts on changed copies of the target."""
    words = {"same": "nothing", "quantised": "quantisation or slight fine-tune"}
    words |= {"changed": "fine-tune", "other": "another model"}
    rows = [["the target", "told", "weights apart", "acceptance length"]]
    for name, copy in result["decoding"].items():
        told = words[copy["told_as"]]
        far = f"{100 * copy['distance']:.1f} %"
        rows.append([name, told, far, f"{copy['acceptance_length']:.2f}"])
    return rows


def peers(result: Result) -> Rows:
    """Tokens a second of other programs and ours, and over our plain loop's."""
    figures = result["results"]
    rows = [["tokens/s (times plain)", *TASKS.values(), "acceptance length"]]
    for name, tasks in figures.items():
        cells = []
        for task in TASKS:
            speed = tasks[task]["tokens_per_second"]
            ratio = speed / figures["plain"][task]["tokens_per_second"]
            cells.append(f"{speed:.1f} ({ratio:.2f})")
        shown = name if name.startswith("llama") else f"dspine, {name}"
        length = f"{tasks['all']['acceptance_length']:.2f}"
        rows.append([shown, *cells, "-" if "lookup" in name else length])
    return rows


def _model(name: str) -> str:
    """`qwen2.5-0.5b-q4_k_m` as people write it."""
    parts = re.fullmatch(r"qwen([\d.]+)-([\d.]+)b-(\w+)", name)
    return f"Qwen{parts[1]}-{parts[2]}B {parts[3].upper()}" if parts else name


TABLES: Mapping[str, Table] = {
    "plan-memory": Table("plan_memory", plan_memory),
    "plan-memory-stock": Table("plan_memory_stock", plan_memory),
    "kernel-products": Table("kernel_products", kernel_products),
    "decode-rows": Table("decode_rows", decode_rows),
    "verify-cost": Table("verify_cost", verify_cost),
    "kernel-products-avx2": Table("kernel_products_avx2", kernel_products),
    "decode-rows-avx2": Table("decode_rows_avx2", decode_rows),
    "verify-cost-avx2": Table("verify_cost_avx2", verify_cost),
    "demo-pair-avx2": Table("demo_pair_avx2", peers),
    "rollback": Table("rollback", rollback),
    "depth": Table("depth", depth),
    "width": Table("width", width),
    "leads": Table("width", leads),
    "drafters": Table("drafters", drafters),
    "quantize": Table("quantize", quantize),
    "fingerprint": Table("fingerprint", fingerprint),
    "peers": Table("peers", peers),
}


def render(rows: Rows) -> str:
    """Rows as a Markdown table, the first column to the left and the others to the right."""
    header, *rest = rows
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rest]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def rewritten(text: str, results: Path) -> str:
    """A page with its tables made anew; KeyError for a name that is no table."""

    def table(match: re.Match[str]) -> str:
        kind = TABLES[match[2]]
        result = json.loads((results / f"{kind.result}.json").read_text(encoding="utf-8"))
        return match[1] + render(kind.rows(result)) + match[4]

    return PLACE.sub(table, text)


def differences(root: Path = ROOT) -> list[str]:
    """A sentence for each page whose tables are not those of the results."""
    found = []
    for page in sorted((root / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if text != rewritten(text, root / "benchmarks" / "results"):
            found.append(f"{page.name}: a table differs from its result: run `make docs`")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    write = parser.parse_args(arguments).write
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        if write:
            page.write_text(rewritten(text, ROOT / "benchmarks" / "results"), encoding="utf-8")
    found = differences()
    print("\n".join(found) or "the measured tables of docs are those of benchmarks/results")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
