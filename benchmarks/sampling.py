"""How many drafts each way of judging keeps at a temperature, and what sampling a row costs.

    python benchmarks/sampling.py --count 4 -t 1

Answers are drawn with rejection. At every row with a drawn draft the chance to keep it is computed
from p and q for each way, so that all are compared on the same rows, without the noise of
different texts: best is p(argmax q), what match keeps of a drafter that does not draw; match is
the chance that both draws with the same Gumbel noise agree; rejection is sum(min(p, q)). None of
this depends on the machine's speed, so it may run beside other work.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from common import parser, prompts, save, table

import dspine
from dspine.drafters.base import Drawn
from dspine.engine.engine import Engine
from dspine.engine.noise import Noise, Purpose
from dspine.engine.sampling import SamplingChooser, SamplingOptions, probabilities_of, softmax
from dspine.llama.sampler import Candidates, SamplerChain

ALL_TOKENS: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, all tokens": {"temperature": 1.0, **ALL_TOKENS},
}
WAYS = ("best", "match", "rejection")
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
            setting: measure(engine, chosen, options, arguments.predict)
            for setting, options in SETTINGS.items()
        }
        costs = {name: row_costs(options) for name, options in CHAINS.items()}
    rows = [
        (setting, *(f"{found[way]:.3f}" for way in WAYS), found["rows"])
        for setting, found in acceptance.items()
    ]
    print(table(("chance that a draft is kept", *WAYS, "rows"), rows))
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
    engine: Engine, chosen: list[tuple[str, str, str]], options: dict[str, Any], tokens: int
) -> dict[str, float]:
    """Chances over the rows of all prompts, and the acceptance length of these answers."""
    chances: list[tuple[float, float, float]] = []
    judge = SamplingChooser._judge

    def noting(chooser: SamplingChooser, candidates: Candidates, drawn: Drawn) -> int:
        chances.append(kept(candidates, drawn))
        return judge(chooser, candidates, drawn)

    SamplingChooser._judge = noting  # type: ignore[method-assign, assignment]
    emitted = steps = 0
    try:
        for seed, (_, _, prompt) in enumerate(chosen):
            sampling = SamplingOptions(seed=seed, verification="rejection", **options)
            stats = engine.complete(prompt, max_tokens=tokens, sampling=sampling).stats
            emitted, steps = emitted + stats.tokens, steps + stats.steps
    finally:
        SamplingChooser._judge = judge  # type: ignore[method-assign]
    means = np.mean(chances, axis=0)
    found = {way: round(float(mean), 4) for way, mean in zip(WAYS, means, strict=True)}
    return {**found, "rows": len(chances), "acceptance_length": round(emitted / steps, 4)}


def kept(candidates: Candidates, drawn: Drawn) -> tuple[float, float, float]:
    """The chance to keep a draft of q = `drawn` by p(argmax q), match and rejection.

    Both arg-maxes with the same Gumbel noise are x with probability
    1 / sum over y of max(p(y) / p(x), q(y) / q(x)).
    """
    p, q = softmax(candidates.logits), probabilities_of(candidates.ids, drawn)
    best = drawn.candidates[drawn.probabilities.argmax()]
    outside = 1.0 - float(q.sum())
    match = 0.0
    for x in np.flatnonzero((p > 1e-12) & (q > 1e-12)):
        match += 1.0 / float(np.maximum(p / p[x], q / q[x]).sum() + outside / q[x])
    return float(p[candidates.ids == best].sum()), match, float(np.minimum(p, q).sum())


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
