"""Every term of the objective against numbers worked out by hand or by plain autograd."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dspine.train.attend import SequenceView
from dspine.train.batches import StepBatch
from dspine.train.kinds import TeacherForcing, train_losses
from dspine.train.losses import dspine_losses
from dspine.train.module import DSpineModule
from dspine.train.objective import (
    DraftHead,
    StepWeights,
    alignment_distance,
    backbone_loss,
    grouped_topk,
    refinement_loss,
    slot_weights,
)
from tests.support.tiny_drafter import TinyPair, tiny_config
from tests.support.training import run_blocks, torch_module


def test_slot_weights_by_hand() -> None:
    expected = torch.tensor([1.0, math.exp(-0.25), math.exp(-0.5)])
    torch.testing.assert_close(slot_weights(4, 4.0), expected)


def test_backbone_terms_by_hand() -> None:
    """Logits ln 1, ln 2, ln 5 make p = 1/8, 2/8, 5/8."""
    head = torch.eye(3)
    hidden = torch.tensor([[1.0, 2.0, 5.0]]).log()
    loss, ce, l1, top = backbone_loss(
        hidden,
        head,
        label=torch.tensor([1]),
        teacher_rows=torch.tensor([[2, 0]]),
        teacher_probs=torch.tensor([[0.5, 0.25]]),
        weight=torch.tensor([2.0]),
        ce_share=0.1,
        top_k=2,
    )
    assert ce.item() == pytest.approx(math.log(4))
    # |5/8 - 1/2| + |1/8 - 1/4| on the teacher's entries, and p = 2/8 outside of them.
    assert l1.item() == pytest.approx(0.125 + 0.125 + 0.25)
    assert loss.item() == pytest.approx(2 * (0.1 * math.log(4) + 0.9 * 0.5))
    assert top.tolist() == [[2, 1]]


def dense_loss(
    hidden: torch.Tensor, head: torch.Tensor, label: torch.Tensor, teacher: torch.Tensor,
    weight: torch.Tensor, share: float,
) -> torch.Tensor:  # fmt: skip
    """The same loss written with a dense teacher (R, D) and autograd."""
    log_p = torch.log_softmax(hidden @ head.T, dim=-1)
    ce = -log_p.gather(1, label.clamp_min(0)[:, None])[:, 0] * (label >= 0)
    l1 = (log_p.exp() - teacher).abs().sum(dim=-1) * (teacher.sum(dim=-1) > 0)
    return (weight * (share * ce + (1 - share) * l1)).sum()


@pytest.mark.parametrize("share", [1.0, 0.0, 0.3])
def test_backbone_value_and_gradient_equal_autograd(share: float) -> None:
    torch.manual_seed(1)
    rows, vocab, size = 300, 512, 8
    head = torch.randn(vocab, size)
    hidden = torch.randn(rows, size)
    label = torch.randint(-1, vocab, (rows,))
    label[0] = -1
    ids = torch.rand(rows, vocab).argsort(dim=-1)[:, :6]
    probs = torch.softmax(torch.randn(rows, 6), dim=-1)
    ids[1, 2:] = -1  # teacher tokens outside the draft vocabulary
    probs[2] = 0  # a slot without a teacher
    weight = torch.rand(rows)
    teacher = torch.zeros(rows, vocab).scatter_add_(1, ids.clamp_min(0), probs * (ids >= 0))
    a, b = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss = backbone_loss(a, head, label, ids, probs, weight, share, 16)[0]
    expected = dense_loss(b, head, label, teacher, weight, share)
    torch.testing.assert_close(loss, expected)
    torch.autograd.backward([2 * loss, 2 * expected])
    torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)


def test_grouped_topk_is_topk() -> None:
    torch.manual_seed(2)
    logits = torch.randn(7, 1024)
    logits[0, :20] = 9 + torch.rand(20)  # many of the best in two neighbouring groups
    assert grouped_topk(logits, 16).tolist() == logits.topk(16).indices.tolist()
    odd = torch.randn(3, 50)
    assert grouped_topk(odd, 5).tolist() == odd.topk(5).indices.tolist()


def test_refinement_by_hand() -> None:
    """Candidates 4, 7 with p = 1/4, 3/4; the teacher has 0.3 and 0.1 on them, so 3/4 and 1/4."""
    scores = torch.tensor([[1.0, 3.0]]).log()
    ce, l1 = refinement_loss(
        scores,
        torch.tensor([[4, 7]]),
        torch.tensor([4]),
        torch.tensor([[9, 7, 4]]),
        torch.tensor([[0.6, 0.1, 0.3]]),
        1e-4,
    )
    assert ce.item() == pytest.approx(math.log(4))
    assert l1.item() == pytest.approx(0.5 + 0.5)


def test_refinement_without_the_label_or_the_teacher_is_nothing() -> None:
    scores = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    ce, l1 = refinement_loss(
        scores,
        torch.tensor([[4, 7], [4, 7]]),
        torch.tensor([5, -1]),
        torch.tensor([[4, 9], [4, 9]]),
        torch.tensor([[1e-4, 0.9], [2e-4, 0.9]]),
        1e-4,
    )
    assert ce.tolist() == [0, 0]
    # Mass at the threshold is dropped; above it the teacher renormalises to 1 on candidate 4.
    p = torch.softmax(scores[1], dim=-1)
    assert l1.tolist() == [0, pytest.approx(float(1 - p[0] + p[1]))]


def test_alignment_by_hand() -> None:
    feature = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    code = torch.tensor([[4.0, 3.0], [0.0, 1.0]])
    torch.testing.assert_close(alignment_distance(feature, code), torch.tensor([1 - 24 / 25, 0.0]))


def random_step(pair: TinyPair, blocks: int = 5) -> StepBatch:
    torch.manual_seed(4)
    c, slots = pair.config, pair.config.block_size - 1
    supervised = torch.ones(blocks, slots, dtype=torch.bool)
    supervised[1, 2:] = False
    return StepBatch(
        features=torch.from_numpy(pair.features(20)),
        context_positions=torch.arange(20),
        views=(SequenceView(0, 20, 0, blocks),),
        anchor_positions=torch.arange(3, 3 + 3 * blocks, 3),
        anchors=torch.randint(0, c.vocab_size, (blocks,)),
        labels=torch.randint(0, c.vocab_size, (blocks, slots)),
        supervised=supervised,
        teacher_ids=torch.rand(blocks, slots, c.vocab_size).argsort(dim=-1)[..., :4],
        teacher_probs=torch.softmax(torch.randn(blocks, slots, 4), dim=-1),
    )


@pytest.fixture
def pair() -> TinyPair:
    return TinyPair(tiny_config((None, 9)), seed=6)


def losses_of(
    pair: TinyPair, batch: StepBatch, weights: StepWeights, module: DSpineModule | None = None,
    head: DraftHead | None = None, replacement: float = 0.0,
) -> float:  # fmt: skip
    matrix = torch.from_numpy(pair.head)
    losses = train_losses(
        module or torch_module(pair),
        torch.from_numpy(pair.embedding),
        head or DraftHead.build(matrix, None),
        batch,
        weights,
        TeacherForcing(replacement, 2),
    )
    return float(losses.total.detach())


def test_total_is_the_weighted_mean_of_slots(pair: TinyPair) -> None:
    """Backbone alone, recomputed slot by slot with plain functions."""
    batch, module = random_step(pair), torch_module(pair)
    head = torch.from_numpy(pair.head)
    embedding = torch.from_numpy(pair.embedding)
    weights = StepWeights(ce_share=1.0, beta=0.0, gamma=2.0, refinement=0.0)
    found = losses_of(pair, batch, weights, module)
    anchors = list(zip(batch.anchors.tolist(), batch.anchor_positions.tolist(), strict=True))
    output = run_blocks(module, embedding, [(batch.features, anchors)])
    total = scale = 0.0
    for a in range(len(anchors)):
        for slot in range(pair.config.block_size - 1):
            if not bool(batch.supervised[a, slot]):
                break
            weight = math.exp(-slot / 2.0)
            log_p = torch.log_softmax(head @ output.hidden[a, slot], dim=0)
            total -= weight * float(log_p[batch.labels[a, slot]].detach())
            scale += weight
    assert found == pytest.approx(total / scale, rel=1e-5)


def test_alignment_is_weighted_by_the_detached_cross_entropy(pair: TinyPair) -> None:
    batch, module = random_step(pair), torch_module(pair)
    head = DraftHead.build(torch.from_numpy(pair.head), None)
    embedding = torch.from_numpy(pair.embedding)
    base = StepWeights(ce_share=0.4, beta=0.0, gamma=4.0)
    without = losses_of(pair, batch, base, module)
    with_beta = train_losses(
        module, embedding, head, batch, replace(base, beta=0.5), TeacherForcing()
    )
    expected = without + 0.5 * with_beta.ce * with_beta.alignment
    assert float(with_beta.total.detach()) == pytest.approx(expected, rel=1e-5)
    # With one layer's readout as the only free parameter, the gradient of the alignment term is
    # beta * CE * d(distance): scaling beta scales exactly that part.
    gradients = []
    readout = module.injection.readout(0).weight
    for beta in (0.0, 1.0, 2.0):
        module.zero_grad()
        losses = train_losses(
            module, embedding, head, batch, replace(base, beta=beta), TeacherForcing()
        )
        torch.autograd.backward(losses.total)
        assert readout.grad is not None
        gradients.append(readout.grad.clone())
    torch.testing.assert_close(
        gradients[2] - gradients[0], 2 * (gradients[1] - gradients[0]), atol=1e-5, rtol=1e-3
    )


def test_unsupervised_slots_do_not_count(pair: TinyPair) -> None:
    batch = random_step(pair)
    weights = StepWeights(ce_share=0.5, beta=0.3, gamma=4.0)
    labels, ids = batch.labels.clone(), batch.teacher_ids.clone()
    labels[1, 2:] = 0
    ids[1, 2:] = 5
    changed = replace(batch, labels=labels, teacher_ids=ids)
    assert losses_of(pair, batch, weights) == pytest.approx(losses_of(pair, changed, weights))


def test_a_label_outside_the_draft_vocabulary_only_drops_its_cross_entropy(pair: TinyPair) -> None:
    batch = random_step(pair)
    weights = StepWeights(ce_share=1.0, beta=0.0, gamma=4.0, refinement=0.0)
    outside = int(batch.labels[0, 0])
    kept = torch.tensor([t for t in range(pair.config.vocab_size) if t != outside])
    head = DraftHead.build(torch.from_numpy(pair.head), kept)
    assert head.rows(torch.tensor([outside])).item() == -1
    module = torch_module(pair)
    with torch.no_grad():
        losses = train_losses(
            module,
            torch.from_numpy(pair.embedding),
            head,
            replace(
                batch,
                anchors=batch.anchors[:1],
                anchor_positions=batch.anchor_positions[:1],
                views=(SequenceView(0, 20, 0, 1),),
                labels=torch.full_like(batch.labels[:1], outside),
                supervised=torch.ones_like(batch.supervised[:1]),
                teacher_ids=batch.teacher_ids[:1],
                teacher_probs=batch.teacher_probs[:1],
            ),
            weights,
            TeacherForcing(),
        )
    assert losses.ce == 0 and losses.l1 > 0
    assert (losses.accuracy, losses.coverage, losses.chain_accuracy) == (0, 0, 0)


def test_replacement_gives_true_predecessors_to_whole_blocks(pair: TinyPair) -> None:
    """Chance 1 replaces all: the same as forcing the label codes in both layers."""
    batch, module = random_step(pair), torch_module(pair)
    weights = StepWeights(ce_share=0.5, beta=0.2, gamma=4.0)
    head = DraftHead.build(torch.from_numpy(pair.head), None)
    embedding = torch.from_numpy(pair.embedding)
    previous = torch.cat([batch.anchors[:, None], batch.labels[:, :-1]], dim=1)
    anchors = list(zip(batch.anchors.tolist(), batch.anchor_positions.tolist(), strict=True))
    output = run_blocks(
        module,
        embedding,
        [(batch.features, anchors)],
        true_codes=module.code(previous),
        replaced=torch.ones(len(anchors), dtype=torch.bool),
        replacement_layers=2,
    )
    forced = float(dspine_losses(module, output, batch, head, weights).total.detach())
    assert losses_of(pair, batch, weights, module, replacement=1.0) == pytest.approx(forced)
    assert losses_of(pair, batch, weights, module) != pytest.approx(forced, rel=1e-3)
