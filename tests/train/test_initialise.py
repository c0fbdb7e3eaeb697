"""Starting from the target: rotary order, folded norms, context keys of the copied layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dspine.errors import TrainingError, UsageError
from dspine.train.initialise import feature_sample, initialise, unpermute
from dspine.train.module import DSpineModule
from dspine.train.shards import Shard, ShardWriter, list_shards
from dspine.train.target import Target
from dspine.train.vocabulary import count_answers, count_shards, most_frequent
from tests.support.tiny_models import tiny_llama
from tests.support.training import add_sequence


def test_unpermute_by_hand() -> None:
    """One head of 4: interleaved pairs (0, 1), (2, 3) become halves (0, 2), (1, 3)."""
    weight = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    assert unpermute(weight, 1)[:, 0].tolist() == [0, 2, 1, 3]


def test_unpermuted_rows_rotate_alike() -> None:
    """Half-split rotary of the reordered vector is the reordered interleaved rotary."""
    torch.manual_seed(0)
    x = torch.randn(8)
    angle = torch.tensor([0.3, 1.1, 0.7, 2.0])
    pairs = torch.view_as_complex(x.view(4, 2)) * torch.polar(torch.ones(4), angle)
    interleaved = torch.view_as_real(pairs).reshape(8)
    y = unpermute(x[:, None], 1)[:, 0]
    both = torch.cat([angle, angle])
    halves = y * both.cos() + torch.cat([-y[4:], y[:4]]) * both.sin()
    torch.testing.assert_close(halves, unpermute(interleaved[:, None], 1)[:, 0])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    return Target.read(tiny_llama(path, hidden_size=32, num_heads=2, num_kv_heads=1))


@pytest.fixture
def shard(target: Target, tmp_path: Path) -> Shard:
    writer = ShardWriter(tmp_path, taps=(0, 2), fingerprint=target.pair.fingerprint)
    random = np.random.default_rng(2)
    features = random.standard_normal((60, 64)) * np.exp(random.standard_normal(64))
    add_sequence(writer, "0", random.integers(0, 300, 60), features, prompt=3)
    writer.flush()
    return Shard.read(list_shards(tmp_path)[0])


def test_context_keys_and_values_are_those_of_the_copied_layer(
    target: Target, shard: Shard
) -> None:
    """The last drafter layer is the target's layer 3, whose input is the output of tap 2."""
    config = target.drafter_config(num_layers=2, taps=(0, 2), transfer_rank=16, message_size=16)
    module = initialise(config, target, [shard], seed=1, copy_layers=True)
    with torch.no_grad():
        module.fc.weight[:, :32] = 0  # the small random part of the other tap
        features = shard.features_tensor().float()
        positions = torch.zeros(len(features), dtype=torch.long)
        keys, values = module.context(features, positions)[1]
        norm = target.tensor("blk.3.attn_norm.weight")
        k, v = target.tensor("blk.3.attn_k.weight"), target.tensor("blk.3.attn_v.weight")
        assert norm is not None and k is not None and v is not None
        state = F.rms_norm(features[:, 32:], (32,), norm, config.rms_norm_eps)
        right_keys, right_values = state @ unpermute(k, 1).T, state @ v.T
    # Ours are equal up to one factor per token: channels were scaled before the norm.
    assert float(F.cosine_similarity(keys[0], right_keys, dim=-1).min()) > 0.9999
    assert float(F.cosine_similarity(values[0], right_values, dim=-1).min()) > 0.9999
    ratio = values[0].norm(dim=-1) / right_values.norm(dim=-1)
    assert 0.5 < float(ratio.median()) < 2


def test_codes_are_ready_and_readouts_start_as_eigenvectors(target: Target, shard: Shard) -> None:
    config = target.drafter_config(num_layers=2, taps=(0, 2), transfer_rank=16, message_size=16)
    module = initialise(config, target, [shard], seed=1, copy_layers=False)
    assert isinstance(module, DSpineModule) and bool(module.transfer_ready)
    first, second = (module.injection.readout(i).weight for i in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first @ first.T, torch.eye(16), atol=1e-5, rtol=0)
    scaled = feature_sample([shard]) * module.feature_scale
    torch.testing.assert_close(scaled.square().mean(dim=0), torch.ones(64), atol=1e-4, rtol=1e-3)


def test_sizes_that_do_not_fit_are_a_sentence(target: Target, shard: Shard) -> None:
    wide = target.drafter_config(
        num_layers=2, taps=(0, 2), transfer_rank=16, message_size=16, intermediate_size=96
    )
    with pytest.raises(TrainingError, match=r"gate_proj is .* in the target"):
        initialise(wide, target, [shard], seed=1, copy_layers=True)
    deep = target.drafter_config(num_layers=5, taps=(0, 2), transfer_rank=16, message_size=16)
    with pytest.raises(TrainingError, match="too few to fill a drafter of 5"):
        initialise(deep, target, [shard], seed=1, copy_layers=True)


def test_vocabulary_by_hand(shard: Shard, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"p": [9], "g": [5, 5, 7]}\n{"p": [], "g": [7, 7, 30]}\n')
    counts = count_answers([answers], 40)
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == {5: 2, 7: 3, 30: 1}
    chosen = most_frequent(counts, 16, always=[39])
    # The certain one, those that occur, then the lowest ids: 0 ... 13 hold 5 and 7 already.
    assert chosen == [*range(14), 30, 39]
    assert sum(count_shards([shard], 320)) == shard.num_labels
    with pytest.raises(UsageError, match="multiple of 16"):
        most_frequent(counts, 17)
