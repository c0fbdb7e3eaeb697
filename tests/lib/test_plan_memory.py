"""The memory plan against the library: packed weights, the state, the default pair's process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plan_memory import cases, measured, predicted

from dspine.default_pair import default_target
from dspine.files.gguf_file import read_header
from dspine.llama.batch import Batch
from dspine.llama.context import Context
from dspine.llama.model import Model
from dspine.plan.from_file import read_geometry
from dspine.plan.memory import Setup, plan_memory
from dspine.plan.packing import packed_bytes
from tests.support.tiny_models import tiny_qwen35

NEAR = 0.05
PACK = """
import json
from dspine.ggml import Backend, WeightStore, kernels
from dspine.llama.library import find_library
find_library()
found, plug_in = [], kernels.installed()
if plug_in is not None:
    with Backend() as backend:
        for name in ("q4_0", "q4_1", "q5_0", "q8_0", "q4_k", "q5_k", "q6_k", "f16", "bf16"):
            for outputs in (16, 50):
                store = WeightStore(backend, buffer_type=plug_in.buffer_type)
                store.declare("w", name, (512, outputs))
                store.allocate()
                found.append((name, outputs, store.byte_size))
                store.close()
print(json.dumps(found))
"""
"""Prints what the kernels take for matrices of 512 inputs: they are plugged in once a process."""


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_the_default_pairs_process_within_five_percent(
    kernels: str, users_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPINE_CACHE_DIR", str(users_cache))
    monkeypatch.setenv("DSPINE_KERNELS", kernels)
    case = cases(["default pair"])[0]
    peak, found = measured(case, 1)
    assert predicted(case, found)["peak_mib"] == pytest.approx(peak, rel=NEAR)


def test_packed_sizes_are_those_of_the_kernels(users_cache: Path) -> None:
    environment = {**os.environ, "DSPINE_CACHE_DIR": str(users_cache)}
    done = subprocess.run(
        [sys.executable, "-c", PACK], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    if not found:
        pytest.skip("there are no CPU kernels for this processor")
    for type_name, outputs, size in found:
        expected = packed_bytes(type_name, (512, outputs))
        # Buffers end a little after what lies in them.
        assert expected is not None and expected <= size <= expected + 64, type_name


def test_the_state_of_a_hybrid_target_is_that_of_the_library(tmp_path: Path) -> None:
    path = tiny_qwen35(tmp_path / "m.gguf")
    with Model.load(path) as model, Context(model, n_ctx=256) as context:
        batch = Batch(1)
        batch.add(5, 0)
        context.decode(batch)
        copy = context.state.bytes_per_copy(0)
    # A copy has a few bytes that say what it is.
    assert read_geometry(path).state_bytes == pytest.approx(copy, rel=0.05)


def test_weights_of_a_file_are_its_tensors() -> None:
    path = default_target()
    target = read_geometry(path)
    assert target.weight_bytes == sum(t.n_bytes for t in read_header(path).tensors.values())
    assert target.is_tied
    plan = plan_memory(target, None, Setup("plain", kernels="ggml"), 4096)
    cache = next(item.n_bytes for item in plan.items if item.label == "keys and values")
    assert cache == 30 * 2 * 3 * 64 * 2 * 4096
