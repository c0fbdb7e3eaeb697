"""Several clients at once against the same requests one after the other.

Every client sends its next request when its last answer is over. All requests are also answered
one after the other by an engine with one sequence, with drafts as here; the ratio is the time of
that over the time with clients, prompts included. Texts are compared token by token.

python benchmarks/concurrency.py -c 1 -c 2 -c 4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import common

import dspine
from dspine.default_pair import choose_pair
from dspine.engine.engine import Engine
from dspine.engine.events import Finish, Step
from dspine.engine.stats import Stats


@dataclass
class Answer:
    """What came of a request."""

    tokens: list[int] = field(default_factory=list)
    stats: Stats | None = None


@dataclass(frozen=True)
class Measured:
    """Answers by request, and the seconds of all."""

    answers: list[Answer]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def share(self, over: str, under: str) -> float:
        """Sum of one count over that of another, over all answers."""
        stats = [answer.stats for answer in self.answers if answer.stats is not None]
        total = sum(getattr(one, under) for one in stats)
        return sum(getattr(one, over) for one in stats) / total if total else 0.0


def alone(engine: Engine, prompts: Sequence[str], predict: int) -> Measured:
    """One request after the other."""
    answers = []
    started = perf_counter()
    for prompt in prompts:
        result = engine.complete(prompt, max_tokens=predict, cache_prompt=False)
        answers.append(Answer(list(result.tokens), result.stats))
    return Measured(answers, perf_counter() - started)


def together(engine: Engine, prompts: Sequence[str], predict: int, clients: int) -> Measured:
    """`clients` requests at a time."""
    scheduler = engine.scheduler(clients)
    answers = [Answer() for _ in prompts]
    waiting, running = list(range(len(prompts))), dict[int, int]()
    started = perf_counter()
    while waiting or running:
        while waiting and scheduler.free_slots():
            index = waiting.pop(0)
            number = scheduler.start(prompts[index], max_tokens=predict, cache_prompt=False)
            running[number] = index
        for number, event in scheduler.step():
            if isinstance(event, Exception):
                raise event
            answer = answers[running[number]]
            if isinstance(event, Step):
                answer.tokens += event.tokens
            elif isinstance(event, Finish):
                answer.stats = event.stats
                del running[number]
    seconds = perf_counter() - started
    scheduler.close()
    return Measured(answers, seconds)


def main() -> None:
    """Measure every number of clients; the last line is one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.set_defaults(count=4, predict=64)
    parser.add_argument("-c", "--clients", type=int, action="append", help="default: 1, 2 and 4")
    parser.add_argument("--proposer", default="auto", help="who proposes (default: auto)")
    parser.add_argument("--draft-max", type=int, help="drafts of every step (default: what pays)")
    arguments = parser.parse_args()
    document = measured(arguments)
    common.save("concurrency", document, arguments.output)
    print(json.dumps(document))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """The document, with a table printed on the way."""
    clients = sorted(set(arguments.clients or (1, 2, 4)))
    model, drafter = choose_pair(arguments.model, arguments.model_draft)
    prompts = [prompt for _, _, prompt in common.prompts(count=arguments.count)]
    predict = arguments.predict

    def load(parallel: int) -> Engine:
        engine = dspine.load(
            Path(model),
            drafter,
            n_threads=arguments.threads,
            proposer=arguments.proposer,
            spec_draft_n_max=arguments.draft_max,
            n_ctx=2048 * parallel,
            parallel=parallel,
        )
        engine.complete("Say hello.", max_tokens=8)
        return engine

    with load(1) as engine:
        reference = alone(engine, prompts, predict)
    found: dict[str, Any] = {}
    with load(max(clients)) as engine:
        for count in clients:
            several = together(engine, prompts, predict, count)
            pairs = list(zip(several.answers, reference.answers, strict=True))
            found[str(count)] = {
                "tokens_per_second": round(several.tokens / several.seconds, 2),
                "ratio": round(reference.seconds / several.seconds, 3),
                "acceptance_rate": round(several.share("accepted", "drafted"), 4),
                "acceptance_length": round(several.share("tokens", "steps"), 3),
                "drafts_a_step": round(several.share("drafted", "steps"), 3),
                "texts_equal": sum(one.tokens == other.tokens for one, other in pairs),
            }
    rows = [
        (f"{count} clients", *(figures[key] for key in ("tokens_per_second", "ratio")),
         figures["acceptance_rate"], figures["acceptance_length"], figures["texts_equal"])
        for count, figures in found.items()
    ]  # fmt: skip
    header = ("", "tokens/s", "ratio", "acceptance", "length", "equal texts")
    print(common.table(header, rows))
    return {
        "requests": len(prompts),
        "predict": predict,
        "proposer": arguments.proposer,
        "draft_max": arguments.draft_max,
        "threads": arguments.threads,
        "alone": {
            "tokens_per_second": round(reference.tokens / reference.seconds, 2),
            "acceptance_rate": round(reference.share("accepted", "drafted"), 4),
            "acceptance_length": round(reference.share("tokens", "steps"), 3),
            "drafts_a_step": round(reference.share("drafted", "steps"), 3),
        },
        "clients": found,
    }


if __name__ == "__main__":
    main()
