"""The random numbers of sampling: functions of seed, purpose and place."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dspine.engine.noise import Noise, Purpose
from tests.support.toy_target import (
    chi_square,
    is_plausible,
    softmax,
)


def test_noise_is_a_function_of_its_place() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    noise, again = Noise(42), Noise(42)
    rows = noise.gumbel_rows(Purpose.SAMPLE, 10, np.tile(tokens, (3, 1)))
    assert (rows[2] == again.gumbel(Purpose.SAMPLE, 12, tokens)).all()
    some = np.array([[5, 900]], np.int32)
    assert (noise.gumbel_rows(Purpose.SAMPLE, 10, some)[0] == rows[0, [5, 900]]).all()
    for other in (rows[1], noise.gumbel(Purpose.DRAFT, 10, tokens), Noise(43).gumbel(
        Purpose.SAMPLE, 10, tokens)):  # fmt: skip
        assert abs(np.corrcoef(rows[0], other)[0, 1]) < 0.12
    # Gumbel: mean is Euler's constant, variance pi^2 / 6.
    many = noise.gumbel(Purpose.SAMPLE, 1, np.arange(100_000, dtype=np.int32))
    assert many.mean() == pytest.approx(0.5772, abs=0.015)
    assert many.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    uniform = np.array([noise.uniform(Purpose.ACCEPT, place) for place in range(5000)])
    assert uniform.min() > 0 and uniform.max() < 1
    counts, _ = np.histogram(uniform, 20, (0, 1))
    assert is_plausible(*chi_square(counts.astype(float), np.full(20, 0.05)))


def test_the_largest_of_logits_plus_noise_is_a_draw_from_their_softmax() -> None:
    logits = np.array([0.3, -1.0, 2.0, 0.0, 1.0])
    noise, ids = Noise(random.Random(1).getrandbits(64)), np.arange(5, dtype=np.int32)
    counts = np.zeros(5)
    for place in range(20_000):
        counts[(logits + noise.gumbel(Purpose.SAMPLE, place, ids)).argmax()] += 1
    assert is_plausible(*chi_square(counts, softmax(logits)))
