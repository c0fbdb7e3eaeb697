"""Checkpoint folders of DFlash and DFlash2: published configurations, strictly, and bit by bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dspine.errors import FileError
from dspine.files.checkpoint import read_checkpoint, write_checkpoint
from dspine.files.checkpoint_config import from_json, to_json
from dspine.files.convert import convert_checkpoint
from dspine.files.drafter_file import read_drafter
from dspine.files.inspect import inspect_path
from dspine.files.schema import DFlash2Config, DFlashConfig, DrafterConfig
from tests.support.drafter_files import PAIR, RECORD, SMALL_DFLASH, SMALL_DFLASH2, weights

QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_target_layers": 36,
    "block_size": 16,
    "layer_types": ["full_attention"] * 5,
    "use_sliding_window": False,
    "sliding_window": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}
QWEN38_27B: dict[str, Any] = {
    **QWEN3_8B,
    "architectures": ["DFlash2DraftModel"],
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "vocab_size": 248320,
    "num_target_layers": 64,
    "layer_types": ["sliding_attention"] * 5,
    "use_sliding_window": True,
    "sliding_window": 2048,
    "is_causal": False,
    "rope_theta": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": 248070,
        "target_layer_ids": [5, 19, 33, 47, 61],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}
del QWEN38_27B["block_size"]


def small(kind: str) -> DFlashConfig | DFlash2Config:
    """A drafter of that kind; the sizes of DFlash2's own tensors differ."""
    if kind == "dflash":
        return SMALL_DFLASH
    return replace(SMALL_DFLASH2, conv_group_size=8, selector_rank=12, top_k=4)


def test_the_published_dflash_of_qwen3_8b() -> None:
    config = from_json("c", QWEN3_8B)
    assert isinstance(config, DFlashConfig)
    assert config.causal == (False,) * 5 and config.windows == (None,) * 5
    assert (config.block_size, config.mask_token_id) == (16, 151669)
    assert config.taps == (1, 9, 17, 25, 33) and config.rope_theta == 1e6


def test_the_published_dflash2_of_qwen38_27b() -> None:
    config = from_json("c", QWEN38_27B)
    assert isinstance(config, DFlash2Config)
    assert config.causal == (False,) * 5 and config.windows == (2048,) * 5
    assert (config.block_size, config.rope_theta) == (8, 1e7)
    assert (config.conv_kernel_size, config.conv_group_size) == (2, 16)
    assert (config.selector_rank, config.top_k) == (256, 16)
    assert config.conv_groups == 320


@pytest.mark.parametrize(
    ("place", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, "mrope_section": [1]}}, 5e5),
        ({"rope_theta": None, "rope_scaling": {"type": "default", "rope_theta": 5e5}}, 5e5),
    ],
)
def test_the_rotary_base_may_stand_anywhere(place: dict[str, Any], theta: float) -> None:
    assert from_json("c", {**QWEN3_8B, **place}).rope_theta == theta


def test_scales_may_stand_at_the_top_or_below() -> None:
    stated = {**QWEN3_8B, "input_embedding_scale": 8}
    stated["dflash_config"] = {
        **QWEN3_8B["dflash_config"],
        "output_multiplier": 0.5,
        "final_logit_softcapping": 30.0,
    }
    config = from_json("c", stated)
    assert (config.embedding_scale, config.logit_scale, config.logit_softcap) == (8.0, 0.5, 30.0)
    again = to_json(config, 36, "bfloat16")
    assert again["dflash_config"]["input_embedding_scale"] == 8.0
    assert from_json("c", again) == config
    assert "output_multiplier" not in to_json(from_json("c", QWEN3_8B), 36, "bfloat16")


def test_keys_of_relatives_may_say_nothing() -> None:
    quiet = {
        **QWEN3_8B,
        "input_embedding_scale": 1.0,
        "final_logit_softcapping": None,
        "draft_vocab_size": None,
    }
    quiet["dflash_config"] = {**QWEN3_8B["dflash_config"], "use_swa": False, "causal": False}
    assert from_json("c", quiet) == from_json("c", QWEN3_8B)


def test_windows_positions_and_sinks_as_the_drafters_of_mimo_say_them() -> None:
    """A window on every layer whatever `layer_types` says, a scale of the values, sinks."""
    values = copy.deepcopy(QWEN3_8B)
    values["dflash_config"] |= {
        "use_swa": True,
        "swa_window_size": 1024,
        "attention_sink_bias": True,
        "attention_value_scale": 0.707,
    }
    values["partial_rotary_factor"] = 0.5
    config = from_json("c", values, sink_layers=(0, 1, 2, 3, 4))
    assert config.windows == (1024,) * 5
    assert (config.value_scale, config.rotary_size) == (0.707, 64)
    assert config.sink_layers == (0, 1, 2, 3, 4)
    again = to_json(config, 36, "bfloat16")
    assert from_json("c", again, sink_layers=config.sink_layers) == config
    with pytest.raises(FileError, match="attention_sink_bias is False, but 1 layers"):
        from_json("c", {**QWEN3_8B, "attention_sink_bias": False}, sink_layers=(2,))


@pytest.mark.parametrize("name", ["sinks", "attention_sink_bias.weight"])
def test_sinks_under_any_name_are_kept_to_the_bit(tmp_path: Path, name: str) -> None:
    config = replace(SMALL_DFLASH, sink_layers=(1,), rotary_size=6, value_scale=0.5)
    made = weights(config, "bfloat16")
    write_checkpoint(tmp_path / "a", config, PAIR, RECORD, made)
    path = tmp_path / "a/model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].replace(
        b"layers.1.self_attn.attention_sink_bias", f"layers.1.self_attn.{name}".encode()
    )
    header = header.rstrip(b" ")
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + size :])
    convert_checkpoint(tmp_path / "a", tmp_path / "d.gguf", dtype="bf16")
    assert read_drafter(tmp_path / "d.gguf").config == config
    convert_checkpoint(tmp_path / "d.gguf", tmp_path / "b")
    again = read_checkpoint(tmp_path / "b")
    assert again.config == config
    for tensor, values in made.items():
        assert again.tensors[tensor].tobytes() == values.tobytes(), tensor


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda v: v.update(
                partial_rotary_factor=0.25, rope_scaling={"partial_rotary_factor": 1}
            ),
            "partial_rotary_factor is stated twice",
        ),
        (lambda v: v.update(partial_rotary_factor=1.5), "partial_rotary_factor is 1.5"),
        (lambda v: v["rope_parameters"].update(beta_fast=4), "rope_parameters has keys.*beta_fast"),
        (lambda v: v.update(quantization_config={}), "quantization_config"),
        (lambda v: v["dflash_config"].update(markov_rank=256), "markov_rank"),
        (lambda v: v["dflash_config"].update(final_logit_softcapping="x"), "capping is 'x'"),
        (
            lambda v: v["dflash_config"].update(projector_type="domino"),
            "projector_type is 'domino', which dspine does not run: SGLang can",
        ),
        (
            lambda v: (v["dflash_config"].update(use_swa=True), v.update(sliding_window=None)),
            "use_swa is set and swa_window_size is None",
        ),
        (
            lambda v: v["dflash_config"].update(attention_sink_bias=True),
            "attention_sink_bias is True, but 0 layers have their tensor",
        ),
        (lambda v: v.update(hidden_act="gelu"), "hidden_act is 'gelu'.*llama.cpp runs gelu"),
        (lambda v: v.update(has_lm_head=True), "convert_hf_to_gguf.py, which dspine runs"),
        (
            lambda v: v.update(architectures=["Qwen3DSparkModel"]),
            "a DSpark drafter .*which dspine does not run: llama.cpp, vLLM and SGLang can",
        ),
        (lambda v: v.update(architectures=["DominoDraftModel"]), "Domino.*SGLang can"),
        (
            lambda v: (
                v.update(output_multiplier=0.5),
                v["dflash_config"].update(output_multiplier=2),
            ),
            "output_multiplier is stated twice",
        ),
        (lambda v: v.update(draft_vocab_size=32000), "draft_vocab_size is 32000"),
        (lambda v: v.update(is_neox_style=False), "is_neox_style is False"),
        (lambda v: v.update(is_causal="no"), "is_causal is 'no'"),
        (lambda v: v.update(is_causal=True), "stated twice and differently"),
        (lambda v: v["dflash_config"].pop("selector_top_k"), "selector_top_k is missing"),
        (lambda v: v["dflash_config"].update(conv_group_size=7), "conv_group_size 7"),
        (lambda v: v.update(rope_parameters=None), "rope_theta is missing"),
        (
            lambda v: v.update(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
            "rotary scaling 'yarn'",
        ),
    ],
)
def test_what_would_run_wrongly_is_refused(
    edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    values = copy.deepcopy(QWEN38_27B)
    values["dflash_config"]["causal"] = False
    edit(values)
    with pytest.raises(FileError, match=words) as caught:
        from_json("folder/config.json", values)
    assert str(caught.value).startswith("folder/config.json: ") and "\n" not in str(caught.value)


def test_dflash_has_no_place_for_what_dflash2_adds() -> None:
    values = copy.deepcopy(QWEN3_8B)
    values["dflash_config"]["selector_rank"] = 256
    with pytest.raises(FileError, match="selector_rank"):
        from_json("c", values)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("causal", [True, False])
def test_config_goes_both_ways(kind: str, causal: bool) -> None:
    config: DrafterConfig = replace(small(kind), causal=(causal, causal), target_hidden_size=96)
    assert from_json("c", json.loads(json.dumps(to_json(config, 36, "bfloat16")))) == config
    with pytest.raises(FileError, match="some layers are causal"):
        to_json(replace(config, causal=(True, False)), 36, "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_folder_comes_back_bit_by_bit(kind: str, dtype: str, tmp_path: Path) -> None:
    config = replace(small(kind), draft_vocab_size=5)
    given = weights(config, dtype=dtype)
    write_checkpoint(tmp_path, config, PAIR, RECORD, given, [9, 3, 4, 5, 6])
    read = read_checkpoint(tmp_path)
    assert (read.config, read.pair, read.record) == (config, PAIR, RECORD)
    assert set(read.tensors) == set(given)
    for name, array in given.items():
        assert read.tensors[name].dtype == array.dtype
        assert read.tensors[name].tobytes() == array.tobytes()
    assert inspect_path(tmp_path)["kind"] == f"{config.kind} checkpoint"


@pytest.mark.parametrize(("kind", "count"), [("dflash", 3 + 11 * 2), ("dflash2", 6 + 15 * 2)])
def test_the_folder_has_exactly_what_strict_loading_expects(
    kind: str, count: int, tmp_path: Path
) -> None:
    oracle = pytest.importorskip("safetensors.numpy")
    write_checkpoint(tmp_path, small(kind), PAIR, RECORD, weights(small(kind)), dtype="f16")
    read = oracle.load_file(tmp_path / "model.safetensors")
    assert len(read) == count
    if kind == "dflash2":
        assert read["layers.0.attention_conv.base_kernel"].shape == (2, 3, 64)
        assert read["layers.1.mlp_conv.kernel_projection.weight"].shape == (2 * 3 * 8, 64)
        assert read["candidate_selector.predecessor_codebook"].shape == (160, 12)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_conversion_keeps_every_bit(kind: str, tmp_path: Path) -> None:
    config, given = small(kind), weights(small(kind))
    write_checkpoint(tmp_path / "folder", config, PAIR, RECORD, given)
    (told,) = convert_checkpoint(tmp_path / "folder", tmp_path / "d.gguf", dtype="f32")
    assert "gets no tokenizer" in told
    file = read_drafter(tmp_path / "d.gguf")
    assert (file.config, file.pair, file.record) == (config, PAIR, RECORD)
    arrays = file.arrays()
    assert set(arrays) == set(given)
    assert all(arrays[name].tobytes() == array.tobytes() for name, array in given.items())
    convert_checkpoint(tmp_path / "d.gguf", tmp_path / "again")
    again = read_checkpoint(tmp_path / "again")
    assert again.config == config
    assert all(again.tensors[name].tobytes() == array.tobytes() for name, array in given.items())


def test_an_own_mask_embedding_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small("dflash"), PAIR, RECORD, weights(small("dflash")))
    (tmp_path / "mask_embedding.pt").write_bytes(b"x")
    with pytest.raises(FileError, match=r"mask_embedding\.pt"):
        read_checkpoint(tmp_path)
