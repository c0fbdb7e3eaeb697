"""A slot: one sequence of the target, with all that is kept for it from answer to answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dspine.engine.held import HeldContext
from dspine.engine.parts import EngineParts
from dspine.engine.proposal import SharingProposer
from dspine.engine.proposers import AutoProposer, DrafterProposer, NgramProposer, NoProposer
from dspine.engine.rollback import Rollback, make_rollback
from dspine.engine.sequence import common_prefix
from dspine.engine.target import Target
from dspine.engine.width import WidthPolicy

SlotState = Literal["idle", "prompt", "answer"]


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """A slot as others see it."""

    id: int
    answer: int | None
    """Number of the answer that it makes, None while it is idle."""
    state: SlotState
    """idle, prompt (is being decoded) or answer."""
    prompt_tokens: int
    decoded_tokens: int
    """Tokens of the answer so far."""
    n_ctx: int
    held_tokens: int
    """Tokens in its memory."""


@dataclass(slots=True)
class Slot:
    """What one sequence has of its own. Target files, drafter and context are everybody's."""

    id: int
    target: Target
    policy: WidthPolicy
    proposer: SharingProposer
    rollback: Rollback
    held: HeldContext
    last_used: int = 0
    """When it was last taken: the number of that answer."""


def make_slot(parts: EngineParts, number: int = 0) -> Slot:
    """Slot `number` of an engine; the first one has the engine's own policy."""
    target, policy = parts.target, parts.policy
    if number:
        assert parts.together is not None and parts.make_policy is not None
        target, policy = parts.together.targets[number], parts.make_policy()
    proposer = _make_proposer(parts, target, policy, number)
    mode = parts.rollback or ("checkpoint" if parts.is_recurrent else "trim")
    return Slot(
        id=number,
        target=target,
        policy=policy,
        proposer=proposer,
        rollback=make_rollback(mode, target),
        held=HeldContext(target, proposer, is_recurrent=parts.is_recurrent),
    )


def choose_slot(idle: Sequence[Slot], prompt: Sequence[int]) -> Slot:
    """The one whose memory `prompt` goes on from, which is at least half of what it holds: of
    several the one with the longest beginning in common, else the one not used for longest, and of
    those the first. A beginning that all prompts share thus costs no other conversation its memory.
    """

    def order(slot: Slot) -> tuple[int, int, int]:
        held = slot.held.tokens
        common = common_prefix(held, prompt)
        return -common if 2 * common >= len(held) else 0, slot.last_used, slot.id

    return min(idle, key=order)


def _make_proposer(
    parts: EngineParts, target: Target, policy: WidthPolicy, number: int
) -> SharingProposer:
    wanted = parts.proposer
    network = None
    if parts.drafter is not None and wanted in ("auto", "dspine"):
        network = DrafterProposer(
            policy,
            parts.drafter,
            target,
            max_positions=parts.max_positions,
            seq=number,
            promise=parts.promise,
        )
    lookup = None
    if wanted in ("auto", "ngram"):
        lookup = NgramProposer(policy, min_match=parts.ngram_min_match, table=parts.ngram_table)
    if network is None and lookup is None:
        return NoProposer()
    name = "ngram" if network is None else wanted if wanted == "auto" else network.name
    return AutoProposer(policy, lookup, network, name=name)
