"""Drafter files beside real targets: shared tensors, fallbacks, ownership."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dspine.drafters.backbone.target import target_tensors
from dspine.drafters.dspine import DSpineDrafter
from dspine.errors import ClosedError, FileError
from dspine.files.drafter_file import write_drafter
from dspine.files.gguf_file import find_tensor
from dspine.files.pairing import describe_target
from dspine.files.schema import DSpineConfig, TrainingRecord, tensor_specs
from dspine.ggml import HostTensor, Tensor
from dspine.llama.library import find_library
from dspine.llama.model import Model
from tests.support.numpy_dspine import NumpyDSpine
from tests.support.tiny_drafter import FloatArray, TinyPair, tiny_config
from tests.support.tiny_models import tiny_llama

ANCHOR = 11


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    find_library()


def config_for(target: Path, **changes: object) -> DSpineConfig:
    pair = describe_target(target)
    sizes = {
        "vocab_size": pair.vocab_size,
        "target_hidden_size": pair.hidden_size,
        "hidden_size": pair.hidden_size,
        "taps": (0, 1),
    }
    return tiny_config((None, 16), **{**sizes, **changes})


def write(path: Path, target: Path, pair: TinyPair, dtype: str = "f32") -> Path:
    names = {s.gguf_name: s.torch_name for s in tensor_specs(pair.config)}
    tensors = {names[name]: value for name, value in pair.tensors.items()}
    write_drafter(
        path, pair.config, describe_target(target), TrainingRecord(), tensors, dtype,
        pair.draft_vocab,
    )  # fmt: skip
    return path


def stored(target: Path, name: str) -> FloatArray:
    tensor = find_tensor(target, name)
    assert tensor is not None
    return tensor.as_float32()


def check_against_oracle(
    drafter: DSpineDrafter, pair: TinyPair, embedding: FloatArray, head: FloatArray
) -> None:
    features = pair.features(12)
    drafter.add_context(0, 0, features)
    found = drafter.draft_trace(0, ANCHOR, 5)
    oracle = NumpyDSpine(pair.config, pair.tensors, embedding, head, pair.draft_vocab)
    expected = oracle.draft(features, ANCHOR, 5)
    norms = np.linalg.norm(found.hidden, axis=1) * np.linalg.norm(expected.hidden, axis=1)
    assert ((found.hidden * expected.hidden).sum(1) / norms).min() > 0.9999
    rows = head[found.candidates[0]]
    np.testing.assert_allclose(found.first_row, rows @ found.hidden[0], rtol=1e-3, atol=1e-3)
    assert list(found.draft.tokens) == expected.tokens


@pytest.mark.parametrize("weights", ["f32", "q8_0"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("draft_vocab_size", [None, 64])
def test_a_file_beside_a_tiny_target(
    tmp_path: Path, tied: bool, weights: str, draft_vocab_size: int | None
) -> None:
    target = tiny_llama(tmp_path / "target.gguf", tied=tied, weights=weights)
    pair = TinyPair(config_for(target, draft_vocab_size=draft_vocab_size), seed=4)
    path = write(tmp_path / "drafter.gguf", target, pair)
    embedding = stored(target, "token_embd.weight")
    head = embedding if tied else stored(target, "output.weight")
    with (
        Model.load(target) as model,
        DSpineDrafter.load(path, model, n_ctx=64, cache_type="f32") as drafter,
    ):
        check_against_oracle(drafter, pair, embedding, head)


def test_the_targets_tensors_are_used_where_they_lie(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target.gguf", weights="q8_0")
    pair = TinyPair(config_for(target), seed=4)
    path = write(tmp_path / "drafter.gguf", target, pair)
    with (
        # With extra buffers, ggml lays q8_0 out anew where the processor has AMX.
        Model.load(target, use_extra_buffers=False) as model,
        DSpineDrafter.load(path, model, n_ctx=64) as drafter,
    ):
        for name, used in (
            ("token_embd.weight", drafter._weights.embedding),
            ("output.weight", drafter._weights.head),
            ("output.weight", drafter._weights.scoring),
        ):
            lent = model.tensor(name)
            assert lent is not None and used.pointer == lent.pointer


@pytest.mark.parametrize("weights", ["q4_0", "q8_0"])
def test_a_repacked_head_is_read_from_the_file(weights: str, tmp_path: Path) -> None:
    """The library stores q4_0 weights in another order, in which no row can be looked up; with AMX
    those of q8_0 too."""
    target = tiny_llama(tmp_path / "target.gguf", weights=weights)
    pair = TinyPair(config_for(target), seed=4)
    path = write(tmp_path / "drafter.gguf", target, pair)
    with Model.load(target) as model:
        lent = model.tensor("output.weight")
        assert lent is not None
        _, head = target_tensors(model)
        assert isinstance(head, Tensor) == lent.is_readable
        if not lent.is_readable:
            assert isinstance(head, HostTensor)
        with DSpineDrafter.load(path, model, n_ctx=64, cache_type="f32") as drafter:
            check_against_oracle(
                drafter, pair, stored(target, "token_embd.weight"), stored(target, "output.weight")
            )


def test_a_drafter_outliving_its_target_is_refused(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target.gguf")
    pair = TinyPair(config_for(target), seed=4)
    path = write(tmp_path / "drafter.gguf", target, pair)
    model = Model.load(target)
    with DSpineDrafter.load(path, model, n_ctx=64) as drafter:
        drafter.add_context(0, 0, pair.features(2))
        drafter.draft(0, ANCHOR, 3)
        model.close()
        with pytest.raises(ClosedError, match="weights it reads were closed"):
            drafter.draft(0, ANCHOR, 3)
        with pytest.raises(ClosedError):
            drafter.draft(0, ANCHOR, 4)


def test_a_target_of_another_width_is_a_sentence(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target.gguf")
    other = tiny_llama(tmp_path / "other.gguf", hidden_size=96, num_heads=6)
    pair = TinyPair(config_for(target), seed=4)
    path = write(tmp_path / "drafter.gguf", target, pair)
    with Model.load(other) as model, pytest.raises(FileError, match=r"320 rows of 96.*rows of 64"):
        DSpineDrafter.load(path, model, n_ctx=64)


def test_beside_the_default_target(tmp_path: Path, default_target: Path) -> None:
    """SmolLM2 is tied: its q8_0 embedding is also what scores the candidates."""
    config = config_for(
        default_target,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=96,
        draft_vocab_size=4096,
        transfer_rank=64,
        top_k=8,
    )
    pair = TinyPair(config, seed=4)
    path = write(tmp_path / "drafter.gguf", default_target, pair, "f16")
    embedding = stored(default_target, "token_embd.weight")
    with (
        Model.load(default_target, use_extra_buffers=False) as model,
        DSpineDrafter.load(path, model, n_ctx=64, n_threads=2) as drafter,
    ):
        lent = model.tensor("token_embd.weight")
        assert lent is not None and lent.type_name == "q8_0"
        assert drafter._weights.embedding.pointer == lent.pointer
        assert drafter._weights.scoring.pointer == lent.pointer
        assert drafter._weights.head.type_name == "q4_0"  # only chooses candidates
        drafter.add_context(0, 0, pair.features(12))
        found = drafter.draft_trace(0, ANCHOR, 5)
    rows = embedding[found.candidates[0]]
    np.testing.assert_allclose(found.first_row, rows @ found.hidden[0], rtol=1e-3, atol=1e-3)
    assert pair.draft_vocab is not None
    assert set(found.candidates.reshape(-1).tolist()) <= set(pair.draft_vocab.tolist())
