"""Counts and times of one generation: who proposed what, what was accepted, what it cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspine.engine.events import Step


@dataclass(frozen=True, slots=True)
class ProposerStats:
    """One proposer's share of a generation; plain steps are those of the proposer `none`."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify, bonus included."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafts that the target confirmed."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """A finished (or running) generation in numbers. Times are milliseconds.

    `wall_ms` is measured on its own from the end of the prompt to the end of the last step, without
    the time the caller spent between events; draft, verify and host add up to it within a few per
    cent. An answer of a scheduler has what lies between its steps in it as well, such as pieces of
    other prompts: it is the time that whoever reads the answer waits.
    """

    prompt_tokens: int
    prefill_ms: float
    tokens: int
    steps: int
    drafted: int
    accepted: int
    draft_ms: float
    verify_ms: float
    host_ms: float
    wall_ms: float
    proposers: dict[str, ProposerStats] = field(default_factory=dict)
    drafted_at_slot: tuple[int, ...] = ()
    """How often slot 1, 2, ... held a draft."""
    accepted_at_slot: tuple[int, ...] = ()
    """How often that draft was accepted."""
    disabled_reason: str | None = None
    """Why drafting is off although a drafter was asked for, else None."""
    cached_tokens: int = 0
    """Tokens of the prompt that were in memory from before and not decoded again."""

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify, bonus included; 1.0 for plain decoding."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts divided by drafts."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Speed of the steps, the prompt not counted."""
        return self.tokens / self.wall_ms * 1000.0 if self.wall_ms > 0 else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Speed of the prompt, tokens that were in memory from before not counted."""
        new = self.prompt_tokens - self.cached_tokens
        return new / self.prefill_ms * 1000.0 if self.prefill_ms > 0 else 0.0

    @property
    def slot_acceptance(self) -> tuple[float, ...]:
        """Per slot: accepted there, given that every earlier slot of the block was."""
        reached = (self.steps_with_drafts, *self.accepted_at_slot)
        return tuple(
            accepted / min(before, drafted) if min(before, drafted) else 0.0
            for before, drafted, accepted in zip(
                reached, self.drafted_at_slot, self.accepted_at_slot, strict=False
            )
        )

    @property
    def steps_with_drafts(self) -> int:
        """Verifies that had at least one draft in them."""
        return self.drafted_at_slot[0] if self.drafted_at_slot else 0

    def to_json(self) -> dict[str, Any]:
        """Everything, the derived figures included, as plain JSON values."""
        document = asdict(self)
        document.update(
            acceptance_length=self.acceptance_length,
            acceptance_rate=self.acceptance_rate,
            tokens_per_second=self.tokens_per_second,
            prompt_tokens_per_second=self.prompt_tokens_per_second,
            slot_acceptance=list(self.slot_acceptance),
        )
        document["drafted_at_slot"] = list(self.drafted_at_slot)
        document["accepted_at_slot"] = list(self.accepted_at_slot)
        for name, share in self.proposers.items():
            document["proposers"][name]["acceptance_length"] = share.acceptance_length
            document["proposers"][name]["acceptance_rate"] = share.acceptance_rate
        return document


class StatsRecorder:
    """Collects one generation's counts step by step."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = 0
        self.prefill_ms = 0.0
        self.disabled_reason: str | None = None
        self.steps: list[Step] = []
        """Every verify so far."""
        self.wall_ms = 0.0
        """Their time as measured on its own."""

    def snapshot(self) -> Stats:
        """The numbers so far."""
        counts: dict[str, list[int]] = {}
        drafted, accepted = Counter[int](), Counter[int]()
        for step in self.steps:
            share = counts.setdefault(step.proposer, [0, 0, 0, 0])
            share[0] += 1
            share[1] += step.drafted
            share[2] += step.accepted
            share[3] += len(step.tokens)
            drafted[step.drafted] += 1
            accepted[step.accepted] += 1
        shares = {name: ProposerStats(*numbers) for name, numbers in counts.items()}
        slots = range(1, max(drafted, default=0) + 1)
        return Stats(
            prompt_tokens=self.prompt_tokens,
            prefill_ms=self.prefill_ms,
            tokens=sum(share.emitted for share in shares.values()),
            steps=sum(share.steps for share in shares.values()),
            drafted=sum(share.drafted for share in shares.values()),
            accepted=sum(share.accepted for share in shares.values()),
            draft_ms=sum(step.draft_ms for step in self.steps),
            verify_ms=sum(step.verify_ms for step in self.steps),
            host_ms=sum(step.host_ms for step in self.steps),
            wall_ms=self.wall_ms,
            proposers=shares,
            drafted_at_slot=tuple(_at_least(drafted, slot) for slot in slots),
            accepted_at_slot=tuple(_at_least(accepted, slot) for slot in slots),
            disabled_reason=self.disabled_reason,
            cached_tokens=self.cached_tokens,
        )


def _at_least(numbers: Counter[int], least: int) -> int:
    """How many of the counted numbers are `least` or more."""
    return sum(count for number, count in numbers.items() if number >= least)
