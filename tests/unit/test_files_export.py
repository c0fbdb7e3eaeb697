"""Folders for other engines: the published names, shapes and dtypes, and the command."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspine.cli.main import run_cli
from dspine.errors import FileError
from dspine.files.drafter_file import write_drafter
from dspine.files.export import export_drafter
from dspine.files.schema import TrainingRecord
from tests.support.drafter_files import (
    PAIR,
    RECORD,
    SMALL,
    SMALL_DFLASH,
    SMALL_DFLASH2,
    weights,
    with_reduced_head,
)

# From SpecForge's published model and configuration (Qwen3-8B), written down by hand: the sizes of
# SMALL stand for theirs. H 64, I 96, A 4 * 16, G 2 * 16, T 2, r 32, m 20, V 160.
LAYER = {
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
    "self_attn.q_norm.weight": (16,),
    "self_attn.k_norm.weight": (16,),
    "mlp.gate_proj.weight": (96, 64),
    "mlp.up_proj.weight": (96, 64),
    "mlp.down_proj.weight": (64, 96),
}
OUTSIDE = {
    "fc.weight": (64, 128),
    "hidden_norm.weight": (64,),
    "norm.weight": (64,),
    "injection.readouts.0.weight": (32, 64),
    "injection.readouts.1.weight": (32, 64),
    "injection.writes.0.weight": (64, 20),
    "injection.writes.1.weight": (64, 20),
    "injection.message.weight": (20, 32),
    "injection.receiver_gate.weight": (20, 32),
    "injection.predecessor_gate.weight": (20, 32),
    "injection.bias": (20,),
    "transfer_codes": (160, 32),
    "transfer_ready": (),
}
CONFIG = {
    "architectures": ["DSpineDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "max_position_embeddings": 2048,
    "block_size": 5,
    "is_causal": True,
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 24,
    "tie_word_embeddings": False,
    "num_target_layers": 8,
    "dtype": "bfloat16",
    "dflash_config": {"mask_token_id": 159, "target_layer_ids": [1, 4]},
    "dspine_config": {"transfer_rank": 32, "message_size": 20, "top_k": 4},
}


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    path = tmp_path / "d.gguf"
    write_drafter(path, SMALL, PAIR, RECORD, weights(dtype="bfloat16"), "bf16")
    return path


def test_the_folder_is_the_published_layout(drafter: Path, tmp_path: Path) -> None:
    export_drafter(drafter, tmp_path / "out", "sglang")
    raw = (tmp_path / "out/model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header.pop("__metadata__") == {"format": "pt"}
    expected = dict(OUTSIDE)
    expected |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER.items()}
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == expected
    assert header.pop("transfer_ready")["dtype"] == "BOOL"
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {key: config.get(key, "missing") for key in CONFIG} == CONFIG


def test_five_layers_make_74_tensors(tmp_path: Path) -> None:
    """The count of the published drafters: 3 + 11 a layer, 5 + 2 a layer of injection, codes."""
    config = replace(SMALL, num_layers=5, windows=(24,) * 5, causal=(True,) * 5)
    write_drafter(tmp_path / "d.gguf", config, PAIR, RECORD, weights(config), "f32")
    export_drafter(tmp_path / "d.gguf", tmp_path / "out", "vllm", dtype="f16")
    raw = (tmp_path / "out/model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert len(set(header) - {"__metadata__"}) == 74
    assert {header[n]["dtype"] for n in ("fc.weight", "norm.weight", "transfer_codes")} == {"F16"}


def test_the_commands(drafter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = export_drafter(drafter, out, "sglang")
    assert made.warnings == ()
    assert made.command == (
        f"python -m sglang.launch_server --model-path TARGET --speculative-algorithm DSPINE "
        f"--speculative-draft-model-path {out} --speculative-num-draft-tokens 5"
    )
    told = " ".join(made.notes)
    assert "0.5.22" in told and "assumed" in told and "A target" in told and "4 drafts" in told
    made = export_drafter(drafter, out, "vllm", overwrite=True)
    assert made.command.startswith("vllm serve TARGET --speculative-config '{")
    values = json.loads(made.command.split("'")[1])
    assert values == {"method": "dspine", "model": str(out), "num_speculative_tokens": 4}
    assert "0.33.0" in " ".join(made.notes)
    hybrid = tmp_path / "h.gguf"
    pair = replace(PAIR, architecture="qwen35")
    write_drafter(hybrid, SMALL, pair, RECORD, weights(), "f32")
    made = export_drafter(hybrid, out, "sglang", overwrite=True)
    assert made.command.endswith("--mamba-scheduler-strategy extra_buffer")


def test_a_folder_with_a_space_is_one_word_of_the_command(drafter: Path, tmp_path: Path) -> None:
    out = tmp_path / "it's mine"
    words = shlex.split(export_drafter(drafter, out, "sglang").command)
    assert words[words.index("--speculative-draft-model-path") + 1] == str(out)
    words = shlex.split(export_drafter(drafter, out, "vllm", overwrite=True).command)
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == str(out)


def test_relatives(tmp_path: Path) -> None:
    for config, kind in ((SMALL_DFLASH, "DFlash"), (SMALL_DFLASH2, "DFlash2")):
        path, out = tmp_path / f"{kind}.gguf", tmp_path / kind
        write_drafter(path, config, PAIR, TrainingRecord(), weights(config), "f32")
        made = export_drafter(path, out, "sglang")
        assert "--speculative-algorithm DFLASH " in made.command
        assert "0.5.23" in made.notes[2]
        made = export_drafter(path, out, "vllm", overwrite=True)
        assert json.loads(made.command.split("'")[1])["method"] == "dflash"
        written = json.loads((out / "config.json").read_text())
        assert written["architectures"] == [f"{kind}DraftModel"]
        assert "dspine_config" not in written
        raw = (out / "model.safetensors").read_bytes()
        names = set(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]))
        assert "transfer_ready" not in names
        # 11 a layer and 3, and for DFlash2 four convolution tensors a layer and 3 of the selector.
        extra = (4 * config.num_layers + 3) if kind == "DFlash2" else 0
        assert len(names - {"__metadata__"}) == 11 * config.num_layers + 3 + extra


def test_what_the_engines_cannot_do_is_told(tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    config = replace(with_reduced_head(size=8), hidden_size=32, head_dim=8)
    write_drafter(path, config, PAIR, RECORD, weights(config), "f32", range(8))
    reduced, hidden, windows = export_drafter(path, tmp_path / "out", "vllm").warnings
    assert "among 8 tokens" in reduced and "all 160" in reduced
    assert "hidden size 32 is not the target's 64" in hidden
    assert "V2 model runner" in windows
    for alike in ((None, None), (16, 16)):
        plain = replace(SMALL_DFLASH, windows=alike)
        write_drafter(path, plain, PAIR, RECORD, weights(plain), "f32", overwrite=True)
        assert export_drafter(path, tmp_path / "out", "vllm", overwrite=True).warnings == ()
    mixed = replace(SMALL, windows=(8, 16))
    write_drafter(tmp_path / "m.gguf", mixed, PAIR, RECORD, weights(), "f32")
    with pytest.raises(FileError, match="different windows"):
        export_drafter(tmp_path / "m.gguf", tmp_path / "none", "vllm")
    with pytest.raises(FileError, match=r"a name without \.gguf"):
        export_drafter(path, tmp_path / "out.gguf", "vllm")


def test_the_command_line(
    drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["export", "--to", "vllm", str(drafter), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("vllm serve TARGET")
    assert len(printed.out.splitlines()) == 1, "standard output is the command alone"
    assert "is assumed" in printed.err
    read = np.fromfile(tmp_path / "out/model.safetensors", np.uint8)
    assert read.size > 0
    assert run_cli(["export", str(drafter), str(tmp_path / "out")]) == 2
    assert "--force" in capsys.readouterr().err
