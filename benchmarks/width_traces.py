"""Traces of real answers for `width.py`: the plain text, and at every position what DSpine drafts.

The text is fixed, so that any policy can be replayed on it afterwards without the models.
Recording needs no idle machine: nothing is timed.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common

import dspine
from dspine.default_pair import choose_pair
from dspine.engine.assemble import LoadOptions, load_parts
from dspine.engine.feed import FeatureFeed


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer. `chains[i]` is what follows the anchor before `answer[i]`, scores beside it."""

    task: str
    id: str
    prompt: list[int]
    answer: list[int]
    chains: list[list[int]]
    scores: list[list[float]]


def load_traces(path: Path) -> list[Recording]:
    """The recordings of a file that `record` wrote."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [Recording(**row) for row in json.load(stream)]


def save_traces(path: Path, traces: list[Recording]) -> None:
    """Write them, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with gzip.open(partial, "wt", encoding="utf-8") as stream:
        json.dump([asdict(trace) for trace in traces], stream, separators=(",", ":"))
    partial.replace(path)


def record(
    path: Path,
    work: list[tuple[str, str, str]],
    *,
    predict: int,
    model: Path | None,
    drafter: Path | None,
    threads: int | None,
) -> list[Recording]:
    """Answer the prompts that `path` does not have yet, and add them to it."""
    traces = load_traces(path) if path.exists() else []
    done = {(trace.task, trace.id) for trace in traces}
    missing = [row for row in work if row[:2] not in done]
    if not missing:
        return traces
    pair = choose_pair(model, drafter)
    with dspine.load(*pair, proposer="none", calibrate=False, n_threads=threads) as engine:
        prompts = [engine.encode(prompt) for _, _, prompt in missing]
    parts = load_parts(_options(pair, threads))
    try:
        for (task, name, _), tokens in zip(missing, prompts, strict=True):
            answer, chains, scores = _record(parts, tokens, predict)
            traces.append(Recording(task, name, tokens, answer, chains, scores))
            save_traces(path, traces)
    finally:
        parts.close()
    return traces


def _record(
    parts: Any, tokens: list[int], predict: int
) -> tuple[list[int], list[list[int]], list[list[float]]]:
    target, drafter = parts.target, parts.drafter
    feed = FeatureFeed(target, drafter, 0)
    feed.truncate(0)
    target.clear()
    end = len(tokens) - 1
    for position in range(0, end, target.n_batch):
        chunk = tokens[position : min(position + target.n_batch, end)]
        target.decode(chunk, position, "none")
        feed.take(position, 0, len(chunk))
    anchor, position = tokens[-1], end
    answer: list[int] = []
    chains: list[list[int]] = []
    scores: list[list[float]] = []
    while len(answer) < predict and position < target.n_ctx - 1:
        feed.flush(position)
        draft = drafter.draft(0, anchor, drafter.block_size)
        target.decode((anchor,), position, "all")
        anchor = target.argmax(0)
        feed.take(position, 0, 1)
        chains.append(list(draft.tokens))
        scores.append([round(score, 4) for score in draft.scores])
        answer.append(anchor)
        position += 1
        if parts.tokenizer.is_end(anchor):
            break
    return answer, chains, scores


def _options(pair: tuple[Path, Path | None], threads: int | None) -> LoadOptions:
    return LoadOptions(
        model=pair[0],
        drafter=pair[1],
        proposer="dspine",
        n_ctx=None,
        n_threads=threads,
        n_batch=512,
        n_gpu_layers=0,
        spec_draft_n_max=None,
        flash_attention=None,
        cache_type_k="f16",
        cache_type_v="f16",
        library=None,
        cache_dir=None,
        probe=True,
        calibrate=False,
        calibrate_anew=False,
        ngram_min_match=2,
        ngram_table=None,
        chat_template=None,
    )


if __name__ == "__main__":
    parser = common.parser(__doc__.split("\n")[0])
    parser.add_argument("traces", type=Path, help="file to add to")
    arguments = parser.parse_args()
    found = record(
        arguments.traces,
        common.prompts(count=arguments.count),
        predict=arguments.predict,
        model=arguments.model,
        drafter=arguments.model_draft,
        threads=arguments.threads,
    )
    print(len(found))
