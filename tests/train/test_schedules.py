"""Schedules at their corners, computed by hand."""

from __future__ import annotations

import pytest

from dspine.train.schedules import LossSchedule, learning_rate


@pytest.mark.parametrize(
    ("progress", "expected"),
    [(0.0, 0.0), (0.1, 1.0), (0.2, 2.0), (0.6, 2 * (0.1 + 0.9 / 2)), (1.0, 0.2), (1.5, 0.2)],
)
def test_warmup_then_cosine_to_the_floor(progress: float, expected: float) -> None:
    found = learning_rate(progress, peak=2.0, warmup=0.2, floor=0.1)
    assert found == pytest.approx(expected)


def test_no_warmup_starts_at_the_peak() -> None:
    assert learning_rate(0.0, peak=3.0, warmup=0.0, floor=0.0) == 3.0


@pytest.mark.parametrize(
    ("progress", "expected"), [(0.0, 1.0), (0.25, 0.55), (0.5, 0.1), (0.9, 0.1)]
)
def test_cross_entropy_share_moves_over_the_first_half(progress: float, expected: float) -> None:
    assert LossSchedule().ce_share(progress) == pytest.approx(expected)


def test_published_weights_from_the_start() -> None:
    assert LossSchedule(mix_until=0.0).ce_share(0.0) == 0.1


@pytest.mark.parametrize(("step", "expected"), [(0, 0.0), (73, 0.25), (146, 0.5), (9999, 0.5)])
def test_beta_ramps_over_146_steps(step: int, expected: float) -> None:
    assert LossSchedule().beta(step) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("progress", "expected"), [(0.0, 0.5), (1 / 6, 0.5), (0.25, 0.25), (1 / 3, 0.0), (0.8, 0.0)]
)
def test_replacement_holds_then_falls(progress: float, expected: float) -> None:
    assert LossSchedule().replacement(progress) == pytest.approx(expected)
