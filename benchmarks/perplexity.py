"""Perplexity of a target with ggml's kernels and with ours on the same text.

The exit status is 1 when they differ by more than 0.3 %.

    python benchmarks/perplexity.py [--tokens 50000] [-m FILE]

The text is the documentation strings of the running Python's standard library, which is on every
machine that can run this, in windows of 512 tokens without overlap. Both kinds go window
by window; no time is measured, so other work on the machine does no harm. The last line is one JSON
document.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import platform
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import children
import common
import numpy as np

from dspine.default_pair import default_target
from dspine.engine.llama_target import LlamaTarget
from dspine.llama.context import Context
from dspine.llama.library import find_library
from dspine.llama.model import Model

WINDOW = 512
MOST_DIFFERENCE = 0.003
_SKIPPED = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages")
_CHARACTERS_A_TOKEN = 8
"""More than there are, so that the text is long enough."""


def documentation() -> Iterator[str]:
    """Documentation strings of the standard library's modules, classes and functions, by file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if any(part in _SKIPPED for part in file.relative_to(root).parts):
            continue
        tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text


def text_of(characters: int) -> str:
    """The first `characters` of the documentation, its strings parted by empty lines."""
    parts, length = [], 0
    for part in documentation():
        parts.append(part)
        length += len(part) + 2
        if length >= characters:
            break
    return "\n\n".join(parts)[:characters]


class Worker:
    """One kind of kernels, in a process of its own."""

    def __init__(self, path: Path, threads: int, tokens: int, text: Path) -> None:
        self._kernels = find_library().kernels.text
        model = Model.load(path)
        context = Context(
            model, n_ctx=WINDOW, n_threads=threads, flash_attention=True, max_outputs=WINDOW
        )
        self._target = LlamaTarget(context)
        self._tokens = model.tokenizer.encode(text.read_text(encoding="utf-8"))[:tokens]

    def start(self) -> dict[str, Any]:
        """What computes here, and the number of tokens."""
        return {"kernels": self._kernels, "tokens": len(self._tokens)}

    def score(self, start: int) -> dict[str, Any]:
        """Sum of -ln p over the tokens of the window but its first, and each row's arg-max."""
        tokens = self._tokens[start : start + WINDOW]
        self._target.clear()
        self._target.decode(tokens, 0, "all")
        total, best = 0.0, []
        for row, token in enumerate(tokens[1:]):
            logits = self._target.logits(row).astype(np.float64)
            top = logits.max()
            total += top + math.log(np.exp(logits - top).sum()) - logits[token]
            best.append(int(logits.argmax()))
        return {"total": float(total), "best": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-m", "--model", type=Path, help="target GGUF (default: the default one)")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=50_000)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--text", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        worker = Worker(args.child, args.threads, args.tokens, args.text)
        children.serve({"start": worker.start, "score": worker.score})
        return
    path = args.model or default_target()
    document = compare(path, args.threads, args.tokens)
    for kind, value in document["perplexity"].items():
        print(f"{kind}: {value:.4f}")
    relative, error = document["difference"], document["standard_error"]
    print(f"difference {100 * relative:+.3f} % (standard error {100 * error:.3f})")
    common.save("perplexity", document, args.output)
    print(json.dumps(document))
    if not abs(relative) <= MOST_DIFFERENCE:
        raise SystemExit(1)


def compare(path: Path, threads: int, tokens: int) -> dict[str, Any]:
    """Both kinds of kernels on the same windows of text, in turn."""
    sums = dict.fromkeys(children.KINDS, 0.0)
    differences: list[float] = []
    scored = same = 0
    with ExitStack() as stack:
        text = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "text"
        text.write_text(text_of(tokens * _CHARACTERS_A_TOKEN), encoding="utf-8")
        options = (
            *("--threads", str(threads)),
            *("--tokens", str(tokens)),
            *("--text", str(text)),
        )
        workers = {
            kind: stack.enter_context(children.Child(kind, Path(__file__), str(path), *options))
            for kind in children.KINDS
        }
        for kind, child in workers.items():
            found = child.ask("start")
            children.check_kernels(kind, found["kernels"])
            count = found["tokens"]
        for start in range(0, count - WINDOW + 1, WINDOW):
            for child in workers.values():
                child.send("score", start=start)
            answers = {kind: child.receive() for kind, child in workers.items()}
            stock, ours = answers["stock"], answers["dspine"]
            for kind, answer in answers.items():
                sums[kind] += answer["total"]
            differences.append((ours["total"] - stock["total"]) / (WINDOW - 1))
            same += sum(a == b for a, b in zip(stock["best"], ours["best"], strict=True))
            scored += WINDOW - 1
            if len(differences) % 10 == 0:
                print(f"{len(differences)} windows", flush=True)
    perplexity = {kind: math.exp(total / scored) for kind, total in sums.items()}
    return {
        "file": path.name,
        "text": f"documentation strings of Python {platform.python_version()}'s standard library",
        "tokens_scored": scored,
        "windows": len(differences),
        "perplexity": perplexity,
        "difference": perplexity["dspine"] / perplexity["stock"] - 1,
        "standard_error": float(np.std(differences, ddof=1) / math.sqrt(len(differences))),
        "same_arg_max": same / scored,
    }


if __name__ == "__main__":
    main()
