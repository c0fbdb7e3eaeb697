"""What the engine asks of a drafter, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Features = npt.NDArray[np.float32]
"""Rows of concatenated taps: (n, taps * target hidden size)."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How to pick among the candidates of a slot other than by the best score.

    Left out is what has less than `min_p` of the best one's probability at temperature 1. Of the
    others the pick is the arg-max of scores / `temperature` + `noise`, which is a draw from the
    softmax of scores / `temperature` where the noise is Gumbel noise. `noise(ids)` gives that
    of candidates `ids` (slots, K), the first row for the first token after the anchor.
    """

    temperature: float
    min_p: float
    noise: Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float64]]
    with_distributions: bool
    """Whether the distributions are wanted that the drafts were drawn from."""

    def after(self, count: int) -> Draw:
        """How to pick the tokens after the first `count`."""

        def noise(candidates: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
            before = np.zeros((count, candidates.shape[1]), np.int32)
            return self.noise(np.concatenate((before, candidates)))[count:]

        return replace(self, noise=noise)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A draft and what it was drawn from: `probabilities` (K,) of `candidates` (K,)."""

    token: int
    candidates: npt.NDArray[np.int32]
    probabilities: npt.NDArray[np.float64]


class Draft(NamedTuple):
    """The chain a drafter chose for one block: at most width - 1 tokens, slot 1 first."""

    tokens: tuple[int, ...]
    scores: tuple[float, ...] = ()
    """Softmax probability of each chosen token within its row of the transition table."""
    drawn: tuple[Drawn, ...] = ()
    """For each token, if it was asked for."""
    led: Draft | None = None
    """What follows a lead, if it was asked for: the chain of the slots after its tokens."""


class DraftAsk(NamedTuple):
    """A draft that is wanted: the arguments of `Drafter.draft`."""

    seq: int
    anchor: int
    width: int
    draw: Draw | None = None
    lead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ContextState:
    """A sequence's context K/V as bytes, in the drafter's own form: positions start ... length - 1.

    Only the same drafter file with the same cache type understands it.
    """

    start: int
    length: int
    data: bytes


class Drafter(Protocol):
    """Owns native memory; one instance serves every sequence, all state indexed by `seq`."""

    name: str
    block_size: int
    taps: tuple[int, ...]
    follows: bool
    """Whether it can go on after a lead."""

    def first_visible(self, anchor_position: int) -> int:
        """First context position that a block anchored at `anchor_position` can see."""

    def covered(self, seq: int) -> int:
        """Context positions [.., covered) are present; the next anchor must sit there."""

    def first_held(self, seq: int) -> int:
        """First context position that is present; equals `covered(seq)` when none is."""

    def add_context(self, seq: int, position: int, features: Features) -> None:
        """Turn confirmed rows at `position`, `position + 1`, ... into context K/V.

        Rows may start after `covered(seq)` when the gap lies before every window that a later
        block can see; earlier rows overwrite. Raises UsageError for any other gap.
        """

    def draft(
        self,
        seq: int,
        anchor: int,
        width: int,
        draw: Draw | None = None,
        lead: tuple[int, ...] = (),
    ) -> Draft:
        """Propose width - 1 tokens after `anchor`, which sits at position `covered(seq)`.

        They are the best ones, or picked as `draw` says. With a `lead`, tokens that somebody else
        proposes for the first slots (width - 2 at most), the draft has a second chain: what the
        same block says after them.
        """

    def draft_many(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """The same drafts for several sequences, which may be made together."""

    def truncate(self, seq: int, length: int) -> None:
        """Forget context positions from `length` on (a rollback, or a reused prefix)."""

    def save_context(self, seq: int) -> ContextState | None:
        """Copy of what is present, None when nothing is."""

    def load_context(self, seq: int, state: ContextState) -> bool:
        """Replace what is present; False, with nothing present, for a state that does not fit."""

    def set_threads(self, n_threads: int) -> None:
        """CPU threads of the next calls."""

    def prepare(self, seq: int, widths: Sequence[int]) -> None:
        """Make ready what the first drafts of these widths would else wait for."""

    def close(self) -> None:
        """Free native memory; later calls raise ClosedError."""
