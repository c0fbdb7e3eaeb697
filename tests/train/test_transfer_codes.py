"""The code space by hand, and what must hold for any head."""

from __future__ import annotations

import pytest
import torch

from dspine.errors import TrainingError
from dspine.train.module import DSpineModule
from dspine.train.transfer_codes import transfer_codes
from tests.support.training import small_config


def test_codes_by_hand() -> None:
    """Unit rows (1, 0), (0, 1), (-1, 0), (0, -1) and lengths that normalising removes.

    Their mean is 0 and their scatter diag(1/2, 1/2); stretching the first pair of rows cannot
    change that, so every code is its own unit row, in whatever basis the eigenvectors chose.
    """
    head = torch.tensor([[5.0, 0.0], [0.0, 2.0], [-0.1, 0.0], [0.0, -1.0]])
    codes, readout = transfer_codes(head, 2)
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    torch.testing.assert_close(codes @ readout, rows, atol=1e-6, rtol=1e-6)


def test_whitening_by_hand() -> None:
    """Unit rows (0.8, +-0.6) and (-0.8, +-0.6): mean 0, scatter diag(0.64, 0.36).

    Divided by the roots 0.8 and 0.6 every centred row becomes (+-1, +-1), normalised / sqrt 2.
    """
    head = torch.tensor([[0.8, 0.6], [0.8, -0.6], [-0.8, 0.6], [-0.8, -0.6]])
    codes, readout = transfer_codes(head, 2)
    torch.testing.assert_close(readout, torch.eye(2), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(codes, head.sign() / 2**0.5, atol=1e-6, rtol=1e-6)


def test_rank_1_keeps_the_strongest_direction() -> None:
    head = torch.tensor([[0.8, 0.6], [0.8, -0.6], [-0.8, 0.6], [-0.8, -0.6]])
    codes, readout = transfer_codes(head, 1)
    torch.testing.assert_close(readout, torch.tensor([[1.0, 0.0]]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(codes, torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]))


def test_centring() -> None:
    """A shared direction that is the mean leaves the codes: rows (cos a, sin a) around (1, 0)."""
    angles = torch.tensor([0.1, -0.1, 0.2, -0.2])
    head = torch.stack([angles.cos(), angles.sin(), torch.zeros(4)], dim=-1)
    codes, readout = transfer_codes(head, 1)
    # What varies most is the second coordinate, not the large constant first one.
    torch.testing.assert_close(readout.abs(), torch.tensor([[0.0, 1.0, 0.0]]), atol=1e-4, rtol=0)
    assert codes[:, 0].sign().tolist() == [1, -1, 1, -1]


def test_codes_have_unit_norm_and_whitened_scatter() -> None:
    torch.manual_seed(0)
    head = torch.randn(9000, 24) * torch.linspace(0.2, 2, 24)
    codes, readout = transfer_codes(head, 16)
    torch.testing.assert_close(codes.norm(dim=-1), torch.ones(9000))
    torch.testing.assert_close(readout @ readout.T, torch.eye(16), atol=1e-5, rtol=0)
    projected = torch.nn.functional.normalize(head, dim=-1)
    projected = (projected - projected.mean(dim=0)) @ readout.T
    scatter = projected.T @ projected / len(head)
    assert float((scatter - torch.diag(scatter.diagonal())).abs().max()) < 1e-5
    assert bool((scatter.diagonal().diff() <= 1e-6).all())


def test_the_same_head_gives_the_same_codes() -> None:
    torch.manual_seed(1)
    head = torch.randn(50, 8)
    assert torch.equal(transfer_codes(head, 4)[0], transfer_codes(head.clone(), 4)[0])


def test_refuses_more_directions_than_the_head_has() -> None:
    head = torch.zeros(6, 4)
    head[:, :2] = torch.randn(6, 2, generator=torch.Generator().manual_seed(3))
    with pytest.raises(TrainingError, match="spans only 2 directions, not 3"):
        transfer_codes(head, 3)
    with pytest.raises(TrainingError, match="not between 1 and 4"):
        transfer_codes(head, 5)


def test_readouts_are_trained_and_codes_are_not() -> None:
    names = dict(DSpineModule(small_config()).named_parameters())
    assert "transfer_codes" not in names
    assert "injection.readouts.0.weight" in names
