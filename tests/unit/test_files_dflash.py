"""DFlash and DFlash2 files: round trips, files of others, and drafters that need more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspine.errors import FileError, PairError
from dspine.files.checkpoint import read_checkpoint
from dspine.files.checkpoint_config import from_json, to_json
from dspine.files.convert import convert_checkpoint
from dspine.files.drafter_file import read_drafter, write_drafter
from dspine.files.gguf_file import read_header
from dspine.files.gguf_writer import TensorToWrite
from dspine.files.inspect import inspect_path
from dspine.files.pairing import check_unpaired
from dspine.files.quantise import quantise_drafter
from dspine.files.schema import DrafterConfig, TrainingRecord, tensor_specs
from dspine.ggml.types import type_by_name
from tests.support.drafter_files import (
    PAIR,
    RECORD,
    SMALL,
    SMALL_DFLASH,
    SMALL_DFLASH2,
    gguf_bytes,
    pair_text,
    pair_u32,
    text,
    weights,
)
from tests.support.rewritten import Change, foreign, rewritten

BOTH = pytest.mark.parametrize("config", [SMALL_DFLASH, SMALL_DFLASH2], ids=["dflash", "dflash2"])


def written(path: Path, config: DrafterConfig, **options: Any) -> Path:
    write_drafter(path, config, PAIR, RECORD, weights(config), "f32", **options)
    return path


def zeros(name: str, kind: str, ne: tuple[int, ...]) -> TensorToWrite:
    tensor = TensorToWrite(name, type_by_name(kind), ne, list)
    return replace(tensor, chunks=lambda: [memoryview(bytes(tensor.n_bytes))])


@BOTH
def test_a_round_trip(tmp_path: Path, config: DrafterConfig) -> None:
    read = read_drafter(written(tmp_path / "d.gguf", config))
    assert (read.config, read.pair, read.record) == (config, PAIR, RECORD)
    for name, values in weights(config).items():
        np.testing.assert_array_equal(read.arrays()[name], values)
    assert not read.own_tables
    assert inspect_path(read.path)["kind"] == f"{config.kind} drafter"


def test_names_shapes_and_keys_are_llama_cpps(tmp_path: Path) -> None:
    """Written out by hand from llama.cpp's loader of architecture `dflash`."""
    header = read_header(written(tmp_path / "d.gguf", SMALL_DFLASH2))
    assert header.architecture == "dflash"
    assert len(header.tensors) == 3 + 2 * (11 + 4) + 3
    shapes = {name: info.ne for name, info in header.tensors.items()}
    assert shapes["fc.weight"] == (128, 64)
    assert shapes["enc.output_norm.weight"] == (64,)
    assert shapes["blk.1.attn_conv_base"] == (64, 3, 2)
    assert shapes["blk.0.ffn_conv_proj.weight"] == (64, 2 * 3 * 4)
    assert shapes["selector_predecessor.weight"] == (32, 160)
    assert shapes["selector_hidden.weight"] == (64, 32)
    keys = header.metadata
    assert list(np.asarray(keys["dflash.target_layers"])) == [2, 5]
    assert list(np.asarray(keys["dflash.attention.sliding_window_pattern"])) == [False, True]
    assert keys["dflash.attention.sliding_window"] == 24
    assert keys["dflash.attention.causal"] is False
    assert keys["tokenizer.ggml.mask_token_id"] == 159
    assert keys["dflash.selector_top_k"] == 6


def test_a_target_gives_its_tokenizer(tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    target.write_bytes(
        gguf_bytes(
            [
                pair_text("general.architecture", "llama"),
                pair_text("tokenizer.ggml.model", "gpt2"),
                pair_u32("tokenizer.ggml.eos_token_id", 3),
                text("tokenizer.ggml.tokens")
                + (9).to_bytes(4, "little")
                + (8).to_bytes(4, "little")
                + (160).to_bytes(8, "little")
                + b"".join(text(f"t{i}") for i in range(160)),
            ],
            [],
        )
    )
    path = written(tmp_path / "d.gguf", SMALL_DFLASH, target=target)
    keys = read_header(path).metadata
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert keys["tokenizer.ggml.eos_token_id"] == 3
    assert keys["tokenizer.ggml.tokens"] == tuple(f"t{i}" for i in range(160))
    assert read_drafter(path).config == SMALL_DFLASH


@BOTH
def test_a_file_of_others_has_no_pair(tmp_path: Path, config: DrafterConfig) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, TensorToWrite]) -> None:
        foreign(metadata, tensors)
        del metadata["dflash.attention.causal"]
        metadata["dflash.rope.dimension_sections"] = np.array([8, 0, 0, 0], np.int32)
        tensors["token_embd.weight"] = zeros("token_embd.weight", "bf16", (64, 160))
        tensors["output.weight"] = zeros("output.weight", "q8_0", (64, 160))

    read = read_drafter(rewritten(written(tmp_path / "d.gguf", config), change))
    assert (read.config, read.pair, read.record) == (config, None, TrainingRecord())
    assert sorted(read.own_tables) == ["output.weight", "token_embd.weight"]
    assert inspect_path(read.path)["pair"] is None
    (warning,) = check_unpaired("d.gguf", read.config, PAIR)
    assert "does not say which target" in warning
    for other in (replace(PAIR, hidden_size=96), replace(PAIR, vocab_size=161)):
        with pytest.raises(PairError, match=r"the drafter needs a"):
            check_unpaired("d.gguf", read.config, other)
    with pytest.raises(PairError, match="reads target layer 4"):
        check_unpaired("d.gguf", read.config, replace(PAIR, num_layers=4))


def test_a_reduced_head_keeps_absolute_ids_as_i64(tmp_path: Path) -> None:
    config = replace(SMALL_DFLASH, draft_vocab_size=9)
    ids = [5, 1, 158, 7, 9, 11, 44, 2, 0]
    path = written(tmp_path / "d.gguf", config, draft_vocab=ids)
    assert read_header(path).tensors["d2t"].type.name == "i64"
    read = read_drafter(path)
    assert read.draft_vocab is not None
    assert (read.config, read.draft_vocab.tolist()) == (config, ids)


def test_causality_is_kept_for_each_layer(tmp_path: Path) -> None:
    config = replace(SMALL_DFLASH, causal=(False, True))
    path = written(tmp_path / "d.gguf", config)
    assert read_drafter(path).config == config
    assert read_header(path).metadata["dflash.attention.causal"] is False

    def change(metadata: dict[str, Any], tensors: dict[str, TensorToWrite]) -> None:
        foreign(metadata, tensors)
        metadata["dflash.attention.causal"] = True

    both = rewritten(path, change)
    assert read_drafter(both).config.causal == (True, True)


SCALED: dict[str, Any] = {"embedding_scale": 8.0, "logit_scale": 0.25, "logit_softcap": 30.0}
FORMED: dict[str, Any] = {"value_scale": 0.5, "rotary_size": 6, "sink_layers": (0, 1)}
"""What the published drafters of MiMo have."""


@BOTH
def test_scales_of_embedding_and_logits(tmp_path: Path, config: DrafterConfig) -> None:
    scaled = replace(config, **SCALED)
    path = written(tmp_path / "d.gguf", scaled)
    keys = read_header(path).metadata
    assert keys["dflash.embedding_scale"] == 8.0
    assert keys["dflash.logit_scale"] == 0.25
    assert keys["dflash.final_logit_softcapping"] == 30.0
    assert read_drafter(path).config == scaled
    plain = read_header(written(tmp_path / "p.gguf", config)).metadata
    assert not [key for key in plain if "scale" in key or "softcap" in key]

    def zero(metadata: dict[str, Any], tensors: dict[str, TensorToWrite]) -> None:
        for key in ("embedding_scale", "logit_scale", "final_logit_softcapping"):
            metadata[f"dflash.{key}"] = np.float32(0)

    # llama.cpp takes 0 as if the key were missing.
    assert read_drafter(rewritten(path, zero)).config == config


@BOTH
def test_a_cap_of_one_is_a_cap(tmp_path: Path, config: DrafterConfig) -> None:
    """1 changes nothing as a scale, but tanh(x) is not x."""
    capped = replace(config, logit_softcap=1.0)
    assert read_drafter(written(tmp_path / "d.gguf", capped)).config == capped
    assert from_json("c", to_json(capped, 8, "float32")) == capped


@BOTH
def test_sinks_scaled_values_and_partial_positions(tmp_path: Path, config: DrafterConfig) -> None:
    formed = replace(config, **FORMED)
    path = written(tmp_path / "d.gguf", formed)
    keys = read_header(path).metadata
    assert keys["dflash.attention.value_scale"] == 0.5
    assert keys["dflash.rope.dimension_count"] == 6
    sinks = read_header(path).tensors["blk.1.attn_sinks.weight"]
    assert (sinks.type.name, sinks.ne) == ("f32", (4,))
    assert read_drafter(path).config == formed
    plain = read_header(written(tmp_path / "p.gguf", config))
    assert "dflash.rope.dimension_count" not in plain.metadata
    quantise_drafter(path, tmp_path / "q.gguf", "bf16")
    assert read_drafter(tmp_path / "q.gguf").config == formed


@pytest.mark.parametrize("name", [*SCALED, *FORMED])
def test_dspine_has_none_of_these(name: str) -> None:
    with pytest.raises(FileError, match=rf"{name} is .*: DSpine scales nothing"):
        replace(SMALL, **{name: (SCALED | FORMED)[name]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_size": 7}, "rotary_size 7 must be even and below head_dim 16"),
        ({"rotary_size": 16}, "rotary_size 16 must be even"),
        ({"sink_layers": (0, 2)}, "sink_layers .* must be layers from 0 to 1"),
        ({"sink_layers": (1, 0)}, "in order"),
    ],
)
def test_forms_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FileError, match=message):
        replace(SMALL_DFLASH, **changes)


def test_a_huge_layer_count_is_refused_before_lists_are_made(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, TensorToWrite]) -> None:
        metadata["dflash.block_count"] = np.uint64(1 << 62)

    path = rewritten(written(tmp_path / "d.gguf", SMALL_DFLASH), change)
    with pytest.raises(FileError, match="block_count is 4611686018427387904, expected at most 25"):
        read_drafter(path)
    assert "block_count" in str(inspect_path(path)["note"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k, t: k.pop("dflash.block_size"), "how many tokens a block has"),
        (lambda k, t: k.pop("dflash.target_layers"), "which of the target's layers"),
        (lambda k, t: k.pop("tokenizer.ggml.mask_token_id"), "mask_token_id"),
        (lambda k, t: k.pop("dflash.vocab_size"), "neither tokenizer.ggml.tokens nor"),
        (lambda k, t: k.pop("dflash.selector_rank"), "dflash.selector_rank"),
        (lambda k, t: k.pop("dflash.attention.sliding_window_pattern"), "which layers have"),
        (lambda k, t: t.pop("selector_hidden.weight"), "no tensor selector_hidden"),
        (lambda k, t: t.pop("blk.0.attn_v.weight"), r"1 missing \(blk.0.attn_v"),
        (lambda k, t: k.update({"dflash.new": True}), "does not know"),
        (lambda k, t: k.update({"dspine.new": True}), "does not know"),
        (lambda k, t: k.update({"dflash.rope.scaling.type": "yarn"}), "does not scale positions"),
        (
            lambda k, t: k.update({"dflash.rope.dimension_count": np.uint32(18)}),
            "16, the whole head",
        ),
        (
            lambda k, t: k.update(
                {"dflash.rope.dimension_sections": np.array([4, 4, 0, 0], np.int32)}
            ),
            r"expected \[8, 0, 0, 0\]",
        ),
        (
            lambda k, t: t.update(x=zeros("markov_w1.weight", "f32", (4, 160))),
            "the Markov head of DSpark, which dspine does not run: llama.cpp, vLLM and SGLang can",
        ),
        (lambda k, t: t.update(x=zeros("conf_proj.weight", "f32", (4, 1))), "confidence head"),
        (
            lambda k, t: t.update(x=zeros("prefix_gru.weight_ih_l0", "f32", (4, 4))),
            "Domino.*SGLang can",
        ),
        (
            lambda k, t: t.update(x=zeros("blk.0.attn_sinks.weight", "f32", (5,))),
            r"attn_sinks.weight has shape \(5,\), expected \(4,\)",
        ),
        (lambda k, t: t.update(x=zeros("fc.scale", "f32", (1,))), "a separate scale"),
        (
            lambda k, t: k.update({"dflash.hyper_connection.count": np.uint32(4)}),
            "DeepSeek-V4 form of DSpark",
        ),
        (
            lambda k, t: k.update({"dflash.attention.scale": np.float32(0.5)}),
            "an attention scale of its own, which dspine does not run: llama.cpp can",
        ),
        (lambda k, t: k.update({"dflash.logit_scale": np.float32(-1)}), "logit_scale -1.0 must"),
        (lambda k, t: k.update({"dflash.embedding_scale": np.uint32(2)}), "a number with a"),
        (
            lambda k, t: k.update({"dflash.hidden_activation": "gelu"}),
            "activation gelu, which dspine does not run: llama.cpp can",
        ),
        (lambda k, t: k.update({"dflash.sample_from_anchor": True}), "block layout of DSpark"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Change, message: str) -> None:
    path = rewritten(written(tmp_path / "d.gguf", SMALL_DFLASH2), change)
    with pytest.raises(FileError, match=message):
        read_drafter(path)


def test_what_has_no_key_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"windows of \[8, 24\]"):
        written(tmp_path / "d.gguf", replace(SMALL_DFLASH, windows=(8, 24)))
    config = replace(SMALL_DFLASH, target_hidden_size=32)
    with pytest.raises((FileError, PairError), match="hidden"):
        written(tmp_path / "d.gguf", config)
    assert list(tmp_path.iterdir()) == []


def test_every_weight_type_is_read(tmp_path: Path) -> None:
    """Any ggml type for matrices, and floats for the convolutions' base."""

    def change(metadata: dict[str, Any], tensors: dict[str, TensorToWrite]) -> None:
        kinds = ("q4_0", "q5_1", "q8_0", "iq4_nl", "mxfp4", "bf16", "f16")
        for i, spec in enumerate(s for s in tensor_specs(SMALL_DFLASH2) if s.is_matrix):
            name = spec.gguf_name
            tensors[name] = zeros(name, kinds[i % len(kinds)], spec.shape[::-1])
        tensors["blk.0.attn_conv_base"] = zeros("blk.0.attn_conv_base", "bf16", (64, 3, 2))

    read = read_drafter(rewritten(written(tmp_path / "d.gguf", SMALL_DFLASH2), change))
    assert {t.type.name for t in read.tensors.values()} >= {"q4_0", "mxfp4", "iq4_nl"}


def test_quantising_keeps_own_tables_and_tokenizer(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, TensorToWrite]) -> None:
        metadata["tokenizer.ggml.model"] = "gpt2"
        tensors["token_embd.weight"] = zeros("token_embd.weight", "f32", (64, 160))

    source = rewritten(written(tmp_path / "d.gguf", SMALL_DFLASH2), change)
    quantise_drafter(source, tmp_path / "q.gguf", "f16")
    read = read_drafter(tmp_path / "q.gguf")
    assert (read.config, read.pair) == (SMALL_DFLASH2, PAIR)
    assert list(read.own_tables) == ["token_embd.weight"]
    assert read.tensors["blk.0.attn_conv_base"].type.name == "f32"
    assert read.matrix_type == "f16"
    assert read_header(read.path).metadata["tokenizer.ggml.model"] == "gpt2"


@BOTH
def test_the_targets_rows_in_a_reduced_head_are_no_table_of_its_own(
    tmp_path: Path, config: DrafterConfig
) -> None:
    """We write them for llama.cpp; other formats do without, and quantising leaves them alone."""
    config, ids = replace(config, draft_vocab_size=9), [5, 1, 158, 7, 9, 11, 44, 2, 0]
    source = written(tmp_path / "d.gguf", config, draft_vocab=ids)
    source = rewritten(
        source, lambda k, t: t.update({"output.weight": zeros("output.weight", "q8_0", (64, 9))})
    )
    assert list(read_drafter(source).own_tables) == ["output.weight"]
    assert quantise_drafter(source, tmp_path / "q.gguf", "bf16") == []
    stored = read_header(tmp_path / "q.gguf").tensors
    assert (stored["output.weight"].type.name, stored["fc.weight"].type.name) == ("q8_0", "bf16")
    convert_checkpoint(source, tmp_path / "folder")
    again = read_checkpoint(tmp_path / "folder")
    assert again.draft_vocab is not None
    assert (again.config, again.draft_vocab.tolist()) == (config, ids)
    for name, values in weights(config).items():
        assert again.tensors[name].tobytes() == values.tobytes(), name
    alien = rewritten(source, foreign)
    with pytest.raises(FileError, match=r"has its own output\.weight"):
        convert_checkpoint(alien, tmp_path / "other")


def test_a_run_stands_for_its_best_checkpoint(tmp_path: Path) -> None:
    convert_checkpoint(
        written(tmp_path / "d.gguf", SMALL_DFLASH), tmp_path / "run/checkpoint-00000004"
    )
    facts = inspect_path(tmp_path / "run")
    assert facts["kind"] == "DFlash checkpoint"
    geometry = facts["geometry"]
    assert isinstance(geometry, dict) and "sink_layers" not in geometry
