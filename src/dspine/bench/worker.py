"""The process of one configuration: loads an engine and answers requests, a JSON line each.

A process of its own gives every configuration its own peak of memory, its own environment, and
keeps a crash from ending the others.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from dspine.engine.engine import Engine
from dspine.engine.events import Finish, Step
from dspine.engine.load import load
from dspine.engine.sampling import SamplingOptions
from dspine.engine.scheduler import Scheduler
from dspine.errors import CapacityError, DspineError
from dspine.ggml import devices


def main() -> None:
    """Serve standard input until it ends."""
    replies = _own_output()
    try:
        engine = load(**json.loads(sys.stdin.readline()))
    except DspineError as error:
        _reply(replies, {"error": str(error), "exit_code": error.exit_code})
        return
    with engine, ExitStack() as stack:
        _reply(replies, facts(engine))
        scheduler = None
        if engine.slots > 1:
            # One for all batches: what its slots learn of the text lasts, as in a server.
            scheduler = stack.enter_context(closing(engine.scheduler()))
        for line in sys.stdin:
            try:
                _reply(replies, {"answers": answer(engine, scheduler, json.loads(line))})
            except DspineError as error:
                _reply(replies, {"error": str(error), "exit_code": error.exit_code})


def facts(engine: Engine) -> dict[str, Any]:
    """What the configuration turned out to be on this machine."""
    calibration = engine.calibration
    return {
        "proposer": engine.proposer,
        "rollback": engine.rollback,
        "n_ctx": engine.n_ctx,
        "drafting_off": engine.disabled_reason,
        "notices": list(engine.notices),
        "drafter": None if engine.drafter_path is None else engine.drafter_path.name,
        "threads": None if calibration is None else calibration.n_threads,
        "flash_attention": None if engine.plan is None else engine.plan.flash_attention,
    }


def answer(
    engine: Engine, scheduler: Scheduler | None, requests: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Answer requests at once with empty memories; nothing is taken from the answers before.

    Without a scheduler there may be one.
    """
    prompts = [_prompt(engine, request) for request in requests]
    options = [_options(request) for request in requests]
    started = perf_counter()
    if scheduler is None:
        results = [
            engine.complete(prompt, **chosen)
            for prompt, chosen in zip(prompts, options, strict=True)
        ]
        answers = [(result.tokens, Finish(result.reason, result.stats)) for result in results]
    else:
        answers = _together(scheduler, prompts, options)
    span_ms = (perf_counter() - started) * 1000
    return [_row(tokens, finish, span_ms) for tokens, finish in answers]


def _prompt(engine: Engine, request: Mapping[str, Any]) -> list[int]:
    prompt = engine.encode(request["prompt"], raw=request["raw"])
    depth = request["depth"]
    if depth:
        prompt = filler(engine, request["filler"], depth) + prompt
    limit = request["max_tokens"]
    if len(prompt) + limit > engine.n_ctx:
        raise CapacityError(
            f"{len(prompt)} tokens of prompt and {limit} of answer exceed the context of "
            f"{engine.n_ctx}: raise it with -c, or choose a smaller depth"
        )
    return prompt


def _options(request: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "max_tokens": request["max_tokens"],
        "sampling": SamplingOptions(temperature=request["temperature"], seed=request["seed"]),
        "cache_prompt": False,
    }


def _together(
    scheduler: Scheduler, prompts: Sequence[list[int]], options: Sequence[Mapping[str, Any]]
) -> list[tuple[tuple[int, ...], Finish]]:
    """All at once, each to its end; the first error ends all of them."""
    numbers = [
        scheduler.start(prompt, **chosen) for prompt, chosen in zip(prompts, options, strict=True)
    ]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    ends: dict[int, Finish] = {}
    error: Exception | None = None
    while scheduler.free_slots() < scheduler.n_slots:
        for number, event in scheduler.step():
            if isinstance(event, Exception):
                error = error or event
                for other in numbers:
                    scheduler.cancel(other)
            elif isinstance(event, Finish):
                ends[number] = event
            elif isinstance(event, Step):
                tokens[number] += event.tokens
    if error is not None:
        raise error
    return [(tuple(tokens[number]), ends[number]) for number in numbers]


def _row(tokens: Sequence[int], finish: Finish, span_ms: float) -> dict[str, Any]:
    stats = finish.stats
    return {
        "tokens": list(tokens),
        "reason": finish.reason,
        "counted": stats.tokens,
        "wall_ms": stats.wall_ms,
        "span_ms": span_ms,
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "draft_ms": stats.draft_ms,
        "verify_ms": stats.verify_ms,
        "host_ms": stats.host_ms,
        "prompt_tokens": stats.prompt_tokens,
        "prefill_ms": stats.prefill_ms,
        "drafted_at_slot": list(stats.drafted_at_slot),
        "accepted_at_slot": list(stats.accepted_at_slot),
        "peak_mib": peak_mib(),
        "device_mib": device_mib(),
        "proposers": {
            name: {
                "steps": share.steps,
                "drafted": share.drafted,
                "accepted": share.accepted,
                "emitted": share.emitted,
            }
            for name, share in stats.proposers.items()
        },
    }


def filler(engine: Engine, text: str, depth: int) -> list[int]:
    """`depth` tokens of a text, from its beginning again where it is too short."""
    # A token is at most a few characters: encoding more than can be used takes long.
    tokens = engine.encode(text[: 12 * depth], raw=True)
    while len(tokens) < depth:
        tokens += tokens
    return tokens[:depth]


def peak_mib() -> float:
    """Most resident memory that this process has had.

    Linux keeps it for the program itself; what getrusage tells includes who started it.
    """
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    except OSError:
        pass  # another system: there only getrusage knows
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**20 if sys.platform == "darwin" else 2**10)


def device_mib() -> float | None:
    """Memory in use on all graphics cards, by anybody; None where there is none."""
    cards = [device.memory() for device in devices() if device.kind == "gpu"]
    return sum(total - free for free, total in cards) / 2**20 if cards else None


def _own_output() -> TextIO:
    """Standard output for replies alone: whatever else is printed goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _reply(replies: TextIO, row: Mapping[str, Any]) -> None:
    print(json.dumps(row), file=replies, flush=True)


if __name__ == "__main__":
    main()
