"""What a step reads from shards: rows, labels, supervision, windows, order of visits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dspine.errors import TrainingError
from dspine.train.batches import (
    Piece,
    Sampler,
    ShardPool,
    eligible_anchors,
    make_batch,
)
from dspine.train.shards import Shard, ShardWriter, list_shards
from tests.support.training import add_sequence, small_config

CONFIG = small_config(vocab_size=100, windows=(4,))


def write(folder: Path, lengths: list[int], *, taps: tuple[int, ...] = (1,)) -> None:
    """Sequences of tokens 10, 11, ...; the feature of row i of sequence s is (s, i, 0, 0)."""
    writer = ShardWriter(folder, taps=taps, fingerprint="f")
    for s, n in enumerate(lengths):
        features = np.zeros((n, 4))
        features[:, 0], features[:, 1] = s, np.arange(n)
        add_sequence(writer, str(s), np.arange(10, 10 + n), features, prompt=3)
    writer.flush()


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    write(tmp_path, [9, 12])
    return Shard.read(list_shards(tmp_path)[0])


def test_anchors_need_two_supervised_tokens_and_a_context() -> None:
    mask = np.array([1, 1, 0, 1, 1, 1, 0], dtype=np.uint8)
    assert eligible_anchors(mask).tolist() == [3, 4]


def test_step_by_hand(shard: Shard) -> None:
    pieces = [Piece(shard, 0, np.array([7, 5])), Piece(shard, 1, np.array([6]))]
    batch = make_batch(pieces, CONFIG)
    # Window 4: anchor 5 sees rows 2 ... 4, anchor 7 up to row 6; anchor 6 sees rows 3 ... 5.
    assert batch.context_positions.tolist() == [2, 3, 4, 5, 6, 3, 4, 5]
    assert batch.features[:, :2].tolist() == [
        [0, 2], [0, 3], [0, 4], [0, 5], [0, 6], [1, 3], [1, 4], [1, 5],
    ]  # fmt: skip
    assert [(v.start, v.end, v.first, v.last) for v in batch.views] == [(0, 5, 0, 2), (5, 8, 2, 3)]
    assert batch.anchor_positions.tolist() == [5, 7, 6]
    assert batch.anchors.tolist() == [15, 17, 16]
    # Sequence 0 ends after position 8 (token 18).
    assert batch.labels.tolist() == [[16, 17, 18], [18, 0, 0], [17, 18, 19]]
    assert batch.supervised.tolist() == [
        [True, True, True], [True, False, False], [True, True, True],
    ]  # fmt: skip
    # The teacher of slot i is the row before its label: it names the label itself with 0.9.
    assert batch.teacher_ids[0, :, :2].tolist() == [[16, 17], [17, 18], [18, 19]]
    assert float(batch.teacher_probs[0, 0, 0]) == pytest.approx(0.9, abs=1e-3)


def test_supervision_stops_at_the_first_unsupervised_label(shard: Shard) -> None:
    mask = shard.loss_mask.copy()
    mask[7] = 0  # position 7 of sequence 0
    changed = Shard(
        shard.path, shard.info, shard.tokens, shard.sequence_offsets, mask,
        shard.features, shard.teacher_ids, shard.teacher_probs,
    )  # fmt: skip
    batch = make_batch([Piece(changed, 0, np.array([5]))], CONFIG)
    assert batch.supervised.tolist() == [[True, False, False]]
    assert batch.labels.tolist() == [[16, 0, 0]]


def visits(sampler: Sampler, steps: range) -> list[tuple[str, int]]:
    return [(p.shard.path.parent.name, p.sequence) for step in steps for p in sampler.next(step)]


def sampler_of(folders: list[Path], **changes: int) -> Sampler:
    numbers = {"seed": 3, "anchors_per_step": 4, "anchors_per_sequence": 4} | changes
    return Sampler(ShardPool(folders, CONFIG), **numbers)


def test_an_epoch_visits_every_sequence_once(tmp_path: Path) -> None:
    write(tmp_path / "a", [12] * 5)
    sampler = sampler_of([tmp_path / "a"])
    sampler.add(sampler.pool.scan(), 0)
    first, second = visits(sampler, range(5)), visits(sampler, range(5, 10))
    every = [("a", s) for s in range(5)]
    assert sorted(first) == every and sorted(second) == every
    assert first != second


def test_a_step_takes_the_wanted_number_of_anchors(tmp_path: Path) -> None:
    write(tmp_path / "a", [12] * 5)
    sampler = sampler_of([tmp_path / "a"], anchors_per_step=7, anchors_per_sequence=3)
    sampler.add(sampler.pool.scan(), 0)
    pieces = sampler.next(0)
    assert [len(p.anchors) for p in pieces] == [3, 3, 1]
    assert all(len(set(p.anchors)) == len(p.anchors) for p in pieces)


def test_new_shards_join_the_epoch_and_state_restores(tmp_path: Path) -> None:
    write(tmp_path / "a", [12] * 4)
    sampler = sampler_of([tmp_path / "a", tmp_path / "b"])
    sampler.add(sampler.pool.scan(), 0)
    seen = visits(sampler, range(2))
    write(tmp_path / "b", [12] * 4)
    sampler.add(sampler.pool.scan(), 2)
    state = sampler.state()
    rest = visits(sampler, range(2, 8))
    assert sorted(seen + rest) == sorted((f, s) for f in "ab" for s in range(4))
    other = sampler_of([tmp_path / "a", tmp_path / "b"])
    other.restore(state)
    assert visits(other, range(2, 8)) == rest


def test_refuses_shards_of_other_taps_and_targets(tmp_path: Path) -> None:
    write(tmp_path / "a", [8], taps=(2,))
    with pytest.raises(TrainingError, match=r"has taps \[2\], the drafter has \[1\]"):
        ShardPool([tmp_path / "a"], CONFIG).scan()
    write(tmp_path / "b", [8])
    with pytest.raises(TrainingError, match="captured from another target"):
        ShardPool([tmp_path / "b"], CONFIG, "g").scan()


def test_shards_without_answers_are_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "a", [4])
    sampler = sampler_of([tmp_path / "a"])
    sampler.add(sampler.pool.scan(), 0)
    with pytest.raises(TrainingError, match="two supervised tokens in a row"):
        sampler.next(0)


def test_features_are_exact_bfloat16(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, taps=(1,), fingerprint="f")
    values = np.random.default_rng(0).standard_normal((8, 4))
    add_sequence(writer, "0", np.arange(10, 18), values, prompt=1)
    writer.flush()
    shard = Shard.read(list_shards(tmp_path)[0])
    batch = make_batch([Piece(shard, 0, np.array([4]))], CONFIG)
    expected = torch.from_numpy(values[1:4].astype(np.float32)).bfloat16().float()
    assert torch.equal(batch.features, expected)


def test_a_folder_named_in_another_way_is_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "shards", [9])
    before = ShardPool([tmp_path / "shards"], CONFIG)
    before.scan()
    monkeypatch.chdir(tmp_path)
    resumed = ShardPool([Path("shards")], CONFIG)
    resumed.open_in_order(before.paths)
    assert resumed.scan() == []
    assert len(resumed.shards) == 1
