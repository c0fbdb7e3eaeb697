"""Answers of the default pair under samplers, as facts for a test to judge; a program.

    python -m tests.support.drawn penalised|drawn

prints one JSON object. It runs in a process of its own, because which kernels compute is decided
once a process.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import dspine
from dspine.engine.engine import Engine
from dspine.engine.sampling import SamplingOptions
from dspine.llama.library import find_library
from tests.support.default_pair import TASKS, held_out

PENALTIES: dict[str, dict[str, Any]] = {
    "repeat": {"repeat_penalty": 1.2},
    "presence and frequency": {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    "short memory": {"repeat_penalty": 1.3, "frequency_penalty": 0.5, "repeat_last_n": 8},
    "dry": {"dry_multiplier": 1.5, "dry_allowed_length": 1},
    "all": {
        "repeat_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "dry_multiplier": 0.8,
        "samplers": ("top_k", "dry", "penalties", "temperature"),
    },
}
TOKENS = 32
DRAWS = 240
DRAWN_FROM: dict[str, Any] = {"temperature": 0.7, "top_k": 8, "top_p": 0.9, "min_p": 0.0}
BEGINNING = "The best season of the year is"
KNOWN = 64
"""Most likely tokens of which the log-probabilities are told; more than top-k keeps."""


def main(part: str) -> dict[str, Any]:
    with dspine.load(
        n_ctx=512, n_threads=1, proposer="dspine", spec_draft_n_max=3, calibrate=False
    ) as engine:
        facts: Any
        if part == "drawn":
            facts = drawn(engine)
        else:
            prompts = [held_out(task, 1)[0].prompt for task in TASKS[:2]]
            facts = [row for prompt in prompts for row in penalised(engine, prompt)]
        return {"kernels": find_library().kernels.family, part: facts}


def penalised(engine: Engine, prompt: str) -> list[dict[str, Any]]:
    """Answers at temperature 0 with penalties, plainly and speculatively."""
    free = engine.complete(prompt, max_tokens=TOKENS, plain=True)
    rows = []
    for name, options in PENALTIES.items():
        sampling = SamplingOptions(**options)
        slow, fast = (
            engine.complete(prompt, max_tokens=TOKENS, sampling=sampling, plain=plain)
            for plain in (True, False)
        )
        rows.append(
            {
                "name": name,
                "plain": slow.tokens,
                "speculative": fast.tokens,
                "reasons": [slow.reason, fast.reason],
                "drafted": fast.stats.drafted,
                "accepted": fast.stats.accepted,
                "changed": slow.tokens != free.tokens,
            }
        )
    return rows


def drawn(engine: Engine) -> dict[str, Any]:
    """Pairs of first tokens after one beginning, how often each came, and the target's own
    log-probabilities: `raw[""]` after the beginning, `raw[token]` after that token.
    """
    start = engine.encode(BEGINNING, raw=True)
    pairs: Counter[str] = Counter()
    drafted = accepted = 0
    for seed in range(DRAWS):
        sampling = SamplingOptions(seed=seed, verification="rejection", **DRAWN_FROM)
        answer = engine.complete(start, max_tokens=3, sampling=sampling)
        pairs[" ".join(str(token) for token in answer.tokens[:2])] += 1
        drafted, accepted = drafted + answer.stats.drafted, accepted + answer.stats.accepted
    firsts = sorted({pair.split()[0] for pair in pairs})
    raw = {"": scores_after(engine, start)}
    raw |= {first: scores_after(engine, [*start, int(first)]) for first in firsts}
    return {
        "pairs": pairs,
        "raw": raw,
        "drafted": drafted,
        "accepted": accepted,
        "vocab": engine.tokenizer.vocab_size,
    }


def scores_after(engine: Engine, tokens: Sequence[int]) -> list[tuple[int, float]]:
    answer = engine.complete(tokens, max_tokens=1, logprobs=KNOWN, plain=True)
    assert answer.logprobs is not None
    return list(answer.logprobs[0].top)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])) + "\n")
