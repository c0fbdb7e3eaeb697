"""Traces of real answers for `width.py`: the plain text, and at every position what DSpine drafts,
alone and after each lead that a lookup gives there.

The text is fixed, so that any policy can be replayed on it afterwards without the models.
Recording needs no idle machine: nothing is timed.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common

import dspine
from dspine.default_pair import choose_pair
from dspine.engine.assemble import LoadOptions, load_parts
from dspine.engine.feed import FeatureFeed
from dspine.engine.ngram_table import NgramTable
from dspine.engine.proposal import Ask, Confirmed, Proposal
from dspine.engine.proposers import NgramProposer
from dspine.engine.width import FixedWidth
from dspine.files.fingerprint import file_fingerprint

MOST = 15
"""Drafts of a lookup."""

Led = tuple[int, int, list[int], list[float]]
"""Length of a lead, its last token, what DSpine drafts after it, the scores of that. Nothing else
of a lead matters to the transition table."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One answer. `chains[i]` is what follows the anchor before `answer[i]`, scores beside it,
    `leads[i]` what follows there after each lead that the lookups give.
    """

    task: str
    id: str
    prompt: list[int]
    answer: list[int]
    chains: list[list[int]]
    scores: list[list[float]]
    leads: list[list[Led]]


def table_of(drafter: Path) -> NgramTable | None:
    """The table of likely tokens that belongs to a drafter."""
    beside = drafter.with_suffix(".ngram.npz")
    return NgramTable.load(beside) if beside.exists() else None


def made_with(pair: tuple[Path, Path | None]) -> dict[str, str]:
    """Fingerprints of what a trace depends on."""
    files = {"target": pair[0], "drafter": pair[1]}
    if pair[1] is not None and (beside := pair[1].with_suffix(".ngram.npz")).exists():
        files["table"] = beside
    return {name: file_fingerprint(path) for name, path in files.items() if path is not None}


def load_traces(path: Path, origin: dict[str, str]) -> list[Recording]:
    """The recordings of a file that `record` wrote, if they are of that origin."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        stored = json.load(stream)
    if not isinstance(stored, dict) or stored["made_with"] != origin:
        raise SystemExit(f"{path} was recorded with another pair or table: remove it")
    return [Recording(**row) for row in stored["answers"]]


def save_traces(path: Path, traces: list[Recording], origin: dict[str, str]) -> None:
    """Write them, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    document = {"made_with": origin, "answers": [asdict(trace) for trace in traces]}
    with gzip.open(partial, "wt", encoding="utf-8") as stream:
        json.dump(document, stream, separators=(",", ":"))
    partial.replace(path)


class Lookups:
    """What lookups propose along a fixed text."""

    def __init__(self, prompt: Sequence[int], table: NgramTable | None) -> None:
        self.proposer = NgramProposer(FixedWidth({"ngram": MOST}), table=table)
        self.proposer.begin(prompt)
        self._position = len(prompt) - 1

    def here(self) -> list[Proposal]:
        """The proposals after the newest token."""
        return self.proposer.look_up(Ask(0, self._position, MOST))

    def on(self, token: int) -> None:
        """The text goes on with it."""
        self.proposer.confirm(Confirmed(self._position, 0, (token,)))
        self._position += 1


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
    pair = choose_pair(model, drafter)
    origin = made_with(pair)
    traces = load_traces(path, origin) if path.exists() else []
    done = {(trace.task, trace.id) for trace in traces}
    missing = [row for row in work if row[:2] not in done]
    if not missing:
        return traces
    table = table_of(pair[1]) if pair[1] is not None else None
    with dspine.load(*pair, proposer="none", calibrate=False, n_threads=threads) as engine:
        prompts = [engine.encode(prompt) for _, _, prompt in missing]
    parts = load_parts(_options(pair, threads))
    try:
        for (task, name, _), tokens in zip(missing, prompts, strict=True):
            answer, chains, scores, leads = _record(parts, tokens, predict, table)
            traces.append(Recording(task, name, tokens, answer, chains, scores, leads))
            save_traces(path, traces, origin)
            print(len(traces), task, name, len(answer), flush=True)
    finally:
        parts.close()
    return traces


def _record(
    parts: Any, tokens: list[int], predict: int, table: NgramTable | None
) -> tuple[list[int], list[list[int]], list[list[float]], list[list[Led]]]:
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
    lookups = Lookups(tokens, table)
    answer: list[int] = []
    chains: list[list[int]] = []
    scores: list[list[float]] = []
    leads: list[list[Led]] = []
    while len(answer) < predict and position < target.n_ctx - 1:
        feed.flush(position)
        draft = drafter.draft(0, anchor, drafter.block_size)
        leads.append(_led(drafter, anchor, lookups.here()))
        target.decode((anchor,), position, "all")
        anchor = target.argmax(0)
        feed.take(position, 0, 1)
        chains.append(list(draft.tokens))
        scores.append([round(score, 4) for score in draft.scores])
        answer.append(anchor)
        lookups.on(anchor)
        position += 1
        if parts.tokenizer.is_end(anchor):
            break
    return answer, chains, scores, leads


def _led(drafter: Any, anchor: int, lookups: list[Proposal]) -> list[Led]:
    """What the drafter says after each of the first drafts of the lookups."""
    if not drafter.follows:
        return []
    found: dict[tuple[int, int], Led] = {}
    for proposal in lookups:
        for count in range(1, min(len(proposal.tokens), drafter.block_size - 2) + 1):
            lead = proposal.tokens[:count]
            if (count, lead[-1]) not in found:
                led = drafter.draft(0, anchor, drafter.block_size, None, lead).led
                tokens, chances = list(led.tokens), [round(score, 4) for score in led.scores]
                found[count, lead[-1]] = (count, lead[-1], tokens, chances)
    return list(found.values())


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
