"""The frozen code space of a drafter: one unit vector per token, made from the target's head.

Rows of the head are L2-normalised, centred, projected on the top r eigenvectors of their
scatter, divided by the root of the eigenvalue, and L2-normalised again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspine.errors import TrainingError

_CHUNK = 8192


def transfer_codes(head: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Codes (V, r) of every row of `head` (V, H), and the eigenvectors transposed (r, H).

    The second is the starting value of every readout. The scatter is the mean outer product of
    the centred rows. Raises TrainingError if one of the r eigenvalues is not positive.
    """
    vocab, hidden = head.shape
    if not 1 <= rank <= min(hidden, vocab - 1):
        raise TrainingError(
            f"transfer_rank {rank} is not between 1 and {min(hidden, vocab - 1)}, the most that a "
            f"head of {vocab} rows of {hidden} carries: choose a smaller one"
        )
    rows = torch.nn.functional.normalize(head.float(), dim=-1)
    mean = rows.mean(dim=0)
    scatter = torch.zeros(hidden, hidden)
    for chunk in torch.split(rows, _CHUNK):
        centred = chunk - mean
        scatter += centred.T @ centred
    scatter /= vocab
    values, vectors = torch.linalg.eigh(scatter)
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    # Rounding gives a rank-deficient scatter tiny eigenvalues of either sign.
    floor = values[0].clamp_min(0) * hidden * torch.finfo(torch.float32).eps
    if not bool((values > floor).all()):
        usable = int((values > floor).sum())
        raise TrainingError(
            f"the target's head spans only {usable} directions, not {rank}: "
            f"choose a transfer_rank of at most {usable}"
        )
    vectors = _fixed_signs(vectors)
    codes = torch.cat(
        [(chunk - mean) @ vectors / values.sqrt() for chunk in torch.split(rows, _CHUNK)]
    )
    return torch.nn.functional.normalize(codes, dim=-1), vectors.T.contiguous()


def _fixed_signs(vectors: Tensor) -> Tensor:
    """An eigenvector's sign is arbitrary: make its largest entry positive, to repeat exactly."""
    largest = vectors.abs().argmax(dim=0)
    signs = vectors.gather(0, largest[None])[0].sign()
    return vectors * signs
