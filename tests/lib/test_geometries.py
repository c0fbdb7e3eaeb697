"""The random models of real sizes that benchmarks use load, and have the types they should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import geometries
import numpy as np
import pytest
from gguf import GGUFReader

from dspine.llama.batch import Batch
from dspine.llama.context import Context
from dspine.llama.model import Model


@pytest.mark.parametrize(
    ("name", "layers"), [("qwen2.5-0.5b", 2), ("qwen2.5-1.5b", 2), ("qwen3.5-0.8b", 4)]
)
@pytest.mark.parametrize("mixture", geometries.MIXTURES)
def test_a_model_decodes(name: str, layers: int, mixture: str, tmp_path: Path) -> None:
    small = replace(geometries.GEOMETRIES[name], layers=layers, vocabulary=512, feed_forward=256)
    path = tmp_path / "small.gguf"
    geometries.write(path, small, mixture)
    with (
        Model.load(path) as model,
        Context(model, n_ctx=32, n_threads=1, flash_attention=True) as context,
    ):
        assert model.is_recurrent == (name == "qwen3.5-0.8b")
        batch = Batch(8)
        batch.add_tokens(model.tokenizer.encode("then"), 0)
        context.decode(batch)
        logits = context.logits(len(batch) - 1)
        assert np.isfinite(logits).all()
        assert 0.1 < logits.std() < 30


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    small = replace(geometries.GEOMETRIES["qwen2.5-1.5b"], layers=1, vocabulary=300)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        geometries.write(tmp_path / name / "model.gguf", small, "q4_k_m")
    first, second = ((tmp_path / name / "model.gguf").read_bytes() for name in ("one", "two"))
    assert first == second


def test_weights_are_random_and_rows_differ(tmp_path: Path) -> None:
    small = replace(geometries.GEOMETRIES["qwen2.5-0.5b"], layers=1, vocabulary=1000)
    path = tmp_path / "model.gguf"
    geometries.write(path, small, "q8_0")
    found = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    rows = found["token_embd.weight"].data
    assert len(np.unique(rows, axis=0)) == 1000


def test_mixture_of_the_published_sizes() -> None:
    large = geometries.GEOMETRIES["qwen2.5-1.5b"]

    def kind(name: str, inputs: int) -> str:
        return geometries.type_of(name, inputs, large, "q4_k_m")

    # 28 layers: the first and last 3, and every third from 5 on, have more bits.
    rich = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27}
    found = {layer for layer in range(28) if kind(f"blk.{layer}.ffn_down.weight", 8960) == "q6_k"}
    assert found == rich
    assert kind("blk.0.attn_v.weight", 1536) == "q6_k"
    assert kind("blk.3.attn_v.weight", 1536) == kind("blk.0.attn_q.weight", 1536) == "q4_k"
    assert kind("token_embd.weight", 1536) == "q6_k"
    assert kind("token_embd.weight", 896) == kind("blk.0.attn_v.weight", 896) == "q8_0"
    assert kind("blk.0.attn_q.weight", 896) == "q5_0"
