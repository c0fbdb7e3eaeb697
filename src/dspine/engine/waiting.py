"""What confirmed tokens cost that wait to be stored again, and when that has cost enough.

Where rejected drafts are taken back with a saved state, the confirmed tokens of that block are
no longer in memory. They wait and ride in front of the next decode, again and again while blocks
are rejected. A decode without drafts stores them for good. It is never a pass of their own: with
the anchor behind them it costs one row more and gives a token, and no token is had for less than
a row. So at each step the choice is a block behind the waiting rows, or the anchor alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Copies:
    """Milliseconds of copying a recurrent state: before a block now, and after a rejection."""

    save_ms: float
    restore_ms: float


class StoringRule:
    """Store the waiting rows once carrying them has cost what storing them costs.

    Ski rental, or the acknowledgement of waiting packets: nobody knows how many blocks will be
    rejected before one is accepted whole, which clears them for nothing. With rows that cost the
    same each, carrying and storing together cost at most twice what they would for one who knows
    the text (Dooly, Goldman and Scott, 2001, on acknowledgements). Where further rows are free,
    nothing is ever stored for their sake.
    """

    def __init__(self) -> None:
        self._paid = 0.0

    def due(self, rows_ms: Sequence[float], waiting: int, width: int, token_ms: float) -> bool:
        """Whether this step should decode the anchor alone; ask once for each step.

        `rows_ms[n - 1]` is a decode of n rows, `width` the rows of the block that would be
        verified, `token_ms` what a token costs lately.
        """
        if not waiting:
            self._paid = 0.0
            return False
        carried, block = rows_ms[waiting + width - 1], rows_ms[width - 1]
        self._paid += carried - block
        # Storing now: the anchor behind the rows, then the block without them, a token more.
        price = rows_ms[waiting] + block - carried - token_ms
        if self._paid <= price or self._paid <= 0.0:
            return False
        self._paid = 0.0
        return True


def owed_ms(
    rows_ms: Sequence[float], waiting: int, most: int, speedup: float, copies: Copies
) -> list[float]:
    """What a rejection costs later: entry k is for k confirmed tokens, up to `most` of them.

    The state comes back, and the next decode has k rows more in front besides the `waiting`
    ones. Then they are carried once more, or stored by a plain step, which loses what drafting
    gains in its time: the lesser of the two counts.
    """
    plain = rows_ms[0]
    lost = (speedup - 1.0) * plain
    owed = [0.0]
    for count in range(1, most + 1):
        carried = rows_ms[min(waiting + count, len(rows_ms) - 1)] - plain
        owed.append(copies.restore_ms + carried + min(carried, lost))
    return owed
