"""Runs one prompt plainly and speculatively and explains any difference of the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspine.engine.choose import Chooser
from dspine.engine.replay import first_difference, replay
from dspine.engine.rollback import Rollback
from dspine.engine.stats import Stats
from dspine.engine.target import Target
from dspine.engine.trace import Trace


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished generation."""

    tokens: tuple[int, ...]
    text: str
    reason: str
    stats: Stats


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the two answers part, and whether the target alone explains it.

    A gap is the logit of the token that was chosen minus that of the other answer's token, in
    the batch shape of its own run; small gaps are near-ties. A token is None where that answer
    had ended.
    """

    position: int
    plain_token: int | None
    speculative_token: int | None
    plain_gap: float | None
    speculative_gap: float | None
    reproduced: bool
    """The target without any drafter gives the speculative tokens in the same batches."""

    def to_json(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "plain_token": self.plain_token,
            "speculative_token": self.speculative_token,
            "plain_gap": self.plain_gap,
            "speculative_gap": self.speculative_gap,
            "reproduced": self.reproduced,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plain and speculative decoding of the same prompt."""

    plain: Answer
    speculative: Answer
    divergence: Divergence | None

    @property
    def identical(self) -> bool:
        """Same tokens, same text."""
        return self.divergence is None

    @property
    def ratio(self) -> float:
        """Speculative over plain tokens per second."""
        plain = self.plain.stats.tokens_per_second
        return self.speculative.stats.tokens_per_second / plain if plain else 0.0

    def to_json(self) -> dict[str, Any]:
        """One document with at least speeds, acceptance length, ratio, identical, divergence."""
        return {
            "plain": _answer(self.plain),
            "speculative": _answer(self.speculative),
            "ratio": self.ratio,
            "identical": self.identical,
            "divergence": self.divergence.to_json() if self.divergence else None,
        }


def explain(
    target: Target,
    rollback: Rollback,
    plain: tuple[Answer, Trace],
    speculative: tuple[Answer, Trace],
    make_chooser: Callable[[], Chooser],
) -> Divergence | None:
    """The first difference of two answers to one prompt, None when there is none.

    `make_chooser` gives the request's way to choose, at the beginning of an answer.
    """
    slow, fast = plain[0].tokens, speculative[0].tokens
    at = first_difference(slow, fast)
    if at is None:
        return None
    slow_token = slow[at] if at < len(slow) else None
    fast_token = fast[at] if at < len(fast) else None
    if slow_token is None or fast_token is None:
        again = replay(target, speculative[1], fast, make_chooser(), rollback)
        return Divergence(at, slow_token, fast_token, None, None, again.tokens == fast)
    pair = (fast_token, slow_token)
    again = replay(target, speculative[1], fast, make_chooser(), rollback, until=at, pair=pair)
    reproduced = again.tokens[: at + 1] == fast[: at + 1]
    alone = replay(
        target, plain[1], slow, make_chooser(), rollback, until=at, pair=(slow_token, fast_token)
    )
    return Divergence(
        at,
        slow_token,
        fast_token,
        _gap(alone.pair_logits),
        _gap(again.pair_logits),
        reproduced,
    )


def _gap(pair: tuple[float, float] | None) -> float | None:
    return None if pair is None else pair[0] - pair[1]


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "tokens": list(answer.tokens),
        "finish_reason": answer.reason,
        **{
            name: value
            for name, value in answer.stats.to_json().items()
            if name not in ("tokens", "text")
        },
        "token_count": answer.stats.tokens,
    }
