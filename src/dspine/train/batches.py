"""From feature shards to training steps: which sequences come next, and the tensors of a step.

Sequences are visited in shuffled epochs. Shards that appear in the folder while training runs join
the current epoch, so fresh data is used at once. Everything is a function of the seed, the step
number and the order in which shards were seen, and the state is small enough for a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dspine.errors import TrainingError
from dspine.files.schema import DrafterConfig
from dspine.train.attend import SequenceView
from dspine.train.shards import Shard, list_shards


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A blocks of several sequences over N context rows; S = block width - 1, T teacher entries."""

    features: Tensor
    """(N, taps * hidden) bfloat16, as the shards have them."""
    context_positions: Tensor
    """(N,) absolute."""
    views: tuple[SequenceView, ...]
    anchor_positions: Tensor
    """(A,) absolute."""
    anchors: Tensor
    """(A,) token ids."""
    labels: Tensor
    """(A, S) target ids of slots 1 ... S; 0 where unsupervised."""
    supervised: Tensor
    """(A, S) bool; false from a block's first unsupervised label on."""
    teacher_ids: Tensor
    """(A, S, T) target ids."""
    teacher_probs: Tensor
    """(A, S, T) float32."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The anchors chosen in one sequence of a shard; positions are inside the sequence."""

    shard: Shard
    sequence: int
    anchors: NDArray[np.int64]


def eligible_anchors(loss_mask: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Positions from 1 on where the token and the next one are supervised."""
    both = (loss_mask[:-1] > 0) & (loss_mask[1:] > 0)
    positions = np.flatnonzero(both)
    return positions[positions > 0].astype(np.int64)


def make_batch(
    pieces: Sequence[Piece],
    config: DrafterConfig,
    width: int | None = None,
    row_multiple: int = 1,
) -> StepBatch:
    """Gather the rows that the chosen blocks need; context outside every window is left out.

    `width` None means whole blocks; less takes the prefix of each block, which is a block itself.
    The context rows of each piece are filled up to a multiple of `row_multiple` with rows of zeros
    at positions that no block sees.
    """
    slots = (width or config.block_size) - 1
    window = config.context_window
    features: list[Tensor] = []
    positions: list[NDArray[np.int64]] = []
    views: list[SequenceView] = []
    columns: list[tuple[NDArray[np.int32], ...]] = []
    taught: list[NDArray[np.float16]] = []
    supervised: list[NDArray[np.bool_]] = []
    anchors: list[NDArray[np.int64]] = []
    rows_so_far = blocks_so_far = 0
    for piece in pieces:
        rows = piece.shard.sequence(piece.sequence)
        length = rows.stop - rows.start
        at = np.sort(piece.anchors)
        first = 0 if window is None else max(0, int(at[0]) - window + 1)
        last = int(at[-1])
        known = piece.shard.features_tensor()[rows.start + first : rows.start + last]
        padding = -(last - first) % row_multiple
        features.append(F.pad(known, (0, 0, 0, padding)) if padding else known)
        last += padding
        positions.append(np.arange(first, last))
        views.append(
            SequenceView(
                rows_so_far, rows_so_far + last - first, blocks_so_far, blocks_so_far + len(at)
            )
        )
        rows_so_far += last - first
        blocks_so_far += len(at)
        where = at[:, None] + np.arange(1, slots + 1)
        inside = where < length
        where = np.minimum(where, length - 1) + rows.start
        mask = inside & (piece.shard.loss_mask[where] > 0)
        mask = np.logical_and.accumulate(mask, axis=1)
        tokens = piece.shard.tokens
        columns.append(
            (
                np.asarray(tokens[at + rows.start]),
                np.where(mask, tokens[where], 0).astype(np.int32),
                piece.shard.teacher_ids[where - 1],
            )
        )
        taught.append(piece.shard.teacher_probs[where - 1])
        supervised.append(mask)
        anchors.append(at)
    return StepBatch(
        features=torch.cat(features),
        context_positions=torch.from_numpy(np.concatenate(positions)),
        views=tuple(views),
        anchor_positions=torch.from_numpy(np.concatenate(anchors)),
        anchors=torch.from_numpy(np.concatenate([c[0] for c in columns])).long(),
        labels=torch.from_numpy(np.concatenate([c[1] for c in columns])).long(),
        supervised=torch.from_numpy(np.concatenate(supervised)),
        teacher_ids=torch.from_numpy(np.concatenate([c[2] for c in columns])).long(),
        teacher_probs=torch.from_numpy(np.concatenate(taught)).float(),
    )


class ShardPool:
    """Every sequence of every shard of some folders, opened once and mapped."""

    def __init__(
        self,
        folders: Sequence[Path],
        config: DrafterConfig,
        fingerprint: str | None = None,
    ) -> None:
        # Resolved: a resumed run may name the same folder in another way.
        self.folders = tuple(folder.resolve() for folder in folders)
        self.config = config
        self.fingerprint = fingerprint
        self.shards: list[Shard] = []
        self._known: dict[Path, int] = {}

    def scan(self) -> list[int]:
        """Open shards that are new in the folders; their indices. Raises on a foreign shard."""
        paths = [p for folder in self.folders for p in list_shards(folder)]
        return [self._open(path) for path in paths if path not in self._known]

    def open_in_order(self, paths: Sequence[Path]) -> None:
        """Open shards in the order a checkpoint saw them."""
        for path in paths:
            if path not in self._known:
                self._open(path)

    @property
    def paths(self) -> list[Path]:
        """Paths by shard index."""
        return list(self._known)

    @property
    def num_tokens(self) -> int:
        """Tokens of all opened shards."""
        return sum(s.num_tokens for s in self.shards)

    def _open(self, path: Path) -> int:
        shard = Shard.read(path)
        if shard.info.taps != self.config.taps:
            raise TrainingError(
                f"shard {path} has taps {list(shard.info.taps)}, the drafter has "
                f"{list(self.config.taps)}: capture the features again or change the taps"
            )
        if shard.features.shape[1] != self.config.feature_size:
            raise TrainingError(
                f"shard {path} has features of {shard.features.shape[1]} numbers, the drafter "
                f"expects {self.config.feature_size}: it comes from another target"
            )
        if self.fingerprint is not None and shard.info.fingerprint != self.fingerprint:
            raise TrainingError(
                f"shard {path} was captured from another target (fingerprint "
                f"{shard.info.fingerprint[:12]}, this target's is {self.fingerprint[:12]}): "
                f"capture the features again"
            )
        self._known[path] = len(self.shards)
        self.shards.append(shard)
        return self._known[path]


class Sampler:
    """Chooses sequences and anchors for each step."""

    def __init__(
        self, pool: ShardPool, *, seed: int, anchors_per_step: int, anchors_per_sequence: int
    ) -> None:
        self.pool = pool
        self.seed = seed
        self.anchors_per_step = anchors_per_step
        self.anchors_per_sequence = anchors_per_sequence
        self.epoch = 0
        # (shard, sequence) still to visit in this epoch, taken from the end.
        self.queue = np.zeros((0, 2), dtype=np.int64)

    def add(self, shards: Sequence[int], step: int) -> None:
        """Let new shards join the current epoch at random places."""
        new = self._sequences(shards)
        if len(new):
            rng = np.random.default_rng([self.seed, 1, step])
            self.queue = rng.permutation(np.concatenate([self.queue, new]))

    def next(self, step: int) -> list[Piece]:
        """The pieces of one step; together `anchors_per_step` anchors."""
        rng = np.random.default_rng([self.seed, 0, step])
        pieces: list[Piece] = []
        wanted = self.anchors_per_step
        refills = 0
        while wanted > 0:
            if not len(self.queue):
                if refills > 1:
                    break
                refills += 1
                self._refill()
            if not len(self.queue):
                break
            index, sequence = (int(x) for x in self.queue[-1])
            self.queue = self.queue[:-1]
            shard = self.pool.shards[index]
            eligible = eligible_anchors(shard.loss_mask[shard.sequence(sequence)])
            if not len(eligible):
                continue
            count = min(wanted, self.anchors_per_sequence, len(eligible))
            pieces.append(Piece(shard, sequence, rng.choice(eligible, count, replace=False)))
            wanted -= count
        if not pieces:
            raise TrainingError(
                f"no shard in {', '.join(str(f) for f in self.pool.folders)} has two supervised "
                f"tokens in a row: capture features of answers first"
            )
        return pieces

    def state(self) -> dict[str, object]:
        """What a checkpoint keeps."""
        return {
            "epoch": self.epoch,
            "queue": torch.from_numpy(self.queue.copy()),
            "shards": [str(p) for p in self.pool.paths],
        }

    def restore(self, state: dict[str, object]) -> None:
        """Continue from `state()`."""
        paths, queue, epoch = state["shards"], state["queue"], state["epoch"]
        assert isinstance(paths, list) and isinstance(queue, Tensor) and isinstance(epoch, int)
        self.pool.open_in_order([Path(p) for p in paths])
        self.queue = queue.numpy().copy()
        self.epoch = epoch

    def _sequences(self, shards: Sequence[int]) -> NDArray[np.int64]:
        pairs = [(i, s) for i in shards for s in range(self.pool.shards[i].num_sequences)]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def _refill(self) -> None:
        self.epoch += 1
        rng = np.random.default_rng([self.seed, 2, self.epoch])
        self.queue = rng.permutation(self._sequences(range(len(self.pool.shards))))
