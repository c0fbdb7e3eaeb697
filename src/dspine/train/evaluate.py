"""Acceptance length of a drafter on held-out shards, without decoding.

At temperature 0 the target's continuation is the stored answer, so the tokens a verify would accept
are the common prefix of the drafted chain and the answer. Chains are made for every position; the
acceptance length then follows the positions that decoding would visit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspine.errors import TrainingError
from dspine.train.batches import Piece, StepBatch, eligible_anchors, make_batch
from dspine.train.kinds import Draft, DrafterModule, draft
from dspine.train.objective import DraftHead
from dspine.train.shards import Shard

_BLOCKS_PER_PASS = 256
_ORDER_SEED = 20260928

_ENOUGH = 500
"""Tokens of a source from which on it counts as much as any other in `typical_curve`."""


@dataclass(frozen=True, slots=True)
class AcceptanceReport:
    """Figures of one set of answers. Slots count from 1; `tokens / steps` is the length."""

    tokens: int
    steps: int
    unary_steps: int
    """Steps that decoding would take with the best candidate of each slot, without refinement or
    selector."""
    expected_steps: int
    """The same with the chain of the greatest expected length instead of the greedy one."""
    slot_tried: tuple[int, ...]
    slot_accepted: tuple[int, ...]
    covered: tuple[int, ...]
    """Per slot, how often the label was among the K candidates, over `labels`."""
    labels: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens per verify, bonus included."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def unary_acceptance_length(self) -> float:
        """The same with the best candidate of each slot by itself."""
        return self.tokens / self.unary_steps if self.unary_steps else 0.0

    @property
    def expected_acceptance_length(self) -> float:
        """The same with the chain of the greatest expected length."""
        return self.tokens / self.expected_steps if self.expected_steps else 0.0

    @property
    def acceptance_curve(self) -> tuple[float, ...]:
        """P(slot i accepted | all earlier slots accepted)."""
        pairs = zip(self.slot_accepted, self.slot_tried, strict=True)
        return tuple(a / t if t else 0.0 for a, t in pairs)

    @property
    def coverage(self) -> tuple[float, ...]:
        """Share of labels among the candidates, per slot."""
        return tuple(c / n if n else 0.0 for c, n in zip(self.covered, self.labels, strict=True))

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "acceptance_length": round(self.acceptance_length, 4),
            "unary_acceptance_length": round(self.unary_acceptance_length, 4),
            "expected_acceptance_length": round(self.expected_acceptance_length, 4),
            "acceptance_curve": [round(x, 4) for x in self.acceptance_curve],
            "coverage": [round(x, 4) for x in self.coverage],
        }


@dataclass(frozen=True, slots=True)
class AnswerSteps:
    """One answer: its tokens, and the verifies that decoding needs with each rule."""

    source: str
    id: str
    tokens: int
    steps: int
    unary_steps: int
    expected_steps: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All answers together, and per source."""

    overall: AcceptanceReport
    by_source: dict[str, AcceptanceReport] = field(default_factory=dict)
    answers: tuple[AnswerSteps, ...] = ()
    """In the order of the evaluation."""

    @property
    def typical_curve(self) -> tuple[float, ...]:
        """P(slot i accepted | all earlier slots accepted) on a text whose source is not known.

        Sources count alike however many of their answers are held out, but for those with few
        tokens.
        """
        weights = [min(report.tokens, _ENOUGH) for report in self.by_source.values()]
        curves = [report.acceptance_curve for report in self.by_source.values()]
        if not sum(weights):
            return self.overall.acceptance_curve
        reached = np.average(np.cumprod(curves, axis=1), axis=0, weights=weights)
        before = np.concatenate(([1.0], reached[:-1]))
        # A slot that is never reached stands for none.
        return tuple(float(r / b) if b else 0.0 for r, b in zip(reached, before, strict=True))

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            **self.overall.as_dict(),
            "by_source": {k: v.as_dict() for k, v in sorted(self.by_source.items())},
        }


class _Tally:
    def __init__(self, slots: int) -> None:
        self.tokens = self.steps = self.unary_steps = self.expected_steps = 0
        self.tried = np.zeros(slots, dtype=np.int64)
        self.accepted = np.zeros(slots, dtype=np.int64)
        self.covered = np.zeros(slots, dtype=np.int64)
        self.labels = np.zeros(slots, dtype=np.int64)

    def report(self) -> AcceptanceReport:
        def plain(a: NDArray[np.int64]) -> tuple[int, ...]:
            return tuple(int(x) for x in a)

        return AcceptanceReport(
            tokens=self.tokens,
            steps=self.steps,
            unary_steps=self.unary_steps,
            expected_steps=self.expected_steps,
            slot_tried=plain(self.tried),
            slot_accepted=plain(self.accepted),
            covered=plain(self.covered),
            labels=plain(self.labels),
        )


def evaluate_shards(
    module: DrafterModule,
    embedding: Tensor,
    head: DraftHead,
    shards: Sequence[Shard],
    *,
    max_tokens: int | None = None,
) -> Evaluation:
    """Acceptance on the temperature-0 answers of `shards`, at most about `max_tokens` of them.

    A capped evaluation takes the same answers each time, mixed over all shards.
    """
    chosen = list(_choose(shards, max_tokens))
    if not chosen:
        raise TrainingError(
            "the held-out shards have no answer at temperature 0 with two tokens in a row: "
            "capture features of such answers to measure acceptance"
        )
    slots = module.config.block_size - 1
    tallies: dict[str, _Tally] = {}
    total = _Tally(slots)
    answers: list[AnswerSteps] = []
    was_training = module.training
    module.eval()
    with torch.inference_mode():
        for pieces in _groups(chosen):
            batch = make_batch(pieces, module.config)
            drafted = draft(module, embedding, head, batch)
            start = 0
            for piece in pieces:
                rows = slice(start, start + len(piece.anchors))
                start = rows.stop
                answer = _answer(piece, batch, rows, drafted)
                answers.append(answer)
                for tally in (total, tallies.setdefault(answer.source, _Tally(slots))):
                    _count(tally, answer, batch, rows, drafted)
    module.train(was_training)
    by_source = {k: t.report() for k, t in tallies.items()}
    return Evaluation(total.report(), by_source, tuple(answers))


def simulate(accepted: NDArray[np.int64]) -> int:
    """Verifies that decoding needs: from anchor 0 every step moves on by accepted + 1."""
    position = steps = 0
    while position < len(accepted):
        position += int(accepted[position]) + 1
        steps += 1
    return steps


def _choose(shards: Sequence[Shard], max_tokens: int | None) -> Iterator[Piece]:
    pairs = [
        (shard, i)
        for shard in shards
        for i, temperature in enumerate(shard.info.temperatures)
        if temperature == 0
    ]
    order = np.random.default_rng(_ORDER_SEED).permutation(len(pairs))
    tokens = 0
    for index in order:
        if max_tokens is not None and tokens >= max_tokens:
            return
        shard, sequence = pairs[int(index)]
        anchors = eligible_anchors(shard.loss_mask[shard.sequence(sequence)])
        # Decoding walks one run of labels; a later run in the same text is another answer.
        gaps = np.flatnonzero(np.diff(anchors) > 1)
        if len(gaps):
            anchors = anchors[: gaps[0] + 1]
        if len(anchors):
            tokens += len(anchors)
            yield Piece(shard, sequence, anchors)


def _groups(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + len(piece.anchors) > _BLOCKS_PER_PASS:
            yield group
            group, size = [], 0
        group.append(piece)
        size += len(piece.anchors)
    if group:
        yield group


def _accepted(tokens: Tensor, batch: StepBatch, rows: slice) -> NDArray[np.int64]:
    """Drafts that a verify after each anchor of `rows` would keep."""
    right = (tokens[rows] == batch.labels[rows]) & batch.supervised[rows]
    return right.long().cumprod(dim=1).sum(dim=1).numpy()


def _answer(piece: Piece, batch: StepBatch, rows: slice, drafted: Draft) -> AnswerSteps:
    info = piece.shard.info
    every = (drafted.chain, drafted.unary, drafted.expected)
    steps, unary, expected = (simulate(_accepted(tokens, batch, rows)) for tokens in every)
    return AnswerSteps(
        source=info.sources[piece.sequence],
        id=info.ids[piece.sequence],
        tokens=len(piece.anchors),
        steps=steps,
        unary_steps=unary,
        expected_steps=expected,
    )


def _count(
    tally: _Tally, answer: AnswerSteps, batch: StepBatch, rows: slice, drafted: Draft
) -> None:
    labels, usable = batch.labels[rows], batch.supervised[rows]
    accepted = _accepted(drafted.chain, batch, rows)
    tally.tokens += answer.tokens
    tally.steps += answer.steps
    tally.unary_steps += answer.unary_steps
    tally.expected_steps += answer.expected_steps
    available = usable.sum(dim=1).numpy()
    for slot in range(len(tally.tried)):
        reached = (accepted >= slot) & (available > slot)
        tally.tried[slot] += int(reached.sum())
        tally.accepted[slot] += int((reached & (accepted > slot)).sum())
    covered = (drafted.candidates[rows] == labels[..., None]).any(dim=-1)
    tally.labels += usable.sum(dim=0).numpy()
    tally.covered += (covered & usable).sum(dim=0).numpy()
