"""Sampling from the target, and how drafts are judged without changing its distribution."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from dspine.drafters.base import Draw, Drawn
from dspine.engine.choose import ChoiceListener, Constraint, Logits, marks, restore
from dspine.engine.noise import Noise, Purpose
from dspine.engine.target import Target
from dspine.errors import UsageError
from dspine.llama.sampler import Candidates
from dspine.llama.sampler_options import ChainOptions
from dspine.text.forced import NOT_FORCED, Forced

Verification = Literal["auto", "match", "rejection"]

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(ChainOptions):
    """How the tokens of one answer are drawn; the defaults give the most likely ones.

    `seed` None stands for a new one each time. `verification` says how drafts are judged; every
    way gives exactly the target's distribution. match: a draft stays if the target's own draw
    is the same token, so that the text depends on the seed alone and not on the drafts.
    rejection: a draft stays with probability min(1, p/q), which keeps more of them. auto is
    match with a seed, whose text should not change with the machine, else rejection.
    """

    seed: int | None = None
    verification: Verification = "auto"

    def __post_init__(self) -> None:
        ChainOptions.__post_init__(self)
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"seed is {self.seed!r}: it must be from 0 to {MAX_SEED}")
        if self.verification not in get_args(Verification):
            raise UsageError(
                f"verification is {self.verification!r}: choose auto, match or rejection"
            )

    @property
    def rejects(self) -> bool:
        """Whether drafts are judged by rejection."""
        if self.verification == "auto":
            return self.seed is None
        return self.verification == "rejection"


def comparable(options: SamplingOptions) -> SamplingOptions:
    """The same with a seed, for answers which must not depend on drafts."""
    if options.verification == "rejection":
        raise UsageError(
            "with rejection the text depends on the drafts, so that two answers cannot be "
            "compared: choose match"
        )
    seed = secrets.randbits(64) if options.seed is None else options.seed
    return replace(options, seed=seed, verification="match")


class TokenSampler(Protocol):
    """What leads from a row to a distribution; `dspine.llama.sampler.SamplerChain` is it."""

    def apply(self, logits: Logits, coin: float) -> Candidates:
        """Tokens that may follow, with the logits of their distribution."""

    def accept(self, token: int) -> None:
        """The token was emitted."""

    def mark(self) -> int:
        """State to return to with `restore`."""

    def restore(self, mark: int) -> None:
        """Forget the tokens accepted since `mark`."""

    def close(self) -> None:
        """Free what it owns."""


class SamplingChooser:
    """Draws from the target's distribution after all of the request's samplers.

    Each place of the text has its own random numbers, drawn from the seed: a draw is the arg-max
    of logits plus Gumbel noise. With `match` the drafter adds the same noise to its own scores,
    so that its draw is often the target's, which is emitted whatever the drafter says. With
    `rejection` the drafter has noise of its own, and the test of min(1, p/q) and the draw from
    the rest max(p - q, 0) have theirs.
    """

    def __init__(
        self,
        target: Target,
        sampler: TokenSampler,
        options: SamplingOptions,
        position: int,
        *,
        constraint: Constraint | None = None,
        listener: ChoiceListener | None = None,
    ) -> None:
        """`position` is the index of the first token to be chosen, after the prompt, which the
        sampler has accepted already. The sampler is closed with the chooser.
        """
        self._target = target
        self._sampler = sampler
        self._options = options
        self._rejects = options.rejects
        self._noise = Noise(secrets.randbits(64) if options.seed is None else options.seed)
        self._position = position
        self._constraint = constraint
        self._listener = listener

    def follow(self, _row: int, _drafts: Sequence[int]) -> Sequence[int] | None:
        return None

    def choose(self, row: int, drawn: Drawn | None = None) -> int:
        logits = self._target.logits(row)
        permitted = logits
        if self._constraint is not None:
            permitted = logits.copy()
            self._constraint.mask(permitted)
        coin = self._noise.uniform(Purpose.EXCLUDE, self._position)
        candidates = self._sampler.apply(permitted, coin)
        if drawn is None or not self._rejects:
            token = self._pick(candidates, Purpose.SAMPLE)
        else:
            token = self._judge(candidates, drawn)
        if self._listener is not None:
            self._listener.chosen(logits, token)
        return token

    def accept(self, token: int) -> None:
        self._position += 1
        self._sampler.accept(token)
        if self._constraint is not None:
            self._constraint.accept(token)

    def allowed(self, drafts: Sequence[int]) -> int:
        return len(drafts) if self._constraint is None else self._constraint.allowed(drafts)

    def forced(self) -> Forced:
        return NOT_FORCED if self._constraint is None else self._constraint.forced()

    def draw(self) -> Draw | None:
        options, position = self._options, self._position
        if options.drawn_at == 0:
            return None
        purpose = Purpose.SAMPLE
        if self._rejects:
            # A later block draws for the same places anew, so the place of the anchor counts too.
            purpose, position = Purpose.DRAFT, position << 32

        def noise(candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
            return self._noise.gumbel_rows(purpose, position, candidates)

        least = options.min_p if "min_p" in options.steps else 0.0
        return Draw(options.drawn_at, least, noise, self._rejects)

    def mark(self) -> object:
        return (
            self._position,
            self._sampler.mark(),
            marks(self._constraint, self._listener),
        )

    def restore(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        self._position, sampler, others = mark
        self._sampler.restore(sampler)
        restore(others, self._constraint, self._listener)

    def close(self) -> None:
        self._sampler.close()

    def _pick(self, candidates: Candidates, purpose: Purpose) -> int:
        ids, logits = candidates
        if len(ids) == 1:
            return int(ids[0])
        noise = self._noise.gumbel(purpose, self._position, ids)
        return int(ids[(logits + noise).argmax()])

    def _judge(self, candidates: Candidates, drawn: Drawn) -> int:
        """The draft with probability min(1, p/q), else a draw from max(p - q, 0), normalised.

        Leviathan, Kalman and Matias, "Fast inference from transformers via speculative
        decoding" (2023), appendix A.1: the token has distribution p, whatever q is.
        """
        ids = candidates.ids
        p = softmax(candidates.logits)
        proposed = float(drawn.probabilities[drawn.candidates == drawn.token].sum())
        wanted = float(p[ids == drawn.token].sum())
        if self._noise.uniform(Purpose.ACCEPT, self._position) * proposed < wanted:
            return drawn.token
        rest = p - probabilities_of(ids, drawn)
        np.maximum(rest, 0.0, out=rest)
        if rest.sum() <= 0.0:
            # Only rounding leads here: p and q are the same.
            return self._pick(candidates, Purpose.RESIDUAL)
        with np.errstate(divide="ignore"):
            return self._pick(Candidates(ids, np.log(rest)), Purpose.RESIDUAL)


def softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Probabilities (n,) of logits (n,)."""
    odds: npt.NDArray[np.float64] = np.exp(logits - logits.max())
    odds /= odds.sum()
    return odds


def probabilities_of(ids: npt.NDArray[np.int32], drawn: Drawn) -> npt.NDArray[np.float64]:
    """The proposal's probability (n,) of each of `ids`, 0 for what it could not have drawn."""
    order = np.argsort(drawn.candidates)
    sorted_candidates = drawn.candidates[order]
    place = np.searchsorted(sorted_candidates, ids)
    np.minimum(place, len(order) - 1, out=place)
    found = sorted_candidates[place] == ids
    q = drawn.probabilities[order[place]]
    q[~found] = 0.0
    return q
