"""The process of one configuration: loads an engine and answers requests, a JSON line each.

A process of its own gives every configuration its own peak of memory, its own environment, and
keeps a crash from ending the others.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from dspine.engine.engine import Engine
from dspine.engine.load import load
from dspine.engine.sampling import SamplingOptions
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
    with engine:
        _reply(replies, facts(engine))
        for line in sys.stdin:
            try:
                _reply(replies, answer(engine, json.loads(line)))
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


def answer(engine: Engine, request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one request with an empty memory; nothing is taken from the answer before."""
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
    result = engine.complete(
        prompt,
        max_tokens=limit,
        sampling=SamplingOptions(temperature=request["temperature"], seed=request["seed"]),
        cache_prompt=False,
    )
    stats = result.stats
    return {
        "tokens": list(result.tokens),
        "reason": result.reason,
        "counted": stats.tokens,
        "wall_ms": stats.wall_ms,
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
