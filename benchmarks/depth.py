"""Acceptance and speed against the depth of the context, and what a drafter costs a prefill.

The context is a document (the benchmark's prompts, one after the other), cut so that the question
after it begins at the wanted depth. The network's drafts are fixed in number, so that acceptance
can be compared; `auto` is what a user gets. Prefills are timed batch by batch in turn, with and
without a drafter, so that a disturbance falls on both, and several times over; the least time of
each batch counts. With one thread all times are the processor's, in which the disturbances of a
busy machine hardly show.

python benchmarks/depth.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from time import perf_counter, process_time
from typing import Any

import common

import dspine
from dspine.default_pair import choose_pair
from dspine.drafters.dspine import DSpineDrafter
from dspine.engine.engine import Engine
from dspine.engine.events import Finish, Prefill
from dspine.engine.llama_target import LlamaTarget
from dspine.engine.proposers import DrafterProposer
from dspine.engine.width import FixedWidth
from dspine.llama.context import Context
from dspine.llama.model import Model

DEPTHS = (256, 1024, 2048, 4096, 7680)
PREFILL = 4096
BATCH = 512
DRAFTS = 4


def document_tokens(engine: Engine, count: int) -> list[int]:
    """The first `count` tokens of a text that is long enough."""
    text = "\n\n".join(prompt for _, _, prompt in common.prompts())
    tokens = engine.encode(text, raw=True)
    while len(tokens) < count:
        tokens += tokens
    return tokens[:count]


def answer(
    engine: Engine, prompt: list[int], count: int, clock: Callable[[], float], *, plain: bool
) -> tuple[int, int, float]:
    """(steps, tokens, milliseconds a token) of an answer, its prompt not counted."""
    started = clock()
    for event in engine.generate(prompt, max_tokens=count, plain=plain):
        if isinstance(event, Prefill):
            started = clock()
        elif isinstance(event, Finish):
            spent = (clock() - started) * 1000.0
            return event.stats.steps, event.stats.tokens, spent / event.stats.tokens
    raise AssertionError("an answer without an end")


def at_depths(
    engine: Engine,
    auto: Engine,
    questions: list[str],
    predict: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Acceptance length and milliseconds a token, plain and drafted, where the question begins."""
    found: dict[str, Any] = {}
    for depth in DEPTHS:
        if depth + predict + 256 > engine.n_ctx:
            continue
        head = document_tokens(engine, depth)
        steps = tokens = 0
        ms = {"plain": 0.0, "drafted": 0.0, "auto": 0.0}
        for question in questions:
            prompt = [*head, *engine.encode(question)]
            some, more, each = answer(engine, prompt, predict, clock, plain=False)
            steps, tokens, ms["drafted"] = steps + some, tokens + more, ms["drafted"] + each
            ms["auto"] += answer(auto, prompt, predict, clock, plain=False)[2]
            ms["plain"] += answer(auto, prompt, predict // 2 + 1, clock, plain=True)[2]
        found[str(depth)] = {
            "acceptance_length": round(tokens / steps, 4),
            **{f"{name}_ms": round(sum_ms / len(questions), 2) for name, sum_ms in ms.items()},
            "speedup": round(ms["plain"] / ms["drafted"], 3),
            "speedup_auto": round(ms["plain"] / ms["auto"], 3),
        }
        print(depth, found[str(depth)], flush=True)
    return found


def prefill(
    model: Model,
    drafter: DSpineDrafter,
    tokens: list[int],
    threads: int | None,
    clock: Callable[[], float],
    *,
    rounds: int,
    budget_s: float,
) -> Any:
    """Milliseconds of the same prefill without a drafter, and with its taps and context K/V; of
    the latter `own_ms` is the drafter's own work.

    A round that would end after `budget_s` is not begun.
    """
    n_ctx = len(tokens) + 16
    starts = range(0, len(tokens), BATCH)
    targets = {
        "plain": prefill_target(model, n_ctx, threads, ()),
        "drafter": prefill_target(model, n_ctx, threads, drafter.taps),
    }
    names = tuple(targets)
    ms: dict[str, list[list[float]]] = {name: [[] for _ in starts] for name in names}
    proposer = DrafterProposer(
        FixedWidth({"dspine": DRAFTS}), drafter, targets["drafter"], max_positions=n_ctx
    )
    began, took = perf_counter(), 0.0
    own: list[float] = []
    for turn in range(rounds):
        if perf_counter() - began + took > budget_s:
            break
        turn_began = perf_counter()
        for target in targets.values():
            target.clear()
        proposer.begin(tokens)
        own.append(0.0)
        for index, start in enumerate(starts):
            chunk = tokens[start : start + BATCH]
            for name in names if (index + turn) % 2 else names[::-1]:
                started = clock()
                targets[name].decode(chunk, start, "none")
                if name == "drafter":
                    targets[name].wait()
                    decoded = clock()
                    proposer.saw_prompt(start, len(chunk))
                    if start + BATCH >= len(tokens):
                        proposer.flush(len(tokens))
                    own[-1] += (clock() - decoded) * 1000.0
                targets[name].wait()
                ms[name][index].append((clock() - started) * 1000.0)
        took = perf_counter() - turn_began
    for target in targets.values():
        target.context.close()
    return prefill_row(len(tokens), ms, own)


def prefill_target(
    model: Model, n_ctx: int, threads: int | None, taps: tuple[int, ...]
) -> LlamaTarget:
    """A target that reads prompts in batches."""
    context = Context(
        model,
        n_ctx=n_ctx,
        n_batch=BATCH,
        n_threads=threads,
        flash_attention=True,
        taps=taps,
        max_outputs=16,
    )
    return LlamaTarget(context)


def prefill_row(tokens: int, ms: Mapping[str, list[list[float]]], own: list[float]) -> Any:
    """The least time of each batch over the rounds, and the ratio in each round."""
    done = len(ms["plain"][0])
    each = [
        sum(batch[turn] for batch in ms["plain"]) / sum(batch[turn] for batch in ms["drafter"])
        for turn in range(done)
    ]
    least = {name: sum(map(min, batches)) for name, batches in ms.items()}
    return {
        "tokens": tokens,
        "rounds": done,
        **{f"{name}_ms": round(value, 1) for name, value in least.items()},
        "ratio": round(least["plain"] / least["drafter"], 4),
        "own_ms": round(min(own), 1),
        "ratio_of_each_round": [round(ratio, 4) for ratio in each],
    }


def main() -> None:
    """Both tables; the last line is one JSON document."""
    parser = common.parser(__doc__.split("\n")[0])
    parser.set_defaults(count=1, predict=48)
    parser.add_argument("--only", choices=("depth", "prefill"))
    parser.add_argument("--prefill-tokens", type=int, default=PREFILL)
    parser.add_argument("--rounds", type=int, default=3, help="prefills of each kind")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for all prefills")
    arguments = parser.parse_args()
    path, drafter = choose_pair(arguments.model, arguments.model_draft)
    if drafter is None:
        raise SystemExit("this target has no drafter: name one with -md")
    alone = arguments.threads == 1
    clock = process_time if alone else perf_counter
    document: dict[str, Any] = {"drafts": DRAFTS, "predict": arguments.predict}
    document["times"] = "of the processor, one thread" if alone else "elapsed"
    usual: dict[str, Any] = {"n_threads": arguments.threads, "probe": False}
    options = {**usual, "calibrate": False}
    if arguments.only != "prefill":
        with (
            dspine.load(
                path, drafter, proposer="dspine", spec_draft_n_max=DRAFTS, n_ctx=8192, **options
            ) as engine,
            dspine.load(path, drafter, n_ctx=8192, **usual) as auto,
        ):
            questions = [prompt for _, _, prompt in common.prompts(count=arguments.count)]
            document["depth"] = at_depths(engine, auto, questions, arguments.predict, clock)
    if arguments.only != "depth":
        with dspine.load(path, proposer="none", **options) as engine:
            tokens = document_tokens(engine, arguments.prefill_tokens)
        with (
            Model.load(path) as model,
            DSpineDrafter.load(
                drafter,
                model,
                n_ctx=len(tokens) + 16,
                n_threads=arguments.threads or 1,
            ) as network,
        ):
            document["prefill"] = prefill(
                model,
                network,
                tokens,
                arguments.threads,
                clock,
                rounds=max(1, arguments.rounds),
                budget_s=arguments.budget,
            )
            print(document["prefill"])
    common.save("depth", document, arguments.output)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
