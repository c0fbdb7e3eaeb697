"""Quantised drafters made by ggml itself: read back, run, and made in little memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from dspine.cli.main import run_cli
from dspine.files.drafter_file import read_drafter, write_drafter
from dspine.files.quantise import MIXES, fitting_type, quantise_drafter, wanted_type
from dspine.files.schema import tensor_specs
from dspine.llama.library import find_library
from tests.support.drafter_files import PAIR, RECORD, SMALL, weights

WIDE = replace(
    SMALL,
    hidden_size=256,
    intermediate_size=512,
    head_dim=64,
    target_hidden_size=256,
    transfer_rank=64,
    message_size=64,
)
"""Rows of 256 (K types fit), and of 64 (they do not)."""
PAIR_WIDE = replace(PAIR, hidden_size=256)
ERROR = {"q4_k": 0.1, "q5_k": 0.05, "q6_k": 0.025, "q5_0": 0.08, "q5_1": 0.05, "q8_0": 0.01}
"""Root mean square error over that of the values: above what normal random numbers give."""


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    find_library()


@pytest.mark.parametrize("name", MIXES)
def test_each_type_reads_back_close_and_as_planned(tmp_path: Path, name: str) -> None:
    source, output = tmp_path / "in.gguf", tmp_path / "out.gguf"
    given = weights(WIDE)
    write_drafter(source, WIDE, PAIR_WIDE, RECORD, given, "f32")
    quantise_drafter(source, output, name, threads=2)
    read = read_drafter(output)
    for spec in tensor_specs(WIDE):
        stored = read.tensors[spec.gguf_name]
        expected = fitting_type(wanted_type(spec, MIXES[name], 2), spec.shape[-1])
        assert stored.type.name == expected, spec.gguf_name
        values = np.asarray(given[spec.torch_name], np.float32)
        if expected in ERROR:
            kind = GGMLQuantizationType[expected.upper()]
            oracle = dequantize(np.array(stored.raw_rows()), kind).reshape(spec.shape)
            error = np.sqrt(np.mean((oracle - values) ** 2) / np.mean(values**2))
            assert 0 < error < ERROR[expected], (spec.gguf_name, expected)


def test_pieces_and_threads_do_not_change_a_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.gguf"
    write_drafter(source, WIDE, PAIR_WIDE, RECORD, weights(WIDE), "f16")
    quantise_drafter(source, tmp_path / "whole.gguf", "q5_k_m")
    monkeypatch.setattr("dspine.files.quantise.CHUNK_VALUES", 700)
    quantise_drafter(source, tmp_path / "parts.gguf", "q5_k_m", threads=3)
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "parts.gguf").read_bytes()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "in.gguf", tmp_path / "out.gguf"
    write_drafter(source, WIDE, PAIR_WIDE, RECORD, weights(WIDE), "f32")
    assert run_cli(["quantize", str(source), str(output), "--type", "Q6_K", "-t", "1"]) == 0
    assert read_drafter(output).tensors["fc.weight"].type.name == "q6_k"
    told = capsys.readouterr()
    assert f"{output}: " in told.out
    assert "q8_0 to f16" not in told.err
    assert run_cli(["quantize", str(source), str(output)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert run_cli(["quantize", str(output), str(tmp_path / "x.gguf")]) == 2
    assert "--allow-requantize" in capsys.readouterr().err


CHILD = """
import resource, sys
from pathlib import Path
from dspine.files.quantise import quantise_drafter
from dspine.llama.library import find_library
find_library()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantise_drafter(Path(sys.argv[1]), Path(sys.argv[2]), "q8_0")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_large_file_passes_through_little_memory(tmp_path: Path) -> None:
    source, output = tmp_path / "in.gguf", tmp_path / "out.gguf"
    config = replace(WIDE, vocab_size=1 << 20)
    pair = replace(PAIR_WIDE, vocab_size=1 << 20)
    given = dict(weights(replace(WIDE, vocab_size=160)))
    given["transfer_codes"] = np.broadcast_to(np.float16(0.125), (1 << 20, 64))
    write_drafter(source, config, pair, RECORD, given, "f16")
    assert source.stat().st_size > 130e6
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(output)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    grown = int(done.stdout) * 1024
    assert grown < 64e6, f"{grown / 1e6:.0f} MB for a file of {source.stat().st_size / 1e6:.0f} MB"
    assert read_drafter(output).tensors["transfer_codes.weight"].type.name == "q8_0"
