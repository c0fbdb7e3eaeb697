"""How many drafts each way of judging keeps at a temperature, and what sampling a row costs.

    python benchmarks/sampling.py -n 64 -t 1

Answers of each prompt are drawn with match and with rejection; an interval of the acceptance
length holds 95 % of 2000 resamplings of the prompts. In the answers with rejection, at every row
with a drawn draft the chance to keep it is computed from p and q for each way, so that all are
compared on the same rows, without the noise of different texts: best is p(argmax q), what match
keeps of a drafter that does not draw; match is the chance that both draws with the same Gumbel
noise agree; rejection is sum(min(p, q)). None of this depends on the machine's speed, so it may
run beside other work.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from common import RESULTS, parser, prompts, save, table

import dspine
from dspine.drafters.base import Drawn
from dspine.engine.engine import Engine
from dspine.engine.noise import Noise, Purpose
from dspine.engine.sampling import (
    SamplingChooser,
    SamplingOptions,
    Verification,
    probabilities_of,
    softmax,
)
from dspine.llama.sampler import Candidates, SamplerChain

ALL_TOKENS: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1": {"temperature": 1.0},
    "temperature 1, all tokens": {"temperature": 1.0, **ALL_TOKENS},
}
DRAFTS = 3
WAYS = ("best", "match", "rejection")
CHAINS: dict[str, dict[str, Any]] = {
    "defaults": {"temperature": 0.8},
    "with penalties": {"temperature": 0.8, "repeat_penalty": 1.1},
    "all tokens": {"temperature": 1.0, **ALL_TOKENS},
}


def main() -> None:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--part", type=int, help="prompts of this run; the next one goes on there")
    arguments = options.parse_args()
    chosen = prompts(count=arguments.count)
    output = arguments.output or RESULTS / "sampling.json"
    rows: list[dict[str, Any]] = []
    if arguments.part and output.exists():
        rows = json.loads(output.read_text(encoding="utf-8")).get("answers", [])
    with dspine.load(
        arguments.model,
        arguments.model_draft,
        n_ctx=1024,
        n_threads=arguments.threads,
        proposer="dspine",
        spec_draft_n_max=DRAFTS,
        calibrate=False,
    ) as engine:
        for seed, (_, name, prompt) in list(enumerate(chosen))[len(rows) :][: arguments.part]:
            answers = {
                setting: measure(engine, prompt, seed, options, arguments.predict)
                for setting, options in SETTINGS.items()
            }
            rows.append({"id": name, "settings": answers})
        costs = {name: row_costs(options) for name, options in CHAINS.items()}
    found = {setting: summary([row["settings"][setting] for row in rows]) for setting in SETTINGS}
    print(
        table(
            ("chance that a draft is kept", *WAYS, "rows"),
            [
                (name, *(f"{row[way]:.3f}" for way in WAYS), row["rows"])
                for name, row in found.items()
            ],
        )
    )
    names = ("match", "rejection", "gain")
    print(
        table(
            ("acceptance length", *names),
            [
                (setting, *("{:.3f} ({:.3f} to {:.3f})".format(*row["length"][n]) for n in names))
                for setting, row in found.items()
            ],
        )
    )
    print(table(("us a row", "chain", "draw"), [(name, *c.values()) for name, c in costs.items()]))
    document = {
        "drafts": DRAFTS,
        "prompts": len(rows),
        "tokens_each": arguments.predict,
        "acceptance": found,
        "row_us": costs,
        "answers": rows,
    }
    print(save("sampling", document, output))


def measure(
    engine: Engine, prompt: str, seed: int, options: dict[str, Any], tokens: int
) -> dict[str, Any]:
    """One prompt: tokens and steps of both ways, and chances summed over the rows that judge."""
    chances: list[tuple[float, float, float]] = []
    judge = SamplingChooser._judge

    def noting(chooser: SamplingChooser, candidates: Candidates, drawn: Drawn) -> int:
        chances.append(kept(candidates, drawn))
        return judge(chooser, candidates, drawn)

    counts: dict[str, Any] = {}
    ways: tuple[Verification, ...] = ("match", "rejection")
    SamplingChooser._judge = noting  # type: ignore[method-assign, assignment]
    try:
        for way in ways:
            sampling = SamplingOptions(seed=seed, verification=way, **options)
            stats = engine.complete(prompt, max_tokens=tokens, sampling=sampling).stats
            counts[way] = [stats.tokens, stats.steps]
    finally:
        SamplingChooser._judge = judge  # type: ignore[method-assign]
    sums = np.sum(chances, axis=0) if chances else np.zeros(len(WAYS))
    return {**counts, "chances": [round(float(x), 4) for x in sums], "rows": len(chances)}


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Chances over all rows, and the acceptance length of both ways with its interval."""
    total = sum(answer["rows"] for answer in answers)
    sums = np.sum([answer["chances"] for answer in answers], axis=0)
    found = {way: round(float(x) / total, 4) for way, x in zip(WAYS, sums, strict=True)}
    counts = {
        way: np.array([answer[way] for answer in answers], float) for way in ("match", "rejection")
    }
    random = np.random.default_rng(1)
    samples = random.integers(0, len(answers), (2000, len(answers)))

    def lengths(way: str, picks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        tokens, steps = counts[way][picks].sum(axis=-2).T
        length: npt.NDArray[np.float64] = tokens / steps
        return length

    def told(of: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]) -> list[float]:
        low, high = np.quantile(of(samples), (0.025, 0.975))
        whole = of(np.arange(len(answers))[None, :])[0]
        return [round(float(value), 4) for value in (whole, low, high)]

    length = {way: told(partial(lengths, way)) for way in counts}
    length["gain"] = told(lambda picks: lengths("rejection", picks) - lengths("match", picks))
    return {**found, "rows": total, "length": length}


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
