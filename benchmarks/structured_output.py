"""JSON of a schema, plain and speculative: valid, the same, how many drafts stay, what masks cost.

Every task is answered a third time without the drafts that a grammar forces; the steps that they
save are the difference.

python benchmarks/structured_output.py --count 12
python benchmarks/structured_output.py --first 200 --count 100 --part 10 -o fresh.json
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any
from unittest import mock

import common
import numpy as np
from json_tasks import JsonTask, is_valid, json_tasks

import dspine
from dspine.default_pair import choose_pair
from dspine.engine.stats import ProposerStats
from dspine.llama.library import find_library
from dspine.text.forced import NOT_FORCED
from dspine.text.matcher import GrammarMatcher, Grammars

DRAFTS = 3
BEST = 3
"""Most likely tokens whose log-probabilities are compared."""


def main() -> None:
    """The last line is one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.add_argument("--proposer", default="dspine", choices=["dspine", "ngram", "auto"])
    parser.add_argument("--first", type=int, default=0, help="number of the first task")
    parser.add_argument("--part", type=int, help="tasks of this run; the next one goes on there")
    parser.set_defaults(count=200, predict=256)
    arguments = parser.parse_args()
    model, drafter = choose_pair(arguments.model, arguments.model_draft)
    output = arguments.output or common.RESULTS / "structured_output.json"
    rows: list[dict[str, Any]] = []
    if arguments.part and output.exists():
        rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    tasks = json_tasks(arguments.first + arguments.count)[arguments.first :]
    tasks = tasks[len(rows) :][: arguments.part]
    with dspine.load(
        model,
        drafter,
        n_threads=arguments.threads,
        n_ctx=1024,
        proposer=arguments.proposer,
        spec_draft_n_max=DRAFTS,
        calibrate=False,
    ) as engine:
        started = perf_counter()
        grammars = Grammars(engine.tokenizer)
        grammars.matcher(dspine.GrammarOptions.json_schema({}))
        table_ms = (perf_counter() - started) * 1000.0
        rows += [answer(engine, task, arguments.predict) for task in tasks]
        masks = mask_times(engine, grammars)
        kernels = find_library().kernels.family
    document = {"proposer": arguments.proposer, "kernels": kernels, "threads": arguments.threads}
    document |= summary(rows) | {"vocabulary_ms": round(table_ms, 1), "mask_us": masks}
    print(common.table(("", "value"), list(document.items())))
    common.save("structured_output", document | {"rows": rows}, output)
    print(json.dumps(document))


def answer(engine: dspine.Engine, task: JsonTask, predict: int) -> dict[str, Any]:
    """One task both ways."""
    grammar = dspine.GrammarOptions.json_schema(task.schema)

    def ask(plain: bool) -> dspine.Result:
        return engine.complete(
            task.prompt, grammar=grammar, max_tokens=predict, logprobs=BEST, plain=plain
        )

    slow, fast = ask(True), ask(False)
    with mock.patch.object(GrammarMatcher, "forced", return_value=NOT_FORCED):
        unforced = ask(False)
    forced = fast.stats.proposers.get("grammar", ProposerStats())
    identical = all(
        (slow.tokens, slow.text, slow.reason) == (other.tokens, other.text, other.reason)
        for other in (fast, unforced)
    )
    reproduced = identical
    if not identical:
        told = engine.compare(task.prompt, grammar=grammar, max_tokens=predict).divergence
        reproduced = told is None or told.reproduced
    return {
        "id": task.id,
        "identical": identical,
        "reproduced": reproduced,
        "valid": all(follows(result, task) for result in (slow, fast, unforced)),
        "cut": fast.reason == "length",
        "tokens": len(fast.tokens),
        "steps": fast.stats.steps,
        "drafted": fast.stats.drafted,
        "accepted": fast.stats.accepted,
        "forced_drafted": forced.drafted,
        "forced_accepted": forced.accepted,
        "steps_without_forced": unforced.stats.steps,
        "plain_ms": round(slow.stats.wall_ms, 1),
        "ms": round(fast.stats.wall_ms, 1),
        "logprob_gap": logprob_gap(slow, fast) if identical else None,
    }


def follows(result: dspine.Result, task: JsonTask) -> bool:
    """Valid JSON of the schema; an answer that says it was cut counts as not refuted."""
    if result.reason == "length":
        return True
    try:
        return is_valid(json.loads(result.text), task.schema)
    except ValueError:
        return False


def logprob_gap(one: dspine.Result, other: dspine.Result) -> float:
    """The largest difference of any reported log-probability, in nats."""
    pairs = zip(one.logprobs or (), other.logprobs or (), strict=True)
    return max(
        max(
            abs(a.logprob - b.logprob),
            *(abs(p - dict(b.top).get(token, p)) for token, p in a.top),
        )
        for a, b in pairs
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(row["tokens"] for row in rows)
    gaps = [row["logprob_gap"] for row in rows if row["logprob_gap"] is not None]
    plain_ms, ms = sum(row["plain_ms"] for row in rows), sum(row["ms"] for row in rows)
    return {
        "tasks": len(rows),
        "valid": sum(row["valid"] and not row["cut"] for row in rows),
        "cut": sum(row["cut"] for row in rows),
        "invalid": sum(not row["valid"] for row in rows),
        "identical": sum(row["identical"] for row in rows),
        "unexplained": sum(not row["reproduced"] for row in rows),
        "largest_logprob_gap": max(gaps, default=None),
        "tokens": tokens,
        "acceptance_length": round(tokens / sum(row["steps"] for row in rows), 3),
        "acceptance_rate": round(
            sum(row["accepted"] for row in rows) / max(1, sum(row["drafted"] for row in rows)), 3
        ),
        "acceptance_length_without_forced": round(
            tokens / sum(row["steps_without_forced"] for row in rows), 3
        ),
        "forced_drafted": sum(row["forced_drafted"] for row in rows),
        "forced_accepted": sum(row["forced_accepted"] for row in rows),
        "plain_tokens_per_second": round(tokens / plain_ms * 1000.0, 1),
        "tokens_per_second": round(tokens / ms * 1000.0, 1),
    }


def mask_times(engine: dspine.Engine, grammars: Grammars) -> dict[str, float]:
    """Median microseconds at the places of one answer of the first task."""
    (task,) = json_tasks(1)
    grammar = dspine.GrammarOptions.json_schema(task.schema)
    tokens = list(engine.complete(task.prompt, grammar=grammar, max_tokens=128).tokens)
    matcher = grammars.matcher(grammar)
    logits = np.zeros(engine.tokenizer.vocab_size, np.float32)
    checks, masks, accepts = [], [], []
    for place, token in enumerate(tokens):
        ahead = tokens[place : place + DRAFTS]
        checks.append(microseconds(partial(matcher.allowed, ahead)))
        masks.append(microseconds(partial(matcher.mask, logits)))
        accepts.append(microseconds(partial(matcher.accept, token)))
    names = ("check of the drafts", "mask", "accept")
    return {
        name: round(statistics.median(times), 1)
        for name, times in zip(names, (checks, masks, accepts), strict=True)
    }


def microseconds(call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return (perf_counter() - started) * 1e6


if __name__ == "__main__":
    main()
