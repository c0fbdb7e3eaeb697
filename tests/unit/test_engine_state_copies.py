"""When a copy of a recurrent state for every draft is kept, and what is said about it."""

from __future__ import annotations

import pytest

from dspine.engine.state_copies import StateCopies, snapshots_or_not
from dspine.engine.waiting import Copies

MIB = 2**20
NOTHING = Copies(0.0, 0.0)


@pytest.mark.parametrize(
    ("size", "kept", "free", "drafts", "n_batch", "fits", "told"),
    [
        (20 * MIB, 15, 6000 * MIB, 15, 512, True, "15 snapshots take 300.0 MiB, at most 5%"),
        (20 * MIB, 15, 5999 * MIB, 15, 512, False, "more than 5% of the 5999 MiB"),
        (20 * MIB, 3, 5999 * MIB, 3, 512, True, "3 snapshots take 60.0 MiB"),
        (20 * MIB, 0, 6000 * MIB, 15, 512, False, "keeps no snapshots"),
        (20 * MIB, 15, None, 15, 512, False, "is unknown"),
        (20 * MIB, 15, 6000 * MIB, 15, 16, False, "need batches of 17 tokens"),
        (20 * MIB, 0, 6000 * MIB, 0, 512, False, "nothing is drafted"),
    ],
)
def test_snapshots_are_kept_where_they_are_small(
    size: int, kept: int, free: int | None, drafts: int, n_batch: int, fits: bool, told: str
) -> None:
    copies = StateCopies(size, NOTHING, kept, free)
    assert snapshots_or_not(copies, drafts, n_batch)[0] is fits
    assert told in snapshots_or_not(copies, drafts, n_batch)[1]


def test_each_slot_of_several_has_snapshots_of_its_own() -> None:
    copies = StateCopies(20 * MIB, NOTHING, 15, 6000 * MIB)
    assert snapshots_or_not(copies, 15, 512)[0]
    fits, told = snapshots_or_not(copies, 15, 512, 2)
    assert not fits
    assert "15 snapshots for each of 2 slots take 600.0 MiB, more than 5%" in told
