"""The walk through the transition table, by hand and against a plain loop."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from dspine.drafters.backbone.chain import Chain
from dspine.drafters.base import Draft, Draw
from dspine.engine.noise import Noise, Purpose
from dspine.errors import UsageError
from tests.support.toy_target import chi_square, is_plausible


def walk(
    candidates: npt.NDArray[np.int32],
    first_row: npt.NDArray[np.float32],
    table: npt.NDArray[np.float32],
    draw: Draw | None = None,
) -> Draft:
    """One walk over such arrays."""
    return Chain(candidates, first_row, table).walk(draw)


def test_each_slot_reads_the_row_of_the_candidate_chosen_before() -> None:
    candidates = np.array([[10, 11], [20, 21], [30, 31]], dtype=np.int32)
    first = np.array([0.0, 3.0], dtype=np.float32)
    table = np.array(
        [
            [[9.0, 0.0], [1.0, 2.0]],  # after 10 best is 20, after 11 best is 21
            [[0.0, 9.0], [5.0, 4.0]],  # after 20 best is 31, after 21 best is 30
        ],
        dtype=np.float32,
    )
    draft = walk(candidates, first, table)
    assert draft.tokens == (11, 21, 30)
    sigmoid = [1 / (1 + np.exp(-gap)) for gap in (3.0, 1.0, 1.0)]
    assert draft.scores == pytest.approx(sigmoid, rel=1e-6)


def test_a_forced_beginning_hands_its_last_token_on() -> None:
    candidates = np.array([[10, 11], [20, 21], [30, 31], [40, 41]], dtype=np.int32)
    first = np.array([0.0, 3.0], dtype=np.float32)
    table = np.array(
        [
            [[9.0, 0.0], [1.0, 2.0]],
            [[0.0, 9.0], [5.0, 4.0]],  # after 20 best is 31, after 21 best is 30
            [[0.0, 2.0], [1.0, 0.0]],  # after 30 best is 41, after 31 best is 40
        ],
        dtype=np.float32,
    )
    chain = Chain(candidates, first, table)
    assert chain.walk().tokens == (11, 21, 30, 41)
    # 20 is a candidate of slot 2: its row is in the table. It forces 31 and so 40.
    led = chain.after(2, table[1, 0]).walk()
    assert led.tokens == (31, 40)
    sigmoid = [1 / (1 + np.exp(-gap)) for gap in (9.0, 1.0)]
    assert led.scores == pytest.approx(sigmoid, rel=1e-6)
    # 77 is none: its row comes from its own code, here the opposite choice.
    led = chain.after(2, np.array([6.0, 5.0], np.float32)).walk()
    assert led.tokens == (30, 41)
    assert led.scores[0] == pytest.approx(1 / (1 + np.exp(-1.0)))
    assert chain.after(3, table[2, 1]).walk().tokens == (40,), "one slot is left"
    assert chain.walk().tokens == (11, 21, 30, 41), "the chain itself is what it was"


def test_noise_after_a_forced_beginning_is_that_of_its_places() -> None:
    noise = Noise(3)
    draw = Draw(1.0, 0.0, partial(noise.gumbel_rows, Purpose.SAMPLE, 40), False)
    ids = np.array([[5, 6, 7], [8, 9, 10], [11, 12, 13]], np.int32)
    np.testing.assert_array_equal(draw.after(2).noise(ids[2:]), draw.noise(ids)[2:])


def test_a_single_slot_needs_no_table() -> None:
    draft = walk(
        np.array([[4, 5, 6]], dtype=np.int32),
        np.array([1.0, 1.0, 0.0], dtype=np.float32),
        np.empty((0, 3, 3), dtype=np.float32),
    )
    assert draft.tokens == (4,), "a tie goes to the lower index"
    assert draft.scores == pytest.approx([np.e / (2 * np.e + 1)])


def test_large_scores_do_not_overflow() -> None:
    draft = walk(
        np.array([[1, 2]], dtype=np.int32),
        np.array([3e4, -3e4], dtype=np.float32),
        np.empty((0, 2, 2), dtype=np.float32),
    )
    assert draft.tokens == (1,)
    assert draft.scores == (1.0,)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scores_that_are_not_numbers_are_refused(bad: float) -> None:
    ids = np.array([[1, 2], [3, 4]], np.int32)
    fine, spoilt = np.array([1.0, 0.0], np.float32), np.array([0.0, bad], np.float32)
    for first, table in ((spoilt, [fine, fine]), (fine, [spoilt, fine])):
        with pytest.raises(FloatingPointError, match="not numbers"):
            walk(ids, first, np.array([table], np.float32))


def test_a_chain_reads_what_stands_in_its_arrays_now() -> None:
    ids = np.array([[1, 2], [3, 4]], np.int32)
    first = np.array([1.0, 0.0], np.float32)
    # As DFlash has it: whatever was chosen before, the row is the same.
    later = np.array([0.0, 1.0], np.float32)
    chain = Chain(ids, first, np.broadcast_to(later, (1, 2, 2)))
    assert chain.walk().tokens == (1, 4)
    ids[0, 1], first[:], later[:] = 9, (0.0, 1.0), (1.0, 0.0)
    assert chain.walk().tokens == (9, 3)


@pytest.mark.parametrize("seed", range(20))
def test_it_equals_a_plain_loop(seed: int) -> None:
    random = np.random.default_rng(seed)
    slots, k = int(random.integers(1, 16)), int(random.integers(1, 17))
    candidates = random.integers(0, 1000, (slots, k)).astype(np.int32)
    first = random.standard_normal(k).astype(np.float32)
    table = random.standard_normal((slots - 1, k, k)).astype(np.float32)
    draft = walk(candidates, first, table)
    row = first
    for slot in range(slots):
        best = max(range(k), key=lambda j: row[j])
        assert draft.tokens[slot] == candidates[slot, best]
        odds = [float(np.exp(x)) for x in row]
        assert draft.scores[slot] == pytest.approx(odds[best] / sum(odds), rel=1e-5)
        if slot + 1 < slots:
            row = table[slot, best]


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(UsageError, match=r"3 slots of 2 candidates.*\(1, 2, 2\)"):
        walk(
            np.zeros((3, 2), dtype=np.int32),
            np.zeros(2, dtype=np.float32),
            np.zeros((1, 2, 2), dtype=np.float32),
        )


def test_a_drawn_path_has_the_distribution_of_its_rows() -> None:
    candidates = np.array([[4, 5, 6], [7, 8, 9]], dtype=np.int32)
    first = np.array([0.0, 1.0, -4.0], dtype=np.float32)
    table = np.array([[[2, 0, 1], [0, 0.5, 0], [1, 1, 1]]], dtype=np.float32)
    noise, counts = Noise(3), np.zeros((3, 3))
    for place in range(6000):
        own = partial(noise.gumbel_rows, Purpose.DRAFT, place << 8)
        draw = Draw(0.5, 0.05, own, with_distributions=True)
        draft = walk(candidates, first, table, draw)
        one, two = draft.drawn
        assert draft.tokens == (one.token, two.token)
        assert (one.candidates == candidates[0]).all() and (two.candidates == candidates[1]).all()
        counts[one.token - 4, two.token - 7] += 1
        if place < 50:
            greedy = walk(candidates, first, table)
            assert draft.scores == greedy.scores, "scores do not depend on what was drawn"
    # Temperature 0.5 doubles the scores; -4 is below a twentieth of the best one and left out.
    p_first = np.array([1.0, np.e**2, 0.0]) / (1 + np.e**2)
    p_next = np.exp(2 * table[0]) / np.exp(2 * table[0]).sum(axis=1, keepdims=True)
    assert one.probabilities == pytest.approx(p_first)
    assert is_plausible(*chi_square(counts.ravel(), (p_first[:, None] * p_next).ravel()))
