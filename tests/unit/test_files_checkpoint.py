"""Checkpoint folders: SpecForge's config in its several spellings, both ways, strictly."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspine.errors import FileError
from dspine.files.checkpoint import INDEX_FILE, read_checkpoint, write_checkpoint
from dspine.files.checkpoint_config import from_json, to_json
from dspine.files.convert import convert_checkpoint
from dspine.files.drafter_file import read_drafter
from dspine.files.safetensors_file import SafeTensor, read_safetensors, write_safetensors
from dspine.files.schema import DSpineConfig, TrainingRecord, tensor_specs
from tests.support.drafter_files import (
    PAIR,
    RECORD,
    SMALL,
    gguf_bytes,
    pair_text,
    pair_u32,
    tensor_entry,
    weights,
    with_reduced_head,
)

QWEN3_8B: dict[str, Any] = {
    "architectures": ["DSpineDraftModel"],
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
    "is_causal": True,
    "layer_types": ["full_attention"] * 5,
    "use_sliding_window": False,
    "sliding_window": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dspine_config": {"transfer_rank": 1024, "message_size": 512, "top_k": 16, "ce_weight": 0.1},
}
EXPECTED_8B = DSpineConfig(
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    target_hidden_size=4096,
    block_size=16,
    taps=(1, 9, 17, 25, 33),
    mask_token_id=151669,
    windows=(None,) * 5,
    causal=(True,) * 5,
    transfer_rank=1024,
    message_size=512,
    top_k=16,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    max_positions=40960,
)


def _edited(edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    values = copy.deepcopy(QWEN3_8B)
    edit(values)
    return values


def _drop(*keys: str) -> Callable[[dict[str, Any]], object]:
    return lambda v: [v.pop(key) for key in keys]


@pytest.mark.parametrize(
    "edit",
    [
        lambda v: None,
        lambda v: v.update(rope_theta=None, rope_parameters={"rope_theta": 1e6}),
        lambda v: v.update(
            rope_theta=None, rope_scaling={"rope_type": "default", "rope_theta": 1000000.0}
        ),
        lambda v: v.update(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
        _drop("is_causal"),
        _drop("dspine_config"),
        _drop("layer_types"),
        lambda v: v["dflash_config"].pop("target_layer_ids"),
        lambda v: v["dflash_config"].update(block_size=16, causal=True),
        lambda v: (v.pop("block_size"), v["dflash_config"].update(block_size=16)),
        lambda v: v.update(auto_map={"AutoModel": "x"}, eos_token_id=3, torch_dtype="bfloat16"),
        lambda v: v.update(id2label={"0": "a"}, is_decoder=False, partial_rotary_factor=1.0),
    ],
)
def test_every_spelling_of_the_8b_config_means_the_same(
    edit: Callable[[dict[str, Any]], object],
) -> None:
    assert from_json("config.json", _edited(edit)) == EXPECTED_8B


def test_windows_follow_the_layer_types() -> None:
    values = _edited(lambda v: v.update(use_sliding_window=True, sliding_window=8192))
    assert from_json("c", values).windows == (None,) * 5
    values["layer_types"] = ["sliding_attention"] * 4 + ["full_attention"]
    assert from_json("c", values).windows == (8192,) * 4 + (None,)
    del values["use_sliding_window"]
    assert from_json("c", values).windows == (8192,) * 4 + (None,)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda v: v["dspine_config"].update(beam=2, alpha=1), "does not know: alpha, beam"),
        (
            lambda v: v["dflash_config"].update(use_swa=True, swa_window_size=0),
            "use_swa is set and swa_window_size is 0",
        ),
        (lambda v: v.update(sink=1, new_gate=True), "it has keys .* know: new_gate, sink;"),
        (lambda v: v.update(partial_rotary_factor=0.25), "rotary_size is .*: DSpine scales"),
        (lambda v: v.update(has_lm_head=True), "has_lm_head is True"),
        (lambda v: v["dflash_config"].update(attention_mode="mla"), "'mla', expected 'gqa'"),
        (_drop("rope_theta"), "rope_theta is missing"),
        (lambda v: v.update(rope_parameters={"rope_theta": 5e5}), "differently in two places"),
        (lambda v: v.update(rope_scaling={"rope_type": "yarn"}), "scaling 'yarn'"),
        (lambda v: v.update(rope_theta="big"), "rope_theta is 'big'"),
        (lambda v: v.update(rope_theta=10**400), "rope_theta is too large"),
        (lambda v: v.update(rope_theta=float("nan")), "rope_theta nan"),
        (lambda v: v.update(is_causal=False), "is_causal is False, expected true"),
        (lambda v: v["dflash_config"].update(causal=False), "dflash_config.causal is False"),
        (lambda v: v.update(is_causal="yes"), "is_causal is 'yes'"),
        (_drop("layer_types", "use_sliding_window"), "layer_types is missing"),
        (
            lambda v: v.update(layer_types=["sliding_attention"] * 5, sliding_window=4096),
            "use_sliding_window is False",
        ),
        (
            lambda v: v.update(layer_types=["sliding_attention"] * 5, use_sliding_window=True),
            "sliding_window is None",
        ),
        (lambda v: v.update(layer_types=["full_attention"]), "one entry for each of 5"),
        (lambda v: v.update(layer_types=["linear_attention"] * 5), "linear_attention"),
        (lambda v: v.update(architectures=["DSparkDraftModel"]), "DSparkDraftModel"),
        (lambda v: v.update(architectures=["LingDSparkModel"]), r"DSpark drafter \(LingDSpark"),
        (lambda v: v.update(architectures=["DeepseekV4DSparkModel"]), "in DeepSeek-V4's form"),
        (_drop("architectures"), "architectures is None"),
        (lambda v: v.update(attention_bias=True), "attention_bias is True"),
        (lambda v: v.update(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (_drop("head_dim"), "head_dim is missing"),
        (lambda v: v.update(hidden_size=True), "hidden_size is True"),
        (lambda v: v.update(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000"),
        (lambda v: v["dflash_config"].pop("mask_token_id"), "mask_token_id is missing"),
        (lambda v: v["dflash_config"].update(block_size=8), "stated twice and differently"),
        (lambda v: v["dflash_config"].update(target_layer_ids=[1.5]), "target_layer_ids is 1.5"),
        (lambda v: v.update(dflash_config=None), "dflash_config is None"),
        (lambda v: v["dspine_config"].update(transfer_rank="1"), "transfer_rank is '1'"),
    ],
)
def test_what_would_run_wrongly_is_refused(
    edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    with pytest.raises(FileError, match=words) as caught:
        from_json("folder/config.json", _edited(edit))
    assert str(caught.value).startswith("folder/config.json: ")


def test_config_goes_both_ways() -> None:
    for config in (SMALL, EXPECTED_8B, replace(SMALL, target_hidden_size=96, rope_theta=1e7)):
        assert from_json("c", json.loads(json.dumps(to_json(config, 36, "bfloat16")))) == config
    with pytest.raises(FileError, match="different windows"):
        to_json(replace(SMALL, windows=(8, 16)), 8, "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_folder_comes_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    folder = tmp_path / "a" / "checkpoint"
    config, given = with_reduced_head(size=5), weights(dtype=dtype)
    write_checkpoint(folder, config, PAIR, RECORD, given, [9, 3, 4, 5, 6])
    read = read_checkpoint(folder)
    assert (read.config, read.pair, read.record) == (config, PAIR, RECORD)
    assert read.draft_vocab is not None
    assert read.draft_vocab.tolist() == [9, 3, 4, 5, 6]
    for name, array in given.items():
        assert read.tensors[name].dtype == array.dtype
        assert read.tensors[name].tobytes() == array.tobytes()
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype


def test_the_folder_has_exactly_what_strict_loading_expects(tmp_path: Path) -> None:
    oracle = pytest.importorskip("safetensors.numpy")
    write_checkpoint(tmp_path, SMALL, PAIR, RECORD, weights(), dtype="f16")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "dspine.json",
        "model.safetensors",
    ]
    read = oracle.load_file(tmp_path / "model.safetensors")
    assert len(read) == 8 + 13 * 2 + 1
    assert read["transfer_ready"].shape == ()
    assert bool(read["transfer_ready"]) is True
    assert read["injection.readouts.1.weight"].shape == (32, 64)
    assert read["fc.weight"].dtype == np.float16
    assert "injection" not in (tmp_path / "config.json").read_text()


def test_an_existing_checkpoint_is_kept_unless_asked(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, PAIR, RECORD, weights())
    with pytest.raises(FileError, match=r"model\.safetensors exists already"):
        write_checkpoint(tmp_path, SMALL, PAIR, TrainingRecord(), weights(seed=4))
    assert read_checkpoint(tmp_path).record == RECORD
    write_checkpoint(tmp_path, SMALL, PAIR, TrainingRecord(), weights(seed=4), overwrite=True)
    assert read_checkpoint(tmp_path).record == TrainingRecord()


def test_other_weights_in_the_folder_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    for name in ("transfer.safetensors", "model-00001-of-00002.safetensors", INDEX_FILE):
        (tmp_path / name).write_text("")
        for overwrite in (False, True):
            with pytest.raises(FileError, match=re.escape(f"other weights ({name})")):
                write_checkpoint(tmp_path, SMALL, PAIR, RECORD, weights(), overwrite=overwrite)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()


def _rewrite(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tensors: dict[str, Any] = dict(read_safetensors(folder / "model.safetensors").tensors)
    edit(tensors)
    write_safetensors(folder / "model.safetensors", tensors, overwrite=True)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("transfer_ready"), "no flag transfer_ready"),
        (lambda t: t.update(transfer_ready=np.array(False)), "transfer_ready is false"),
        (lambda t: t.update(transfer_ready=np.array(1, np.int32)), "no flag transfer_ready"),
        (lambda t: t.pop("transfer_codes"), r"1 missing \(transfer_codes\)"),
        (lambda t: t.update(lm_head=np.zeros(2)), r"1 unknown \(lm_head\)"),
        (lambda t: t.update({"a\nb": np.zeros(2)}), r"1 unknown \(a b\)"),
        (lambda t: t.update({"norm.weight": np.zeros(3, np.float32)}), r"shape \(3,\).*\(64,\)"),
        (lambda t: t.update({"norm.weight": np.zeros(64, np.int32)}), "norm.weight has dtype I32"),
    ],
)
def test_wrong_tensors_are_named(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], words: str
) -> None:
    write_checkpoint(tmp_path, SMALL, PAIR, RECORD, weights())
    _rewrite(tmp_path, edit)
    with pytest.raises(FileError, match=words):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[1]", "not a table"),
        ("config.json", "[" * 100000, "not valid JSON"),
        ("dspine.json", "{}", "format None"),
        ("dspine.json", '{"format": 2}', "format 2"),
    ],
)
def test_damaged_json_is_named(tmp_path: Path, name: str, text: str, words: str) -> None:
    write_checkpoint(tmp_path, SMALL, PAIR, RECORD, weights())
    (tmp_path / name).write_text(text)
    with pytest.raises(FileError, match=words) as caught:
        read_checkpoint(tmp_path)
    assert name in str(caught.value)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="not a folder"):
        read_checkpoint(tmp_path / "none")
    with pytest.raises(FileError, match=r"config\.json does not exist"):
        read_checkpoint(tmp_path)
    write_checkpoint(tmp_path, SMALL, PAIR, RECORD, weights())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileError, match=r"model\.safetensors does not exist"):
        read_checkpoint(tmp_path)


def test_weights_split_over_several_files(tmp_path: Path) -> None:
    given = weights()
    write_checkpoint(tmp_path, SMALL, PAIR, RECORD, given)
    whole = dict(read_safetensors(tmp_path / "model.safetensors").tensors)
    names = list(whole)
    places = {n: f"part-{i % 2}.safetensors" for i, n in enumerate(names)}
    for part in sorted(set(places.values())):
        write_safetensors(tmp_path / part, {n: whole[n] for n in names if places[n] == part})
    (tmp_path / "model.safetensors").unlink()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    read = read_checkpoint(tmp_path)
    assert all(read.tensors[n].tobytes() == a.tobytes() for n, a in given.items())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../x.safetensors")}))
    with pytest.raises(FileError, match="not a file beside it"):
        read_checkpoint(tmp_path)


def test_the_reference_layout_is_read(tmp_path: Path) -> None:
    """Codes in a file of their own, config under `config`, sizes taken from the tensors."""
    config = replace(SMALL, block_size=16, top_k=16, windows=(None, None))
    given: dict[str, Any] = dict(weights(config))
    inner = to_json(config, 8, "float32")
    for key in ("dspine_config", "architectures", "block_size", "layer_types"):
        del inner[key]
    (tmp_path / "config.json").write_text(json.dumps({"config": inner}))
    codes = given.pop("transfer_codes")
    write_safetensors(tmp_path / "model.safetensors", given)
    write_safetensors(tmp_path / "transfer.safetensors", {"codes": codes})
    read = read_checkpoint(tmp_path)
    assert read.config == config
    assert read.pair is None
    assert (read.tensors["transfer_codes"] == codes).all()
    del inner["dflash_config"]["target_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(inner))
    with pytest.raises(FileError, match="target_layer_ids"):
        read_checkpoint(tmp_path)


def _target(path: Path, vocab_size: int = 160, more: Sequence[bytes] = ()) -> Path:
    """The least that describes a target: sizes and one tensor; `more` are further keys."""
    pairs = [
        pair_text("general.architecture", "llama"),
        pair_text("general.name", "Tiny"),
        pair_u32("llama.block_count", 8),
        pair_u32("llama.embedding_length", 64),
        *more,
    ]
    entries = [
        tensor_entry("output_norm.weight", (64,), 0, 0),
        tensor_entry("token_embd.weight", (64, vocab_size), 0, 256),
    ]
    path.write_bytes(gguf_bytes(pairs, entries, bytes(256 + 256 * vocab_size)))
    return path


@pytest.mark.parametrize(("dtype", "source"), [("bf16", "bfloat16"), ("f16", "float16")])
def test_conversion_keeps_every_bit(tmp_path: Path, dtype: str, source: str) -> None:
    folder, out = tmp_path / "checkpoint", tmp_path / "out.gguf"
    given = weights(dtype=source)
    write_checkpoint(folder, SMALL, PAIR, RECORD, given)
    seen: list[tuple[int, int]] = []
    warnings = convert_checkpoint(folder, out, dtype=dtype, progress=lambda *at: seen.append(at))
    assert warnings == []
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    read = read_drafter(out)
    assert (read.config, read.pair, read.record) == (SMALL, PAIR, RECORD)
    for spec in tensor_specs(SMALL):
        if spec.is_matrix:
            assert read.arrays()[spec.torch_name].tobytes() == given[spec.torch_name].tobytes()
    with pytest.raises(FileError, match="exists already"):
        convert_checkpoint(folder, out, dtype=dtype)


def test_foreign_folders_need_their_target(tmp_path: Path) -> None:
    folder, out = tmp_path / "checkpoint", tmp_path / "out.gguf"
    write_checkpoint(folder, SMALL, PAIR, RECORD, weights())
    (folder / "dspine.json").unlink()
    with pytest.raises(FileError, match="name the target's GGUF"):
        convert_checkpoint(folder, out)
    with pytest.raises(FileError, match="vocabulary size of 160, but other has 64"):
        convert_checkpoint(folder, out, target=_target(tmp_path / "other.gguf", 64))
    assert not out.exists()
    target = _target(tmp_path / "target.gguf")
    (warning,) = convert_checkpoint(folder, out, target=target, thinking=True)
    assert "how many drafts are accepted" in warning
    pair = read_drafter(out).pair
    assert pair is not None
    assert (pair.name, pair.num_layers, pair.vocab_size, pair.thinking) == ("target", 8, 160, True)


def test_a_folder_that_does_not_say_whether_it_knows_reasoning_is_told(tmp_path: Path) -> None:
    folder, out = tmp_path / "checkpoint", tmp_path / "out.gguf"
    write_checkpoint(folder, SMALL, PAIR, RECORD, weights())
    (folder / "dspine.json").unlink()
    template = pair_text("tokenizer.chat_template", "{% if enable_thinking %}<think>{% endif %}")
    target = _target(tmp_path / "target.gguf", more=[template])
    for thinking, told in ((None, 1), (True, 0), (False, 0)):
        warnings = convert_checkpoint(folder, out, target=target, thinking=thinking, overwrite=True)
        assert sum("--thinking" in warning for warning in warnings) == told
    # Our own folders say it.
    again = convert_checkpoint(out, tmp_path / "again.gguf", target=target)
    assert not any("--thinking" in warning for warning in again)


def test_our_folder_is_compared_with_a_named_target(tmp_path: Path) -> None:
    folder, out = tmp_path / "checkpoint", tmp_path / "out.gguf"
    write_checkpoint(folder, SMALL, PAIR, RECORD, weights())
    warnings = convert_checkpoint(folder, out, target=_target(tmp_path / "target.gguf"))
    assert len(warnings) == 2
    assert "vocabulary cannot be compared" in warnings[0]
    assert "target is another version or a fine-tune of A target" in warnings[1]
    assert read_drafter(out).pair == PAIR


def test_a_run_stands_for_its_best_checkpoint(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out.gguf"
    for number, width in ((1, 0.25), (2, 0.5), (3, 0.75)):
        record = replace(RECORD, acceptance_curve=(width,) * len(RECORD.acceptance_curve))
        write_checkpoint(run / f"checkpoint-{number:08d}", SMALL, PAIR, record, weights())
    convert_checkpoint(run, out)
    assert read_drafter(out).record.acceptance_curve[0] == 0.75, "the newest, while none is best"
    (run / "best.json").write_text('{"checkpoint": "checkpoint-00000002", "acceptance_length": 2}')
    convert_checkpoint(run, out, overwrite=True)
    assert read_drafter(out).record.acceptance_curve[0] == 0.5
    with pytest.raises(FileError, match="--force"):
        convert_checkpoint(run, out)


def test_a_missing_acceptance_curve_is_told(tmp_path: Path) -> None:
    record = replace(RECORD, acceptance_curve=())
    write_checkpoint(tmp_path / "checkpoint", SMALL, PAIR, record, weights())
    (warning,) = convert_checkpoint(tmp_path / "checkpoint", tmp_path / "out.gguf")
    assert "--held-out" in warning and "dspine train eval" in warning


def test_sixteen_bit_counts_are_no_weights(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, PAIR, RECORD, weights())
    _rewrite(tmp_path, lambda t: t.update({"norm.weight": SafeTensor("U16", np.zeros(64, "u2"))}))
    with pytest.raises(FileError, match="dtype U16"):
        read_checkpoint(tmp_path)
