"""What dspine would do with a file, and drafters in layouts of other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspine.cli.main import run_cli
from dspine.engine.outlook import target_outlook
from dspine.files.checkpoint import write_checkpoint
from dspine.files.drafter_file import write_drafter
from dspine.files.foreign import tensor_table
from dspine.files.groups import by_group, group_of
from dspine.files.inspect import inspect_path
from dspine.files.safetensors_file import read_safetensors, write_safetensors
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


def facts_of(path: Path) -> Any:
    return json.loads(json.dumps(inspect_path(path)))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("blk.3.attn_q.weight", "attention"),
        ("layers.3.self_attn.q_norm.weight", "norms"),
        ("blk.0.ffn_gate_exps.weight", "experts"),
        ("blk.0.ffn_down.weight", "feed-forward"),
        ("blk.0.ssm_conv1d.weight", "recurrent"),
        ("blk.0.inj_write.weight", "injection"),
        ("injection.readouts.0.weight", "injection"),
        ("transfer_codes", "transfer codes"),
        ("selector_hidden.weight", "selector"),
        ("blk.0.attn_conv_base", "convolutions"),
        ("fc.weight", "taps"),
        ("d2t", "draft vocabulary"),
        ("output.weight", "head"),
        ("output_norm.weight", "norms"),
        ("something", "other"),
    ],
)
def test_parts_of_a_model(name: str, group: str) -> None:
    assert group_of(name) == group


def test_sums_by_part() -> None:
    entries = [
        ("blk.0.attn_q.weight", "Q4_K", 256, 144),
        ("blk.0.attn_v.weight", "Q6_K", 256, 210),
        ("blk.1.attn_q.weight", "Q4_K", 256, 144),
        ("output_norm.weight", "F32", 8, 32),
    ]
    assert by_group(entries) == {
        "attention": {"bytes": 498, "parameters": 768, "types": "Q4_K 2, Q6_K 1"},
        "norms": {"bytes": 32, "parameters": 8, "types": "F32 1"},
    }


def test_a_drafter_says_how_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "d.gguf"
    write_drafter(path, SMALL, PAIR, RECORD, weights(), "q8_0")
    told = facts_of(path)["dspine"]
    assert told["runs"] is True
    assert told["flags"] == f"-m TARGET.gguf -md {path}"
    assert ["without a window" in w for w in told["warnings"]] == [True]
    parts = facts_of(path)["tensors"]["by_part"]
    assert parts["transfer codes"]["types"] == "Q8_0 1"
    assert parts["injection"]["types"] == "Q8_0 5, F16 2, F32 1"
    write_checkpoint(tmp_path / "folder", SMALL, PAIR, RECORD, weights())
    (tmp_path / "folder/dspine.json").unlink()
    told = facts_of(tmp_path / "folder")["dspine"]
    assert told["runs"] is False
    assert told["flags"].startswith("dspine convert -m TARGET.gguf ")
    assert "which target" in told["warnings"][0]
    assert "0.4 is taken" in told["warnings"][1]


def foreign_gguf(path: Path, architecture: str) -> Path:
    """A made-up third party's DSpine: other words for the same things."""
    names = {
        "fc.weight": (64, 64),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.code_bridge_readout.weight": (64, 32),
        "blk.0.inject_write.weight": (20, 64),
        "inj_msg.weight": (32, 20),
        "inj_recv_gate.weight": (32, 20),
        "inj_prev_gate.weight": (32, 20),
        "transfer_code.weight": (32, 160),
        "zzz": (7,),
    }
    entries, offset = [], 0
    for name, ne in names.items():
        entries.append(tensor_entry(name, ne, 0, offset))
        offset += -(-4 * int(np.prod(ne)) // 32) * 32
    pairs = [
        pair_text("general.architecture", architecture),
        pair_u32(f"{architecture}.block_count", 1),
        pair_u32(f"{architecture}.code_rank", 32),
        pair_u32(f"{architecture}.swa", 24),
    ]
    path.write_bytes(gguf_bytes(pairs, entries, bytes(offset)))
    return path


@pytest.mark.parametrize("architecture", ["dspine", "dflash", "qwen3-spine"])
def test_foreign_names_beside_ours(tmp_path: Path, architecture: str) -> None:
    facts = facts_of(foreign_gguf(tmp_path / "x.gguf", architecture))
    assert facts["role"] == "other"
    assert facts["dspine"]["runs"] is False
    table = facts["foreign"]["tensors"]
    closest = {row["name"]: row["closest"] for row in table["unknown"]}
    assert closest == {
        "blk.0.code_bridge_readout.weight": "blk.0.inj_readout.weight",
        "blk.0.inject_write.weight": "blk.0.inj_write.weight",
        "inj_msg.weight": "inj_message.weight",
        "inj_recv_gate.weight": "inj_receiver_gate.weight",
        "inj_prev_gate.weight": "inj_predecessor_gate.weight",
        "transfer_code.weight": "transfer_codes.weight",
        "zzz": "",
    }
    shapes = {row["name"]: row["shape"] for row in table["unknown"]}
    assert shapes["transfer_code.weight"] == [160, 32]
    assert "enc.output_norm.weight" in table["missing"]
    assert "fc.weight" not in table["missing"]
    keys = {row["name"]: row["closest"] for row in facts["foreign"]["keys"]["unknown"]}
    assert set(keys) == {f"{architecture}.code_rank", f"{architecture}.swa"}
    assert "block_size" in facts["foreign"]["keys"]["missing"]


def test_foreign_folders_and_single_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, PAIR, RECORD, weights())
    path = tmp_path / "model.safetensors"
    tensors: dict[str, Any] = dict(read_safetensors(path).tensors)
    tensors["injection.read.0.weight"] = tensors.pop("injection.readouts.0.weight")
    write_safetensors(path, tensors, overwrite=True)
    facts = facts_of(tmp_path)
    assert "1 missing (injection.readouts.0.weight)" in facts["dspine"]["why"]
    (row,) = facts["foreign"]["tensors"]["unknown"]
    assert row == {
        "name": "injection.read.0.weight",
        "shape": [32, 64],
        "closest": "injection.readouts.0.weight",
    }
    assert facts["foreign"]["tensors"]["missing"] == ["injection.readouts.0.weight"]
    alone = facts_of(path)["foreign"]["tensors"]["unknown"]
    assert [r["name"] for r in alone] == ["injection.read.0.weight"]


def test_our_own_names_are_complete() -> None:
    for name in ("torch_name", "gguf_name"):
        from dspine.files.schema import tensor_specs

        found = {getattr(s, name): s.shape for s in tensor_specs(SMALL)}
        assert tensor_table(found) == {"unknown": [], "missing": []}


def test_the_outlook_of_targets() -> None:
    sizes = {"Q4_K": 600, "Q6_K": 200, "Q3_K": 200, "F32": 5000}
    told = target_outlook("qwen35", is_recurrent=True, layers=64, bytes_by_type=sizes)
    assert told["rollback"] == "checkpoint"
    assert told["rollback_choices"] == ["checkpoint", "snapshots"]
    assert str(told["taps"]).startswith("layers 0 to 62, read directly")
    assert told[
        "cpu_kernels"
    ] == "80% of the matrices' bytes; Q3_K by ggml, where several rows " + ("cost more")
    told = target_outlook("olmo", is_recurrent=False, layers=16, bytes_by_type={"Q4_0": 1})
    assert (told["rollback"], told["cpu_kernels"]) == ("trim", "100% of the matrices' bytes")
    assert "callback" in str(told["taps"]) and "directly" not in str(told["taps"])
    told = target_outlook("deepseek4", is_recurrent=False, layers=4, bytes_by_type={})
    assert told["rollback"] == "snapshots"


def test_the_command_shows_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = foreign_gguf(tmp_path / "x.gguf", "dspine")
    assert run_cli(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.strip().startswith("inj_msg.weight"))
    assert row.split() == ["inj_msg.weight", "20,", "32", "inj_message.weight"]
    assert any(line.split() == ["by_part", "bytes", "parameters", "types"] for line in lines)
    assert run_cli(["inspect", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["dspine"]["runs"] is False
