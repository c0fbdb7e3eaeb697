"""A drafter whose chains the test writes; it checks what the engine tells it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from dspine.drafters.base import ContextState, Draft, DraftAsk, Draw, Features

Chain = Callable[[Sequence[int], int], Sequence[int]]
"""(all tokens up to the anchor, count) -> drafts."""


class FakeDrafter:
    """Implements `dspine.drafters.base.Drafter`; remembers the token behind every feature."""

    def __init__(
        self, chain: Chain, *, block_size: int = 8, window: int | None = None, name: str = "dspine"
    ) -> None:
        self.chain, self.block_size, self.window, self.name = chain, block_size, window, name
        self.taps: tuple[int, ...] = (0, 1)
        self.contexts: dict[int, dict[int, int]] = {}
        self.additions: list[tuple[int, int]] = []
        self.drafts: list[tuple[int, int, int]] = []
        self.follows = True
        self.leads: list[tuple[int, ...]] = []
        self.together: list[int] = []
        """How many drafts each call of `draft_many` wanted."""
        self.closed = False

    @property
    def context(self) -> dict[int, int]:
        """That of sequence 0."""
        return self.contexts.setdefault(0, {})

    def of(self, seq: int) -> dict[int, int]:
        """Position -> token of a sequence."""
        return self.contexts.setdefault(seq, {})

    def first_visible(self, anchor_position: int) -> int:
        return 0 if self.window is None else max(0, anchor_position - self.window + 1)

    def covered(self, seq: int) -> int:
        return max(self.of(seq), default=-1) + 1

    def first_held(self, seq: int) -> int:
        place = self.covered(seq)
        while place - 1 in self.of(seq):
            place -= 1
        return place

    def add_context(self, seq: int, position: int, features: Features) -> None:
        assert position <= self.covered(seq) or self.window is not None, "a gap in the context"
        assert features.dtype == np.float32 and features.shape[1] == 2
        self.additions.append((position, len(features)))
        for offset, (place, token) in enumerate(features):
            assert int(place) == position + offset, "a feature at another position"
            self.of(seq)[position + offset] = int(token)

    def draft(
        self,
        seq: int,
        anchor: int,
        width: int,
        draw: Draw | None = None,
        lead: tuple[int, ...] = (),
    ) -> Draft:
        assert 2 <= width <= self.block_size, f"width {width}"
        position = self.covered(seq)
        first = self.first_visible(position)
        seen = [self.of(seq).get(place, -1) for place in range(first, position)]
        assert -1 not in seen, "a visible position has no feature"
        self.drafts.append((position, anchor, width))
        before = [self.of(seq).get(place, 0) for place in range(position)]
        draft = Draft(tuple(self.chain([*before, anchor], width - 1)))
        if not lead:
            return draft
        assert len(lead) <= width - 2, "no slot is left after the lead"
        self.leads.append(lead)
        rest = self.chain([*before, anchor, *lead], width - 1 - len(lead))
        return draft._replace(led=Draft(tuple(rest)))

    def draft_many(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        assert len({ask.seq for ask in asks}) == len(asks), "a sequence twice"
        self.together.append(len(asks))
        return [self.draft(*ask) for ask in asks]

    def save_context(self, seq: int) -> ContextState | None:
        if not self.of(seq):
            return None
        rows = json.dumps(sorted(self.of(seq).items())).encode()
        return ContextState(self.first_held(seq), self.covered(seq), rows)

    def load_context(self, seq: int, state: ContextState) -> bool:
        self.contexts[seq] = {int(place): int(token) for place, token in json.loads(state.data)}
        return True

    def truncate(self, seq: int, length: int) -> None:
        self.contexts[seq] = {p: t for p, t in self.of(seq).items() if p < length}

    def prepare(self, seq: int, widths: Sequence[int]) -> None:
        assert all(2 <= width <= self.block_size for width in widths)

    def set_threads(self, n_threads: int) -> None:
        self.n_threads = n_threads

    def close(self) -> None:
        self.closed = True
