"""File facts: every kind of file is named for what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspine.cli.inspect import outline
from dspine.errors import FileError
from dspine.files.checkpoint import write_checkpoint
from dspine.files.drafter_file import write_drafter
from dspine.files.inspect import inspect_path
from dspine.files.safetensors_file import write_safetensors
from tests.support.drafter_files import (
    PAIR,
    RECORD,
    SMALL,
    gguf_bytes,
    pair_text,
    pair_u32,
    tensor_entry,
    weights,
)


def _facts(path: Path) -> Any:
    facts = inspect_path(path)
    assert {"path", "format", "kind", "role", "note", "tensors"} <= set(facts)
    # Plain data only, so that every command can print it as JSON.
    return json.loads(json.dumps(facts))


def _gguf(path: Path, *pairs: bytes, tensors: tuple[str, ...] = ()) -> Path:
    entries = [tensor_entry(name, (8,), 0, 32 * i) for i, name in enumerate(tensors)]
    path.write_bytes(gguf_bytes(list(pairs), entries, bytes(32 * len(tensors))))
    return path


def test_a_drafter_gguf(tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    write_drafter(path, SMALL, PAIR, RECORD, weights(), "q8_0")
    facts = _facts(path)
    assert (facts["kind"], facts["role"], facts["format"]) == ("DSpine drafter", "drafter", "gguf")
    assert facts["geometry"]["windows"] == [None, 24]
    assert facts["geometry"]["taps"] == [1, 4]
    assert facts["pair"]["name"] == "A target"
    assert facts["training"]["acceptance_curve"] == [0.75, 0.5, 0.25, 0.125]
    assert facts["training"]["provenance"]["answers"] == 12
    by_type = facts["tensors"]["by_type"]
    # 2 write matrices of 64 x 20 fall back to F16; vectors are F32.
    assert by_type["F16"] == {"count": 2, "parameters": 2560, "bytes": 5120}
    assert by_type["F32"]["count"] == 3 + 2 * 4
    assert facts["tensors"]["count"] == 8 + 13 * 2
    assert by_type["Q8_0"]["bytes"] * 32 == by_type["Q8_0"]["parameters"] * 34


def test_a_checkpoint_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, PAIR, RECORD, weights(dtype="bfloat16"))
    facts = _facts(tmp_path)
    assert (facts["kind"], facts["role"]) == ("DSpine checkpoint", "drafter")
    assert facts["pair"]["architecture"] == "llama"
    assert list(facts["tensors"]["by_type"]) == ["BF16"]
    (tmp_path / "dspine.json").unlink()
    facts = _facts(tmp_path)
    assert facts["pair"] is None
    assert "does not say which target" in facts["note"]


def test_a_target(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    pairs = [
        pair_text("general.architecture", "qwen35"),
        pair_u32("qwen35.block_count", 5),
        pair_u32("qwen35.embedding_length", 8),
        pair_u32("qwen35.nextn_predict_layers", 1),
        pair_u32("qwen35.ssm.state_size", 16),
        pair_text("tokenizer.ggml.model", "gpt2"),
        pair_u32("tokenizer.ggml.eos_token_id", 2),
    ]
    entries = [
        tensor_entry("token_embd.weight", (32, 4), 8, 0),
        tensor_entry("output_norm.weight", (8,), 0, 160),
    ]
    path.write_bytes(gguf_bytes(pairs, entries, bytes(192)))
    facts = _facts(path)
    assert (facts["kind"], facts["role"]) == ("language model", "target")
    assert facts["geometry"]["layers"] == 4
    assert facts["geometry"]["recurrent"] is True
    assert "1 built-in next-token (MTP) layers" in facts["note"]
    assert facts["tokenizer"] == {
        "model": "gpt2",
        "pre": "",
        "tokens": 0,
        "chat_template": False,
        "bos": None,
        "eos": 2,
    }
    assert facts["tensors"]["by_type"] == {
        "Q8_0": {"count": 1, "parameters": 128, "bytes": 136},
        "F32": {"count": 1, "parameters": 8, "bytes": 32},
    }


@pytest.mark.parametrize(
    ("pairs", "tensors", "kind"),
    [
        ([pair_text("general.architecture", "dflash")], ("fc.weight",), "DFlash drafter"),
        (
            [pair_text("general.architecture", "dflash")],
            ("selector_hidden.weight",),
            "DFlash2 drafter",
        ),
        (
            [pair_text("general.architecture", "dflash"), pair_u32("dflash.selector_top_k", 16)],
            (),
            "DFlash2 drafter",
        ),
        ([pair_text("general.architecture", "dflash")], ("markov_w1.weight",), "DSpark drafter"),
        ([pair_text("general.architecture", "eagle3")], (), "EAGLE-3 drafter"),
        ([pair_text("general.architecture", "clip")], (), "multimodal projector (mmproj)"),
        (
            [pair_text("general.architecture", "llama"), pair_text("general.type", "adapter")],
            (),
            "adapter",
        ),
        ([pair_text("general.type", "imatrix")], (), "imatrix"),
        (
            [
                pair_text("general.architecture", "qwen35"),
                pair_u32("qwen35.block_count", 1),
                pair_u32("qwen35.nextn_predict_layers", 1),
            ],
            (),
            "MTP heads",
        ),
        ([], ("x",), "GGUF without architecture"),
    ],
)
def test_files_of_others_are_named(
    tmp_path: Path, pairs: list[bytes], tensors: tuple[str, ...], kind: str
) -> None:
    facts = _facts(_gguf(tmp_path / "x.gguf", *pairs, tensors=tensors))
    assert (facts["kind"], facts["role"]) == (kind, "other")
    assert facts["tensors"]["count"] == len(tensors)


def test_facts_of_a_foreign_drafter(tmp_path: Path) -> None:
    path = _gguf(
        tmp_path / "x.gguf",
        pair_text("general.architecture", "dflash"),
        pair_u32("dflash.block_size", 8),
    )
    facts = _facts(path)
    assert facts["geometry"] == {"block_size": 8}
    assert facts["kind"] == "DFlash drafter"
    assert "has no dflash.embedding_length" in facts["note"]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["DominoDraftModel"], "Domino drafter"),
        (["Qwen3DSparkModel"], "DSpark drafter"),
        (["Qwen3ForCausalLM"], "model folder"),
        (None, "model folder"),
    ],
)
def test_folders_of_others_are_named(tmp_path: Path, names: list[str] | None, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": names}))
    write_safetensors(tmp_path / "model.safetensors", {"w": np.zeros(3, np.float32)})
    facts = _facts(tmp_path)
    assert (facts["kind"], facts["role"]) == (kind, "other")
    assert facts["tensors"]["by_type"]["F32"]["bytes"] == 12


def test_a_single_safetensors_file(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "s.safetensors", {"w": np.zeros(3, np.uint16)}, {"a": "b"})
    facts = _facts(tmp_path / "s.safetensors")
    assert facts["metadata"] == {"a": "b"}
    assert facts["tensors"]["by_type"] == {"BF16": {"count": 1, "parameters": 3, "bytes": 6}}


def test_what_is_none_of_these_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"holds no config\.json"):
        inspect_path(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FileError, match=r"config\.json cannot be read as JSON"):
        inspect_path(tmp_path)
    (tmp_path / "x.txt").write_text("hello world")
    with pytest.raises(
        FileError, match=r"not a GGUF file \(it begins with 68 65 6c 6c, not with 47"
    ):
        inspect_path(tmp_path / "x.txt")
    with pytest.raises(FileError, match="does not exist"):
        inspect_path(tmp_path / "none")


def test_a_layer_without_a_window_is_shown_in_words() -> None:
    assert list(outline({"windows": [None, 24]})) == ["windows  none, 24"]
