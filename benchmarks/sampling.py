"""Acceptance of the two ways to judge drafts at a temperature, and what sampling a row costs.

    python benchmarks/sampling.py --count 4 -t 1

Acceptance does not depend on the machine's speed, so that part may run beside other work.
`best drafts` is match with a drafter that proposes its most likely tokens instead of drawing:
what is lost without draws.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from common import parser, prompts, save, table

import dspine
from dspine.drafters.base import Draw
from dspine.engine.engine import Engine
from dspine.engine.noise import Noise, Purpose
from dspine.engine.sampling import SamplingChooser, SamplingOptions, Verification
from dspine.llama.sampler import SamplerChain

ALL_TOKENS: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, all tokens": {"temperature": 1.0, **ALL_TOKENS},
}
WAYS: dict[str, tuple[Verification, bool]] = {
    "best drafts": ("match", False),
    "match": ("match", True),
    "rejection": ("rejection", True),
}
CHAINS: dict[str, dict[str, Any]] = {
    "defaults": {"temperature": 0.8},
    "with penalties": {"temperature": 0.8, "repeat_penalty": 1.1},
    "all tokens": {"temperature": 1.0, **ALL_TOKENS},
}


def main() -> None:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    with dspine.load(
        arguments.model,
        arguments.model_draft,
        n_ctx=1024,
        n_threads=arguments.threads,
        proposer="dspine",
        spec_draft_n_max=3,
        calibrate=False,
    ) as engine:
        chosen = prompts(count=arguments.count)
        acceptance = {
            setting: {way: measure(engine, chosen, options, way, arguments.predict) for way in WAYS}
            for setting, options in SETTINGS.items()
        }
        costs = {name: row_costs(options) for name, options in CHAINS.items()}
    rows = [
        (setting, *(f"{ways[way]['acceptance_length']:.3f}" for way in WAYS))
        for setting, ways in acceptance.items()
    ]
    print(table(("acceptance length", *WAYS), rows))
    print(table(("us a row", "chain", "draw"), [(name, *c.values()) for name, c in costs.items()]))
    document = {
        "drafts": 3,
        "prompts": len(chosen),
        "tokens_each": arguments.predict,
        "acceptance": acceptance,
        "row_us": costs,
    }
    print(save("sampling", document, arguments.output))


def measure(
    engine: Engine,
    chosen: list[tuple[str, str, str]],
    options: dict[str, Any],
    way: str,
    tokens: int,
) -> dict[str, float]:
    """Tokens, steps and acceptance over all prompts, each with a seed of its own."""
    verification, draws = WAYS[way]
    emitted = steps = drafted = accepted = 0
    with drafting(draws):
        for seed, (_, _, prompt) in enumerate(chosen):
            sampling = SamplingOptions(seed=seed, verification=verification, **options)
            stats = engine.complete(prompt, max_tokens=tokens, sampling=sampling).stats
            emitted, steps = emitted + stats.tokens, steps + stats.steps
            drafted, accepted = drafted + stats.drafted, accepted + stats.accepted
    return {
        "tokens": emitted,
        "steps": steps,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_length": round(emitted / steps, 4),
        "acceptance_rate": round(accepted / drafted, 4),
    }


@contextmanager
def drafting(draws: bool) -> Iterator[None]:
    """Let drafters draw, or propose their best tokens."""
    usual = SamplingChooser.draw

    def best(_chooser: SamplingChooser) -> Draw | None:
        return None

    if not draws:
        SamplingChooser.draw = best  # type: ignore[method-assign]
    try:
        yield
    finally:
        SamplingChooser.draw = usual  # type: ignore[method-assign]


def row_costs(options: dict[str, Any]) -> dict[str, float]:
    """Median microseconds of the chain and of the draw, for 49,152 logits of a normal shape."""
    vocabulary = 49_152
    random = np.random.default_rng(1)
    logits = (3 * random.standard_normal(vocabulary)).astype(np.float32)
    noise = Noise(1)
    chain_us, draw_us = [], []
    with SamplerChain(SamplingOptions(**options), n_vocab=vocabulary, n_ctx=4096) as chain:
        chain.accept_all(random.integers(0, vocabulary, 300).tolist())
        for place in range(100):
            started = perf_counter()
            candidates = chain.apply(logits, 0.5)
            chained = perf_counter()
            extra = noise.gumbel(Purpose.SAMPLE, place, candidates.ids)
            int(candidates.ids[(candidates.logits + extra).argmax()])
            chain_us.append((chained - started) * 1e6)
            draw_us.append((perf_counter() - chained) * 1e6)
    return {"chain": round(median(chain_us), 1), "draw": round(median(draw_us), 1)}


if __name__ == "__main__":
    main()
