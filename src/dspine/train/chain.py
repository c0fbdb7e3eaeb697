"""From the candidates of each slot to one chain of drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from dspine.train.backbone import BlockOutput
from dspine.train.dflash import DFlash2Module
from dspine.train.module import DSpineModule, DSpineOutput


def top_candidates(hidden: Tensor, head: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Scores and row ids (..., K) of the best `count` head rows, best first."""
    best = (hidden @ head.transpose(0, 1)).topk(count, dim=-1)
    return best.values, best.indices


def walk_chain(table: Tensor) -> Tensor:
    """Greedy walk of S (A, slots, K, K): index of the chosen candidate per slot, (A, slots)."""
    row = torch.zeros(table.shape[0], dtype=torch.long, device=table.device)
    everyone = torch.arange(table.shape[0], device=table.device)
    chosen = []
    for slot in range(table.shape[1]):
        row = table[everyone, slot, row].argmax(dim=-1)
        chosen.append(row)
    return torch.stack(chosen, dim=1)


def expected_chain(table: Tensor) -> tuple[Tensor, Tensor]:
    """The chain of S (A, slots, K, K) with the greatest expected number of accepted drafts.

    The softmax of a row is taken as the chances of the slot's candidates after that predecessor.
    A chain c has the expectation sum over i of prod over j <= i of p_j(c_j | c_j-1), so the best
    continuation after candidate k of slot i - 1 is V_i(k) = max_j p_i(j | k) (1 + V_i+1(j)), which
    one pass from the last slot to the first gives exactly, without a beam.
    Returns the chosen candidates (A, slots) and the expectation (A,).
    """
    chances = torch.softmax(table.float(), dim=-1)
    value = torch.zeros_like(chances[:, 0, :, 0])
    choices = []
    for slot in range(table.shape[1] - 1, -1, -1):
        value, choice = (chances[:, slot] * (1 + value[:, None, :])).max(dim=-1)
        choices.append(choice)
    everyone = torch.arange(table.shape[0], device=table.device)
    row = torch.zeros(table.shape[0], dtype=torch.long, device=table.device)
    chosen = []
    for choice in reversed(choices):
        row = choice[everyone, row]
        chosen.append(row)
    return torch.stack(chosen, dim=1), value[:, 0]


def transition_table(
    module: DSpineModule | DFlash2Module,
    output: BlockOutput,
    anchors: Tensor,
    tokens: Tensor,
    rows: Tensor,
    head: Tensor,
) -> Tensor:
    """S (A, B - 1, K, K) of the candidates: rows (A, B - 1, K) of head (D, H), tokens their ids."""
    if isinstance(module, DFlash2Module):
        return module.transition_table(output, anchors, tokens, rows, head)
    assert isinstance(output, DSpineOutput)
    return module.transition_table(output, anchors, tokens, rows, head)


def pick(tokens: Tensor, chosen: Tensor) -> Tensor:
    """Target ids (A, slots) of the chosen ones among the candidates (A, slots, K)."""
    return tokens.gather(-1, chosen[..., None])[..., 0]


def draft_chain(
    module: DSpineModule | DFlash2Module,
    output: BlockOutput,
    anchors: Tensor,
    head: Tensor,
    rows: Tensor,
    tokens: Tensor,
) -> Tensor:
    """Chain of target ids (A, B - 1) from the candidates: transition table and greedy walk."""
    return pick(tokens, walk_chain(transition_table(module, output, anchors, tokens, rows, head)))
