"""What a generation reports while it runs, the same for plain and speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dspine.engine.stats import Stats

FinishReason = Literal["stop", "length", "context", "cancelled"]
"""stop: end token or stop string · length: max_tokens · context: the window is full."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt is in memory: `tokens` of it, of which the first `reused` were there already.

    `ms` is the time of decoding the rest, the drafter's context included.
    """

    tokens: int
    ms: float
    reused: int = 0

    @property
    def decoded(self) -> int:
        """Tokens decoded for it; the last one is the anchor and belongs to the first step."""
        return self.tokens - self.reused - 1


@dataclass(frozen=True, slots=True)
class Reading:
    """A part of the prompt is in memory: `done` of `tokens`, the first `reused` from before.

    Told by the scheduler, to those who ask for it, before Prefill.
    """

    tokens: int
    done: int
    ms: float
    reused: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the target thought one emitted token, in nats.

    `logprob` is the log-softmax of the target's raw logits at that place: before temperature,
    filters, penalties and grammar, as llama.cpp's server reports it before sampling. `top` are
    the most likely tokens there with theirs, best first, the lower id first among equals; the
    emitted token need not be among them.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Step(NamedTuple):
    """One verify: the confirmed tokens and the text that became certain with them.

    The first `accepted` of `tokens` were drafted, the last one is the target's own unless the
    answer ended on a draft. A cancelled answer may end with a Step without tokens that only
    carries text held back until then. Milliseconds add up to the time of the whole step.
    """

    tokens: tuple[int, ...]
    text: str
    drafted: int
    accepted: int
    proposer: str
    draft_ms: float
    verify_ms: float
    host_ms: float
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each of `tokens`; None when not asked for."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of every generation."""

    reason: FinishReason
    stats: Stats


Event = Reading | Prefill | Step | Finish
