"""The published 27B drafter: its configuration at full size, without its gigabytes, and small."""

from __future__ import annotations

import copy
import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspine.errors import FileError
from dspine.files.checkpoint import read_checkpoint
from dspine.files.checkpoint_config import from_json, to_json
from dspine.files.convert import convert_checkpoint
from dspine.files.drafter_file import read_drafter
from dspine.files.inspect import inspect_path
from dspine.files.safetensors_file import write_safetensors
from dspine.files.schema import DSpineConfig, default_taps, tensor_specs
from tests.support.drafter_files import SMALL, weights

CONFIG: dict[str, Any] = {
    "architectures": ["DSpineDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "num_target_layers": 64,
    "block_size": 16,
    "is_causal": True,
    "layer_types": ["sliding_attention"] * 5,
    "use_sliding_window": True,
    "sliding_window": 8192,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
    "max_position_embeddings": 262144,
    "attention_bias": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "dspine_config": {"transfer_rank": 1024, "message_size": 512, "top_k": 16},
}
EXPECTED = DSpineConfig(
    hidden_size=5120,
    intermediate_size=17408,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=248320,
    target_hidden_size=5120,
    block_size=16,
    taps=(1, 16, 31, 46, 61),
    mask_token_id=248070,
    windows=(8192,) * 5,
    causal=(True,) * 5,
    transfer_rank=1024,
    message_size=512,
    top_k=16,
    rope_theta=1e7,
    rms_norm_eps=1e-6,
    max_positions=262144,
)


def sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """A BF16 safetensors file with a header and, for the data, a hole; its size in bytes."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + (1 if name == "transfer_ready" else 2 * math.prod(shape))
        dtype = "BOOL" if name == "transfer_ready" else "BF16"
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + at)
        if "transfer_ready" in header:
            file.seek(8 + len(raw) + header["transfer_ready"]["data_offsets"][0])
            file.write(b"\x01")
    return 8 + len(raw) + at


@pytest.fixture
def shapes() -> dict[str, tuple[int, ...]]:
    return {s.torch_name: s.shape for s in tensor_specs(EXPECTED)} | {"transfer_ready": ()}


def test_the_configuration() -> None:
    assert from_json("config.json", CONFIG) == EXPECTED
    assert from_json("c", json.loads(json.dumps(to_json(EXPECTED, 64, "bfloat16")))) == EXPECTED
    without = copy.deepcopy(CONFIG)
    del without["dflash_config"]["target_layer_ids"]
    assert from_json("c", without).taps == default_taps(64, 5) == (1, 16, 31, 46, 61)
    twice = {**CONFIG, "rope_theta": 1000000}
    with pytest.raises(FileError, match="rotary base is stated differently in two places"):
        from_json("c", twice)


def test_sizes_are_the_published_ones(shapes: dict[str, tuple[int, ...]]) -> None:
    """2.03 B parameters, codes counted; 74 tensors with the flag."""
    assert len(shapes) == 74
    total = sum(math.prod(s) for n, s in shapes.items() if n != "transfer_ready")
    assert round(total / 1e6, 1) == 2025.4


def test_a_folder_of_full_size(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    size = sparse(tmp_path / "model.safetensors", shapes)
    assert 4.0e9 < size < 4.1e9
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < 1 << 20, "nothing but a hole"
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    read = read_checkpoint(tmp_path)
    assert read.config == EXPECTED
    assert read.tensors["transfer_codes"].shape == (248320, 1024)
    assert read.tensors["transfer_codes"].dtype == np.uint16
    told: Any = inspect_path(tmp_path)
    assert told["tensors"]["by_part"]["transfer codes"]["bytes"] == 248320 * 1024 * 2
    assert told["dspine"]["flags"].startswith("dspine convert -m TARGET.gguf")
    del shapes["layers.4.mlp.up_proj.weight"]
    sparse(tmp_path / "model.safetensors", shapes)
    with pytest.raises(FileError, match=r"1 missing \(layers\.4\.mlp\.up_proj\.weight\)"):
        read_checkpoint(tmp_path)


def test_a_folder_of_full_size_in_parts(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    names, places = list(shapes), dict[str, str]()
    for part, chosen in ((1, names[:30]), (2, names[30:])):
        file = f"model-{part:05d}-of-00002.safetensors"
        sparse(tmp_path / file, {name: shapes[name] for name in chosen})
        places |= dict.fromkeys(chosen, file)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_checkpoint(tmp_path).config == EXPECTED
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileError, match="model-00002-of-00002"):
        read_checkpoint(tmp_path)


def test_the_three_files_of_the_authors(tmp_path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Codes apart, no flag, config nested; a stated window stands, else attention is full."""
    codes = shapes.pop("transfer_codes")
    del shapes["transfer_ready"]
    sparse(tmp_path / "model.safetensors", shapes)
    sparse(tmp_path / "transfer.safetensors", {"codes": codes})
    inner = copy.deepcopy(CONFIG)
    for key in ("architectures", "dspine_config", "block_size"):
        del inner[key]
    (tmp_path / "config.json").write_text(json.dumps({"config": inner}))
    assert read_checkpoint(tmp_path).config == EXPECTED
    del inner["layer_types"]
    (tmp_path / "config.json").write_text(json.dumps(inner))
    assert read_checkpoint(tmp_path).config == EXPECTED
    inner["use_sliding_window"] = False
    inner["target_layer_ids"] = inner["dflash_config"].pop("target_layer_ids")
    inner["mask_token_id"] = inner["dflash_config"].pop("mask_token_id")
    del inner["dflash_config"]
    (tmp_path / "config.json").write_text(json.dumps(inner))
    assert read_checkpoint(tmp_path).config == replace(EXPECTED, windows=(None,) * 5)
    del inner["mask_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(inner))
    with pytest.raises(FileError, match="mask_token_id is missing"):
        read_checkpoint(tmp_path)


def test_codes_in_two_places(tmp_path: Path) -> None:
    given: dict[str, Any] = dict(weights())
    write_safetensors(tmp_path / "model.safetensors", given)
    write_safetensors(tmp_path / "transfer.safetensors", {"codes": given["transfer_codes"]})
    (tmp_path / "config.json").write_text(json.dumps(to_json(SMALL, 8, "float32")))
    with pytest.raises(FileError, match=r"in transfer\.safetensors and beside the other weights"):
        read_checkpoint(tmp_path)


def test_the_same_shape_small(tmp_path: Path) -> None:
    """All proportions of the 27B at a hundredth: folder, GGUF and folder with the same bits."""
    small = replace(
        EXPECTED,
        hidden_size=160,
        intermediate_size=544,
        num_heads=4,
        num_kv_heads=1,
        head_dim=32,
        vocab_size=2483,
        target_hidden_size=160,
        mask_token_id=2480,
        transfer_rank=32,
        message_size=16,
    )
    values = to_json(small, 64, "bfloat16")
    given: dict[str, Any] = dict(weights(small, "bfloat16"))
    write_safetensors(tmp_path / "model.safetensors", {**given, "transfer_ready": np.array(True)})
    (tmp_path / "config.json").write_text(json.dumps(values))
    target = target_of(tmp_path / "target.gguf", small)
    convert_checkpoint(tmp_path, tmp_path / "d.gguf", dtype="bf16", target=target)
    read = read_drafter(tmp_path / "d.gguf")
    assert read.config == small
    assert read.pair is not None
    assert (read.pair.architecture, read.pair.num_layers) == ("qwen35", 64)
    convert_checkpoint(tmp_path / "d.gguf", tmp_path / "back")
    back = read_checkpoint(tmp_path / "back")
    assert all(back.tensors[n].tobytes() == a.tobytes() for n, a in given.items())
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert written == {**values, "sliding_window": 8192}


def target_of(path: Path, config: DSpineConfig) -> Path:
    """The least of a target that the drafter could belong to."""
    from tests.support.drafter_files import gguf_bytes, pair_text, pair_u32, tensor_entry

    hidden, vocab = config.target_hidden_size, config.vocab_size
    pairs = [
        pair_text("general.architecture", "qwen35"),
        pair_u32("qwen35.block_count", 64),
        pair_u32("qwen35.embedding_length", hidden),
    ]
    entries = [
        tensor_entry("output_norm.weight", (hidden,), 0, 0),
        tensor_entry("token_embd.weight", (hidden, vocab), 0, 4 * hidden),
    ]
    path.write_bytes(gguf_bytes(pairs, entries, bytes(4 * hidden * (vocab + 1))))
    return path
