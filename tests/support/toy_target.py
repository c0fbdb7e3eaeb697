"""A target with a tiny vocabulary and known distributions, and an independent sampler for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from dspine.drafters.base import Draft, Draw, Drawn, Features
from dspine.llama.sampler import Candidates
from dspine.llama.sampler_options import ChainOptions
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_target import FakeTarget

Probabilities = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
LogitsOf = Callable[[Sequence[int]], npt.NDArray[np.float32]]


SEEN = 4
"""Tokens that toy distributions may depend on; a long answer is not copied for every row."""

MOST = 32
"""Tokens of a toy vocabulary at most."""


class ToyTarget(FakeTarget):
    """Its logits are a function of the last SEEN tokens, the row's own included."""

    def __init__(self, logits_of: LogitsOf, vocab_size: int, *, n_ctx: int = 64) -> None:
        super().__init__(lambda tokens: int(logits_of(tokens).argmax()), vocab_size, n_ctx=n_ctx)
        self.logits_of = logits_of

    def logits(self, row: int) -> npt.NDArray[np.float32]:
        assert self._has_logits and 0 <= row < self._count, f"no logits in row {row}"
        self.rows_asked.append(row)
        end = self._first + row + 1
        return self.logits_of(self.memory[max(0, end - SEEN) : end])


class ToyDrafter(FakeDrafter):
    """Draws each slot from scores that are a function of the last SEEN tokens before it.

    `scores_of` gives the candidates of a slot and their scores.
    """

    def __init__(
        self,
        scores_of: Callable[[Sequence[int]], tuple[Sequence[int], Sequence[float]]],
        block_size: int = 8,
    ) -> None:
        super().__init__(lambda _tokens, count: [0] * count, block_size=block_size)
        self.scores_of = scores_of
        self._slot = cache(self._slot_after)
        self._covered = 0

    def covered(self, seq: int) -> int:
        return self._covered

    def add_context(self, seq: int, position: int, features: Features) -> None:
        super().add_context(seq, position, features)
        self._covered = max(self._covered, position + len(features))

    def truncate(self, seq: int, length: int) -> None:
        super().truncate(seq, length)
        self._covered = min(self._covered, length)

    def draft(
        self,
        seq: int,
        anchor: int,
        width: int,
        draw: Draw | None = None,
        lead: tuple[int, ...] = (),
    ) -> Draft:
        position = self.covered(seq)
        seen = [self.context[place] for place in range(max(0, position - SEEN), position)]
        tokens, drawn = [*seen, anchor], list[Drawn]()
        every = _every_token(width - 1)
        noise = np.zeros(every.shape) if draw is None else draw.noise(every)
        temperature = 1.0 if draw is None else draw.temperature
        for slot in range(width - 1):
            candidates, values, chances = self._slot(temperature, *tokens[-SEEN:])
            tokens.append(int(candidates[(values + noise[slot, candidates]).argmax()]))
            if draw is not None and draw.with_distributions:
                drawn.append(Drawn(tokens[-1], candidates, chances))
        return Draft(tuple(tokens[len(seen) + 1 :]), (0.5,) * (width - 1), tuple(drawn))

    def _slot_after(
        self, temperature: float, *seen: int
    ) -> tuple[npt.NDArray[np.int32], Probabilities, Probabilities]:
        """Candidates of a slot, their scaled scores and chances."""
        ids, scores = self.scores_of(seen)
        values = np.array(scores, np.float64) / temperature
        return np.array(ids, np.int32), values, softmax(values)


@cache
def _every_token(slots: int) -> npt.NDArray[np.int32]:
    return np.tile(np.arange(MOST, dtype=np.int32), (slots, 1))


class OracleSampler:
    """The chain of `dspine.llama.sampler` in NumPy, step by step from the descriptions.

    Penalties: a logit above 0 is divided by the repeat penalty, another is multiplied; then
    count times frequency and once presence are subtracted. Typical: Meister et al. 2022. DRY,
    here without breakers: the longest end of the text that occurred before a token, if it has
    the allowed length or more, costs multiplier times base to the power of what is beyond.
    """

    def __init__(self, options: ChainOptions, history: Sequence[int] = ()) -> None:
        self.options, self.history = options, list(history)
        self.closed = False

    def apply(self, logits: npt.NDArray[np.float32], coin: float = 1.0) -> Candidates:
        chances = self.probabilities(logits, coin)
        ids = np.flatnonzero(chances).astype(np.int32)
        return Candidates(ids, np.log(chances[ids]))

    def probabilities(self, logits: npt.NDArray[np.float32], coin: float = 1.0) -> Probabilities:
        """(vocab,) after all steps."""
        o, values = self.options, logits.astype(np.float64)
        for token, bias in o.logit_bias:
            values[token] += bias
        ids = np.argsort(-values, kind="stable")
        ids = ids[values[ids] > -np.inf]
        for name in o.samplers:
            values, ids = self._step(name, values, ids, coin)
        chances = np.zeros(len(values))
        chances[ids] = softmax(values[ids])
        return chances

    def _step(
        self, name: str, values: Probabilities, ids: Ids, coin: float
    ) -> tuple[Probabilities, Ids]:
        """Logits (vocab,) and the tokens that are left, the most likely first, after a step."""
        o = self.options
        match name:
            case "penalties" if o.penalises:
                window = self.history if o.repeat_last_n < 0 else self.history[-o.repeat_last_n :]
                for token in set(window):
                    up = values[token] > 0
                    values[token] *= 1 / o.repeat_penalty if up else o.repeat_penalty
                    values[token] -= window.count(token) * o.frequency_penalty + o.presence_penalty
                ids = ids[np.argsort(-values[ids], kind="stable")]
            case "dry" if o.dries:
                assert not o.dry_sequence_breakers
                window = (
                    self.history
                    if o.dry_penalty_last_n < 0
                    else (self.history[-o.dry_penalty_last_n :])
                )
                for token, length in _repeats(window).items():
                    if length >= o.dry_allowed_length:
                        beyond = length - o.dry_allowed_length
                        values[token] -= o.dry_multiplier * o.dry_base**beyond
                ids = ids[np.argsort(-values[ids], kind="stable")]
            case "top_n_sigma" if o.top_n_sigma > 0:
                left = values[ids]
                ids = ids[left >= left.max() - o.top_n_sigma * left.std()]
            case "top_k" if o.top_k:
                ids = ids[: o.top_k]
            case "typ_p" if o.typical_p < 1:
                p = softmax(values[ids])
                known = p > 0
                surprise = np.abs(-np.log(p[known]) + (p[known] * np.log(p[known])).sum())
                order = np.argsort(surprise, kind="stable")
                ids = np.sort(ids[known][order[: _reach(p[known][order], o.typical_p, "above")]])
                ids = ids[np.argsort(-values[ids], kind="stable")]
            case "top_p" if o.top_p < 1:
                ids = ids[: _reach(softmax(values[ids]), o.top_p, "reached")]
            case "min_p" if o.min_p > 0:
                ids = ids[values[ids] >= values[ids[0]] + np.log(o.min_p)]
            case "xtc" if o.excludes and coin < o.xtc_probability and len(ids) > 1:
                likely = int((softmax(values[ids]) >= o.xtc_threshold).sum())
                ids = ids[max(likely - 1, 0) :]
            case "temperature" if o.temperature == 0:
                ids = ids[:1]
            case "temperature":
                values = values / o.temperature
        return values, ids

    def accept(self, token: int) -> None:
        self.history.append(token)

    def mark(self) -> int:
        return len(self.history)

    def restore(self, mark: int) -> None:
        del self.history[mark:]

    def close(self) -> None:
        self.closed = True


def softmax(values: npt.NDArray[np.float64]) -> Probabilities:
    odds: Probabilities = np.exp(values - values.max())
    odds /= odds.sum()
    return odds


def chi_square(counts: Probabilities, chances: Probabilities) -> tuple[float, int]:
    """Statistic and degrees of freedom of counts (n,); rare outcomes are taken together."""
    expected = chances * counts.sum()
    assert counts[expected == 0].sum() == 0, "an impossible token was drawn"
    rare = (expected < 5) & (expected > 0)
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum()), max(len(counts) - 1, 0)


def is_plausible(statistic: float, freedom: int) -> bool:
    """Whether chi-square at least that large comes about once in 3,000 times or more often.

    Wilson and Hilferty 1931: the cube root of chi-square over its degrees is nearly normal.
    """
    spread = 2 / (9 * freedom)
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return bool(deviation < 3.4)


def _repeats(text: Sequence[int]) -> dict[int, int]:
    """For each token, the most tokens at the end of `text` that stand before an earlier one."""
    found: dict[int, int] = {}
    for place, token in enumerate(text):
        length = 0
        while length < place and text[place - 1 - length] == text[-1 - length]:
            length += 1
        found[token] = max(found.get(token, 0), length)
    return found


def _reach(p: Probabilities, wanted: float, how: str) -> int:
    total = np.cumsum(p)
    there = total > wanted if how == "above" else total >= wanted
    return int(there.argmax()) + 1 if there.any() else len(p)
