"""Steps of narrow blocks: prefixes of whole ones, and supervision that ends with the sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dspine.errors import UsageError
from dspine.files.schema import DSpineConfig
from dspine.train.batches import Piece, make_batch
from dspine.train.options import FitOptions, Geometry
from dspine.train.shards import Shard, list_shards
from tests.support.tiny_models import tiny_llama
from tests.support.training import pattern_shards

CONFIG = DSpineConfig(
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=320,
    target_hidden_size=32,
    block_size=6,
    taps=(0, 2),
    mask_token_id=3,
    windows=(32,),
    causal=(True,),
    transfer_rank=8,
    message_size=8,
)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Shard:
    folder = tmp_path_factory.mktemp("shards")
    target = tiny_llama(folder / "target.gguf", hidden_size=32, num_heads=2, num_kv_heads=1)
    pattern_shards(folder / "train", target, taps=(0, 2), sequences=2, seed=1)
    return Shard.read(list_shards(folder / "train")[0])


def test_a_narrow_batch_is_the_prefix_of_a_whole_one(shard: Shard) -> None:
    last = shard.sequence(0).stop - shard.sequence(0).start - 1
    pieces = [Piece(shard, 0, np.array([5, 9, last - 2]))]
    whole, narrow = make_batch(pieces, CONFIG), make_batch(pieces, CONFIG, 3)
    assert whole.labels.shape[1] == 5
    assert narrow.labels.shape[1] == 2
    for name in ("labels", "supervised", "teacher_ids", "teacher_probs"):
        assert torch.equal(getattr(whole, name)[:, :2], getattr(narrow, name)), name
    assert torch.equal(whole.features, narrow.features)
    assert torch.equal(whole.anchors, narrow.anchors)


def test_supervision_ends_with_the_sequence(shard: Shard) -> None:
    last = shard.sequence(0).stop - shard.sequence(0).start - 1
    batch = make_batch([Piece(shard, 0, np.array([last - 2]))], CONFIG)
    assert batch.supervised.tolist() == [[True, True, False, False, False]]
    tokens = shard.tokens[shard.sequence(0)]
    assert batch.labels[0, :2].tolist() == [int(tokens[last - 1]), int(tokens[last])]
    assert batch.labels[0, 2:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("widths", [(1,), (4, 9)])
def test_block_widths_outside_the_block_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="block_widths are"):
        FitOptions(
            target=Path("t"),
            shards=(Path("s"),),
            output=Path("o"),
            steps=1,
            geometry=Geometry(block_size=8),
            block_widths=widths,
        )
