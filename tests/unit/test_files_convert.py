"""Folder to GGUF and back: nothing changes on the way, and little memory is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspine.cli.main import run_cli
from dspine.errors import FileError
from dspine.files.checkpoint import read_checkpoint, write_checkpoint
from dspine.files.convert import convert_checkpoint
from dspine.files.drafter_file import read_drafter, write_drafter
from dspine.files.schema import DrafterConfig, DSpineConfig, TrainingRecord, tensor_specs
from tests.support.drafter_files import (
    PAIR,
    RECORD,
    SMALL,
    SMALL_DFLASH,
    SMALL_DFLASH2,
    weights,
    with_reduced_head,
)

FLOATS = [("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16")]


def test_folder_to_gguf_to_folder_to_gguf(tmp_path: Path) -> None:
    for name, dtype in FLOATS:
        first, gguf, second, again = (
            tmp_path / f"{name}-{part}" for part in ("a", "b.gguf", "c", "d.gguf")
        )
        config, vocab = with_reduced_head(size=5), [9, 3, 4, 5, 6]
        given = weights(config, dtype)
        write_checkpoint(first, config, PAIR, RECORD, given, vocab)
        assert convert_checkpoint(first, gguf, dtype=name) == []
        assert convert_checkpoint(gguf, second) == []
        assert convert_checkpoint(second, again, dtype=name) == []
        for file in ("config.json", "dspine.json", "model.safetensors"):
            assert (second / file).read_bytes() == (first / file).read_bytes(), f"{name} {file}"
        assert again.read_bytes() == gguf.read_bytes()
        read = read_checkpoint(second)
        for torch_name, array in given.items():
            assert read.tensors[torch_name].tobytes() == array.tobytes()


def test_vectors_that_need_32_bits_keep_them(tmp_path: Path) -> None:
    """A GGUF has vectors as f32: only those that lose nothing take the type of the matrices."""
    for name, dtype in FLOATS[1:]:
        given: dict[str, Any] = dict(weights(dtype=dtype))
        given["norm.weight"] = np.full(64, 1 + 2**-20, np.float32)
        gguf, folder = tmp_path / f"{name}.gguf", tmp_path / name
        write_drafter(gguf, SMALL, PAIR, RECORD, given, name)
        convert_checkpoint(gguf, folder)
        read = read_checkpoint(folder).tensors
        assert read["norm.weight"].dtype == np.float32
        assert read["hidden_norm.weight"].dtype == read["fc.weight"].dtype
        convert_checkpoint(folder, tmp_path / f"{name}-again.gguf", dtype=name)
        assert (tmp_path / f"{name}-again.gguf").read_bytes() == gguf.read_bytes()
    big = dict(weights(dtype="float16"))
    big["norm.weight"] = np.full(64, 1e6, np.float32)
    write_drafter(tmp_path / "big.gguf", SMALL, PAIR, RECORD, big, "f16")
    convert_checkpoint(tmp_path / "big.gguf", tmp_path / "big")
    assert read_checkpoint(tmp_path / "big").tensors["norm.weight"].dtype == np.float32


def test_a_dtype_may_be_asked_for(tmp_path: Path) -> None:
    write_drafter(tmp_path / "d.gguf", SMALL, PAIR, RECORD, weights(), "f32")
    convert_checkpoint(tmp_path / "d.gguf", tmp_path / "half", dtype="f16")
    read = read_checkpoint(tmp_path / "half").tensors
    for name, array in weights().items():
        assert (read[name] == array.astype(np.float16)).all()
    with pytest.raises(FileError, match=r"checkpoint folder.*a name that ends in \.gguf"):
        convert_checkpoint(tmp_path / "d.gguf", tmp_path / "no", dtype="q8_0")
    assert not (tmp_path / "no").exists()
    # From GGUF to GGUF as well, and with another flag.
    convert_checkpoint(tmp_path / "d.gguf", tmp_path / "e.gguf", dtype="bf16", thinking=False)
    after = read_drafter(tmp_path / "e.gguf")
    assert (after.matrix_type, after.pair) == ("bf16", replace(PAIR, thinking=False))


def test_a_quantised_drafter(tmp_path: Path) -> None:
    write_drafter(tmp_path / "q.gguf", SMALL, PAIR, RECORD, weights(), "q8_0")
    (told,) = convert_checkpoint(tmp_path / "q.gguf", tmp_path / "folder", dtype="f32")
    assert "q.gguf is quantised (q8_0): the folder holds its values as f32" in told
    source, read = read_drafter(tmp_path / "q.gguf"), read_checkpoint(tmp_path / "folder")
    for name, array in source.arrays().items():
        values = array.astype(np.float32) if array.dtype == np.float16 else array
        assert read.tensors[name].tobytes() == values.tobytes()
    (told,) = convert_checkpoint(tmp_path / "q.gguf", tmp_path / "short")
    assert "as bf16" in told
    assert read_checkpoint(tmp_path / "short").tensors["fc.weight"].dtype == np.uint16
    with pytest.raises(FileError, match=r"quantised already \(q8_0\).*dspine quantize"):
        convert_checkpoint(tmp_path / "q.gguf", tmp_path / "r.gguf", dtype="f16")
    # Without a type the matrices stay as they are.
    assert convert_checkpoint(tmp_path / "q.gguf", tmp_path / "same.gguf") == []
    assert (tmp_path / "same.gguf").read_bytes() == (tmp_path / "q.gguf").read_bytes()


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    folder, gguf = tmp_path / "a", tmp_path / "d.gguf"
    write_checkpoint(folder, SMALL, PAIR, RECORD, weights())
    with pytest.raises(FileError, match="is what is read"):
        convert_checkpoint(folder, folder, overwrite=True)
    write_drafter(gguf, SMALL, PAIR, RECORD, weights(seed=8), "f32")
    with pytest.raises(FileError, match="exists already"):
        convert_checkpoint(gguf, folder)
    damaged: dict[str, Any] = dict(weights(seed=8))
    damaged["fc.weight"] = damaged["fc.weight"] * np.float32(1e6)
    write_drafter(tmp_path / "large.gguf", SMALL, PAIR, RECORD, damaged, "f32")
    with pytest.raises(FileError, match="too large for f16"):
        convert_checkpoint(tmp_path / "large.gguf", folder, dtype="f16", overwrite=True)
    assert (read_checkpoint(folder).tensors["fc.weight"] == weights()["fc.weight"]).all()
    convert_checkpoint(gguf, folder, overwrite=True)
    assert (read_checkpoint(folder).tensors["fc.weight"] == weights(seed=8)["fc.weight"]).all()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_drafter(tmp_path / "d.gguf", SMALL, PAIR, RECORD, weights(), "f16")
    assert run_cli(["convert", str(tmp_path / "d.gguf"), str(tmp_path / "out")]) == 0
    assert "out: " in capsys.readouterr().out
    assert run_cli(["convert", str(tmp_path / "out"), str(tmp_path / "e.gguf")]) == 0
    assert read_drafter(tmp_path / "e.gguf").matrix_type == "q8_0"
    assert run_cli(["convert", str(tmp_path / "out"), str(tmp_path / "e.gguf")]) == 2
    assert "--force" in capsys.readouterr().err


# A child, because the peak of this process knows no way down.
CHILD = """
import json, resource, sys
from pathlib import Path
import numpy
import dspine.files.convert as c
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
c.convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), dtype=sys.argv[3])
print(json.dumps([before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""
WIDE = DSpineConfig(
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    vocab_size=65536,
    target_hidden_size=1024,
    block_size=4,
    taps=(1, 3, 5),
    mask_token_id=0,
    windows=(None,) * 3,
    causal=(True,) * 3,
    transfer_rank=1024,
    message_size=256,
)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts mapped pages as Linux does")
def test_memory_does_not_grow_with_the_drafter(tmp_path: Path) -> None:
    """250 MB of bf16 pass through less than 160 MB, both ways."""
    pair = replace(PAIR, hidden_size=1024, vocab_size=65536)
    record = replace(RECORD, acceptance_curve=(0.5, 0.4, 0.3))
    block = np.random.default_rng(1).integers(0x3C00, 0x3F00, 1 << 20).astype(np.uint16)
    given = {
        s.torch_name: np.resize(block, int(np.prod(s.shape))).reshape(s.shape)
        for s in tensor_specs(WIDE)
    }
    write_checkpoint(tmp_path / "a", WIDE, pair, record, given)
    total = (tmp_path / "a/model.safetensors").stat().st_size
    assert total > 220e6
    for source, output in (("a", "b.gguf"), ("b.gguf", "c")):
        command = [sys.executable, "-c", CHILD, str(tmp_path / source), str(tmp_path / output)]
        done = subprocess.run([*command, "bf16"], capture_output=True, text=True, check=True)
        before, peak = json.loads(done.stdout)
        assert (peak - before) * 1024 < 160e6, f"{source} to {output}: {peak - before} KiB more"


@pytest.mark.parametrize("config", [SMALL_DFLASH, SMALL_DFLASH2], ids=["dflash", "dflash2"])
def test_relatives_go_both_ways(tmp_path: Path, config: DrafterConfig) -> None:
    given = weights(config, "bfloat16")
    record = TrainingRecord()
    write_checkpoint(tmp_path / "a", config, PAIR, record, given)
    told = convert_checkpoint(tmp_path / "a", tmp_path / "b.gguf", dtype="bf16")
    assert "no tokenizer" in told[-1] and "-m" in told[-1]
    assert convert_checkpoint(tmp_path / "b.gguf", tmp_path / "c") == []
    for file in ("config.json", "dspine.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "c" / file).read_bytes(), file
    convert_checkpoint(tmp_path / "c", tmp_path / "d.gguf", dtype="bf16")
    assert (tmp_path / "d.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
