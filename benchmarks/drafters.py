"""How many tokens a verify several drafters give on task sets, from the same answers of the target.

    python benchmarks/drafters.py --name DFlash=runs/dflash --name DSpine=runs/dspine
    python benchmarks/drafters.py --times --name ...

Drafters are checkpoint folders, training runs or GGUF files that read the same layers of the
target. The target answers the prompts at temperature 0 once and its features are captured once
(both kept in the cache folder); every drafter then drafts at every position of those answers, so
that all are measured on the same text. --add keeps the drafters that the result has already. With
--times only the time of a draft is measured, which wants an idle machine, and added to the result.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from common import RESULTS, save, table

from dspine.bench.prompts import TASK_SETS, named_tasks
from dspine.default_pair import default_target
from dspine.files.checkpoint import read_checkpoint
from dspine.files.convert import convert_checkpoint
from dspine.files.drafter_file import read_drafter
from dspine.files.run_folder import choose_checkpoint
from dspine.files.schema import DrafterConfig, tensor_specs
from dspine.machine import cache_folder

RESAMPLES = 4000
WIDTHS = (4, 8)


@dataclass(frozen=True, slots=True)
class Subject:
    """A drafter to be measured: what the table calls it, and where it lies."""

    name: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> Subject:
        """From NAME=PATH."""
        name, separator, path = text.partition("=")
        if not separator or not name or not path:
            raise SystemExit(f"--name {text!r}: expected NAME=PATH")
        return cls(name, Path(path))


def config_of(path: Path) -> tuple[DrafterConfig, Mapping[str, Any]]:
    """Configuration and training record."""
    if path.is_dir():
        folder = read_checkpoint(choose_checkpoint(path))
        return folder.config, folder.record.provenance
    file = read_drafter(path)
    return file.config, file.record.provenance


def shards_of(target: Path, taps: tuple[int, ...], args: argparse.Namespace) -> Path:
    """Answers of the target to the prompts and their features, made where they are missing."""
    from dspine.train.answers import AnswerOptions, generate_answers
    from dspine.train.features import FeatureOptions, capture

    name = f"{target.stem}-{args.count}-{args.predict}"
    folder: Path = args.folder or cache_folder() / "drafters"
    work = folder / name
    work.mkdir(parents=True, exist_ok=True)
    prompts = work / "prompts.jsonl"
    rows = [
        {"id": f"{p.task}/{p.id}", "source": p.task, "prompt": p.prompt}
        for p in named_tasks(TASK_SETS, args.count)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    answers = work / "answers.jsonl"
    generate_answers(
        AnswerOptions(
            target=target,
            prompts=(prompts,),
            output=answers,
            greedy_share=1.0,
            max_tokens=args.predict,
            max_prompt_tokens=512,
            slots=16,
            threads=args.threads,
        )
    )
    shards = work / ("taps-" + "-".join(map(str, taps)))
    capture(
        FeatureOptions(
            target=target,
            answers=(answers,),
            output=shards,
            prompts=prompts,
            taps=taps,
            max_tokens=512 + args.predict,
            seed=None,
            threads=args.threads,
        )
    )
    return shards


def acceptance(subject: Subject, target: Path, shards: Path) -> dict[str, Any]:
    """Lengths by task and slot, with the tokens and verifies of every answer."""
    from dspine.train.evaluate_checkpoint import evaluate_checkpoint

    found = evaluate_checkpoint(subject.path, target, [shards])
    config, provenance = config_of(subject.path)
    options = provenance.get("options", {})
    parameters = {s.torch_name: int(np.prod(s.shape)) for s in tensor_specs(config)}
    frozen = parameters.get("transfer_codes", 0)
    return {
        "kind": config.kind,
        "layers": config.num_layers,
        "block": config.block_size,
        "parameters": sum(parameters.values()),
        "trained_parameters": sum(parameters.values()) - frozen,
        "steps": provenance.get("steps"),
        "anchors": provenance.get("anchors"),
        "options": options,
        "evaluation": found.as_dict(),
        "answers": [
            [a.source, a.id, a.tokens, a.steps, a.unary_steps, a.expected_steps]
            for a in sorted(found.answers, key=lambda a: a.id)
        ],
    }


def interval(
    tokens: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], groups: Sequence[str]
) -> list[float]:
    """95 % bootstrap interval of sum(tokens) / sum(steps) over answers, each task by itself."""
    chosen = resamples(groups)
    values = tokens[chosen].sum(axis=1) / steps[chosen].sum(axis=1)
    return [round(float(x), 4) for x in np.percentile(values, (2.5, 97.5))]


def resamples(groups: Sequence[str]) -> npt.NDArray[np.int64]:
    """(RESAMPLES, n) indices drawn with replacement inside each group; always the same ones."""
    rng = np.random.default_rng(20261129)
    parts = []
    for group in sorted(set(groups)):
        members = np.flatnonzero(np.array(groups) == group)
        parts.append(members[rng.integers(len(members), size=(RESAMPLES, len(members)))])
    return np.concatenate(parts, axis=1).astype(np.int64)


def lengths(answers: Sequence[Sequence[Any]], tasks: Sequence[str]) -> dict[str, Any]:
    """Acceptance length and interval for each task and for all, by rule."""
    found: dict[str, Any] = {}
    for task in (*tasks, "all"):
        rows = [row for row in answers if task in ("all", row[0])]
        groups = [row[0] for row in rows]
        tokens = np.array([row[2] for row in rows])
        entry: dict[str, Any] = {"answers": len(rows), "tokens": int(tokens.sum())}
        for place, rule in ((3, "drafter"), (4, "single"), (5, "expected")):
            steps = np.array([row[place] for row in rows])
            entry[rule] = {
                "length": round(float(tokens.sum() / steps.sum()), 4),
                "interval": interval(tokens, steps, groups),
            }
        found[task] = entry
    return found


def ratio(first: Sequence[Sequence[Any]], second: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Length of `first` over that of `second` on the same answers, with its interval."""
    if [row[1] for row in first] != [row[1] for row in second]:
        raise SystemExit("the drafters were measured on different answers")
    ours = np.array([row[3] for row in first])
    theirs = np.array([row[3] for row in second])
    chosen = resamples([row[0] for row in first])
    values = theirs[chosen].sum(axis=1) / ours[chosen].sum(axis=1)
    return {
        "ratio": round(float(theirs.sum() / ours.sum()), 4),
        "interval": [round(float(x), 4) for x in np.percentile(values, (2.5, 97.5))],
    }


def draft_times(subject: Subject, target: Path, threads: int) -> dict[str, float]:
    """Milliseconds of a draft by width in this machine's runtime, the drafter as Q8_0."""
    from dspine.drafters.kinds import open_drafter
    from dspine.engine.calibrate import time_drafter
    from dspine.llama.model import load_safely

    with TemporaryDirectory() as scratch, load_safely(target) as model:
        path = subject.path
        if path.is_dir():
            path = Path(scratch) / "drafter.gguf"
            convert_checkpoint(subject.path, path, dtype="q8_0")
        file = read_drafter(path)
        drafter = open_drafter(file, model, n_ctx=1024, n_threads=threads)
        try:
            timing = time_drafter(drafter, file.config.feature_size, WIDTHS)
        finally:
            drafter.close()
    return {str(width): round(ms, 3) for width, ms in timing.ms.items()}


def show(document: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: lengths by task, intervals, other rules and what a draft costs."""
    rules = ["single candidates", "expected chain"]
    header = ["drafter", "parameters without codes", *document["tasks"], "all", "95 %", *rules]
    rows = []
    for name, found in document["drafters"].items():
        by_task, times = found["lengths"], found.get("draft_ms", {})
        low, high = by_task["all"]["drafter"]["interval"]
        rows.append(
            [
                name,
                f"{found['trained_parameters'] / 1e6:.1f} M",
                *(f"{by_task[task]['drafter']['length']:.2f}" for task in document["tasks"]),
                f"{by_task['all']['drafter']['length']:.3f}",
                f"{low:.3f} to {high:.3f}",
                *(f"{by_task['all'][rule]['length']:.3f}" for rule in ("single", "expected")),
                f"{times[str(found['block'])]:.2f}" if str(found["block"]) in times else "-",
            ]
        )
    return [*header, "ms a draft"], rows


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same for a page."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(document: Mapping[str, Any]) -> None:
    """Print both, and the ratios."""
    header, rows = show(document)
    print(table(header, rows))
    print("\n" + markdown(header, rows) + "\n")
    for name, found in document["ratios"].items():
        print(f"{name}: {found['ratio']} {found['interval']}")


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", type=Path, help="target GGUF (default: the default one)")
    parser.add_argument("--name", action="append", default=[], help="NAME=PATH of a drafter")
    parser.add_argument("--count", type=int, default=12, help="prompts of each task")
    parser.add_argument("-n", "--predict", type=int, default=128, help="tokens of an answer")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where answers and features are kept")
    parser.add_argument("--add", action="store_true", help="keep the drafters of the result so far")
    parser.add_argument("--times", action="store_true", help="measure the time of a draft only")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "drafters.json")
    args = parser.parse_args()
    subjects = [Subject.parse(text) for text in args.name]
    if not subjects:
        raise SystemExit("name at least one drafter: --name NAME=PATH")
    target: Path = args.model or default_target()
    torch.set_num_threads(args.threads)
    if args.times:
        document = json.loads(args.output.read_text(encoding="utf-8"))
        for subject in subjects:
            found = draft_times(subject, target, args.threads)
            document["drafters"][subject.name]["draft_ms"] = found
            text = json.dumps(document, indent=1, ensure_ascii=False)
            args.output.write_text(text + "\n", encoding="utf-8")
        report(document)
        return
    shards = shards_of(target, config_of(subjects[0].path)[0].taps, args)
    drafters: dict[str, dict[str, Any]] = {}
    if args.add:
        drafters = json.loads(args.output.read_text(encoding="utf-8"))["drafters"]
    drafters |= {subject.name: acceptance(subject, target, shards) for subject in subjects}
    tasks = list(TASK_SETS)
    for one in drafters.values():
        one["lengths"] = lengths(one["answers"], tasks)
    document = {
        "target": target.name,
        "tasks": tasks,
        "prompts_a_task": args.count,
        "answer_tokens": args.predict,
        "threads": args.threads,
        "drafters": drafters,
        "ratios": {
            f"{name} / {base}": ratio(drafters[name]["answers"], drafters[base]["answers"])
            for base, name in itertools.combinations(drafters, 2)
        },
    }
    save("drafters", document, args.output)
    report(document)


if __name__ == "__main__":
    main()
