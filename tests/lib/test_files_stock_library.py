"""Our files and the real library: it refuses drafters, and agrees about targets and numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dspine.files.drafter_file import write_drafter
from dspine.files.dtypes import quantise_q8_0
from dspine.files.gguf_file import dequantised_tensor, open_tensors, raw_tensor
from dspine.files.inspect import inspect_path
from dspine.files.pairing import describe_target, vocab_hash
from tests.support.drafter_files import PAIR, RECORD, SMALL, weights

LOAD = """
import sys
from llama_cpp import llama_cpp as api
api.llama_backend_init()
model = api.llama_model_load_from_file(sys.argv[1].encode(), api.llama_model_default_params())
print("LOADED" if model else "REFUSED")
"""


def test_stock_llama_cpp_refuses_a_drafter_by_its_architecture(tmp_path: Path) -> None:
    """In a child, because the library writes its reason to the process's error stream."""
    path = tmp_path / "drafter.gguf"
    write_drafter(path, SMALL, PAIR, RECORD, weights(), "q8_0")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.strip() == "REFUSED"
    assert "unknown model architecture: 'dspine'" in done.stderr


def test_the_default_target_describes_itself(default_target: Path) -> None:
    pair = describe_target(default_target)
    assert (pair.architecture, pair.hidden_size) == ("llama", 576)
    assert (pair.num_layers, pair.vocab_size) == (30, 49152)
    facts = inspect_path(default_target)
    assert facts["role"] == "target"


def test_the_library_sees_the_same_vocabulary(default_target: Path) -> None:
    """The hash must not depend on whether token texts come from the file or from llama.cpp."""
    api = pytest.importorskip("llama_cpp.llama_cpp")
    parameters = api.llama_model_default_params()
    parameters.vocab_only = True
    model = api.llama_model_load_from_file(str(default_target).encode(), parameters)
    assert model
    try:
        vocab = api.llama_model_get_vocab(model)
        texts = [api.llama_vocab_get_text(vocab, i) for i in range(api.llama_vocab_n_tokens(vocab))]
        assert vocab_hash(texts) == describe_target(default_target).vocab_hash
    finally:
        api.llama_model_free(model)


def test_tensors_of_the_target_equal_the_gguf_package(default_target: Path) -> None:
    gguf_quants = pytest.importorskip("gguf.quants")
    gguf = pytest.importorskip("gguf")
    for name in ("token_embd.weight", "blk.3.attn_k.weight", "output_norm.weight"):
        stored = raw_tensor(default_target, name)
        rows = np.array([0, 7, 100]) if len(stored.ne) > 1 else None
        raw = stored.raw_rows() if rows is None else stored.raw_rows()[rows]
        kind = gguf.GGMLQuantizationType[stored.type.name.upper()]
        expected = gguf_quants.dequantize(raw.view("<f4") if kind == 0 else raw, kind)
        assert (stored.as_float32(rows) == expected.reshape(stored.as_float32(rows).shape)).all()
    key = dequantised_tensor(default_target, "blk.3.attn_k.weight")
    assert key.shape == (192, 576)
    assert open_tensors(default_target).header.tensors["blk.3.attn_k.weight"].type.name == "q4_1"


def test_q8_0_equals_ggml_byte_by_byte() -> None:
    from dspine.llama.library import find_library

    find_library()
    from dspine.ggml import quantise

    values = np.random.default_rng(5).normal(0, 2, (64, 96)).astype(np.float32)
    assert quantise(values, "q8_0").tobytes() == quantise_q8_0(values).tobytes()
