"""Which tokens were decoded together and what was kept: enough to repeat it without a drafter."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DecodeRecord:
    """One decode: `tokens` at `position`; afterwards the first `keep` positions are confirmed.

    `first_row` is the row of the anchor (rows before it repeat confirmed tokens), `emitted` how
    many tokens the step gave: those after rows first_row ... first_row + emitted - 1.
    """

    position: int
    tokens: tuple[int, ...]
    keep: int
    first_row: int
    emitted: int


@dataclass(slots=True)
class Trace:
    """All decodes of one generation, in order."""

    chunks: list[tuple[int, ...]] = field(default_factory=list)
    """The prompt as it was decoded, all but its last token."""
    steps: list[DecodeRecord] = field(default_factory=list)
