"""Sketches of a target: what is recorded, and what the comparison makes of changed weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dspine.errors import FileError
from dspine.files.checkpoint import read_checkpoint, write_checkpoint
from dspine.files.convert import convert_checkpoint
from dspine.files.drafter_file import read_drafter, write_drafter
from dspine.files.dtypes import encode
from dspine.files.gguf_file import GgufFile
from dspine.files.gguf_writer import TensorToWrite, WritableValue, write_gguf
from dspine.files.inspect import inspect_path
from dspine.files.pairing import check_pair, describe_target
from dspine.files.schema import DrafterConfig, Pair, Sketch
from dspine.files.sketch import Likeness, check_sketch, compare, read_sketch
from dspine.ggml.types import type_by_name
from tests.support.drafter_files import PAIR, RECORD, SMALL, SMALL_DFLASH, weights

Arrays = Mapping[str, npt.NDArray[np.float32]]
HIDDEN, LAYERS = 64, 8


def random_weights(seed: int = 1) -> dict[str, npt.NDArray[np.float32]]:
    """A target of the shape that PAIR names; only what sketches look at."""
    rng = np.random.default_rng(seed)
    made = {"token_embd.weight": rng.standard_normal((160, HIDDEN)).astype(np.float32)}
    for layer in range(LAYERS):
        for part, rows in (("attn_q", HIDDEN), ("attn_v", 32), ("ffn_down", HIDDEN)):
            matrix = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
            made[f"blk.{layer}.{part}.weight"] = matrix
        for part in ("attn_norm", "ffn_norm"):
            norm = 1 + rng.standard_normal(HIDDEN) / 8
            made[f"blk.{layer}.{part}.weight"] = norm.astype(np.float32)
    made["output_norm.weight"] = np.ones(HIDDEN, np.float32)
    return made


def target(path: Path, arrays: Arrays, kind: str = "f16") -> Path:
    """A target's file with matrices of that type."""
    metadata: dict[str, WritableValue] = {
        "general.architecture": "llama",
        "llama.block_count": np.uint32(LAYERS),
        "llama.embedding_length": np.uint32(HIDDEN),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(160)],
    }
    tensors = []
    for name, array in arrays.items():
        into = kind if array.ndim == 2 else "f32"
        chunks = partial(encode, array, into, name)
        tensors.append(TensorToWrite(name, type_by_name(into), array.shape[::-1], chunks))
    write_gguf(path, metadata, tensors, overwrite=True)
    return path


def sketch_of(path: Path) -> Sketch:
    sketch = describe_target(path).sketch
    assert sketch is not None
    return sketch


def likeness(before: Path, after: Path) -> Likeness:
    difference = compare(sketch_of(before), sketch_of(after))
    assert difference is not None
    return difference.likeness


def test_what_is_recorded(tmp_path: Path) -> None:
    arrays = random_weights()
    path = target(tmp_path / "a.gguf", arrays, "f32")
    sketch = sketch_of(path)
    assert sketch.names[:2] == ("token_embd.weight", "blk.0.attn_norm.weight")
    assert {name.split(".")[1] for name in sketch.names[1:]} == {"0", "4", "7"}
    assert len(sketch.names) == 1 + 3 * 5
    # Rows 20, 60, 100 and 140 of 160: the middles of four equal parts.
    rows = np.frombuffer(sketch.piece(0), "<f4").reshape(4, HIDDEN)
    assert (rows == arrays["token_embd.weight"][[20, 60, 100, 140]]).all()
    norm = np.frombuffer(sketch.piece(1), "<f4")
    assert (norm == arrays["blk.0.attn_norm.weight"]).all()
    assert sum(sketch.lengths()) == len(sketch.data)
    assert check_sketch(sketch) is None


def test_of_long_rows_the_beginning(tmp_path: Path) -> None:
    wide = np.arange(8 * 1024, dtype=np.float32).reshape(8, 1024)
    write_gguf(
        tmp_path / "w.gguf",
        {"general.architecture": "llama"},
        [
            TensorToWrite(
                "token_embd.weight",
                type_by_name("f32"),
                (1024, 8),
                partial(encode, wide, "f32", "wide"),
            )
        ],
    )
    sketch = read_sketch(GgufFile(tmp_path / "w.gguf"), 2)
    assert sketch is not None
    assert sketch.sizes == (1024,)
    assert (np.frombuffer(sketch.data, "<f4").reshape(4, 256) == wide[[1, 3, 5, 7], :256]).all()
    write_gguf(tmp_path / "none.gguf", {"general.architecture": "llama"}, [])
    assert read_sketch(GgufFile(tmp_path / "none.gguf"), 2) is None


def test_a_split_model_has_the_sketch_of_the_whole(tmp_path: Path) -> None:
    arrays = random_weights()
    whole = sketch_of(target(tmp_path / "whole.gguf", arrays))
    parts = {name: array for name, array in arrays.items() if "blk.7" in name}
    first = {name: array for name, array in arrays.items() if "blk.7" not in name}
    target(tmp_path / "m-00002-of-00002.gguf", parts)
    assert sketch_of(target(tmp_path / "m-00001-of-00002.gguf", first)) == whole


def test_the_same_weights_other_types_and_other_weights(tmp_path: Path) -> None:
    arrays = random_weights()
    half = target(tmp_path / "half.gguf", arrays)
    assert likeness(half, target(tmp_path / "again.gguf", arrays)) is Likeness.SAME
    byte = target(tmp_path / "byte.gguf", arrays, "q8_0")
    assert likeness(half, byte) is Likeness.QUANTISED
    assert likeness(byte, half) is Likeness.QUANTISED
    other = target(tmp_path / "other.gguf", random_weights(seed=2), "q8_0")
    assert likeness(half, other) is Likeness.OTHER


@pytest.mark.parametrize(
    ("size", "expected"), [(0.002, Likeness.QUANTISED), (0.02, Likeness.CHANGED)]
)
def test_a_merged_change_of_one_matrix(tmp_path: Path, size: float, expected: Likeness) -> None:
    arrays = random_weights()
    rng = np.random.default_rng(5)
    merged = dict(arrays)
    change = rng.standard_normal((HIDDEN, 4)) @ rng.standard_normal((4, HIDDEN))
    matrix = arrays["blk.4.attn_q.weight"]
    change *= size * np.linalg.norm(matrix) / np.linalg.norm(change)
    merged["blk.4.attn_q.weight"] = (matrix + change).astype(np.float32)
    before = target(tmp_path / "before.gguf", arrays, "q8_0")
    assert likeness(before, target(tmp_path / "after.gguf", merged, "q8_0")) is expected


def test_a_norm_that_moved_is_never_a_quantisation(tmp_path: Path) -> None:
    arrays = random_weights()
    tuned = dict(arrays)
    tuned["blk.0.ffn_norm.weight"] = arrays["blk.0.ffn_norm.weight"].copy()
    tuned["blk.0.ffn_norm.weight"][3] *= np.float32(1.01)
    before = target(tmp_path / "before.gguf", arrays)
    assert likeness(before, target(tmp_path / "after.gguf", tuned, "q8_0")) is Likeness.CHANGED


def test_other_tensors_cannot_be_compared(tmp_path: Path) -> None:
    arrays = random_weights()
    fused = {name.replace("attn_q.", "attn_qkv."): array for name, array in arrays.items()}
    before = sketch_of(target(tmp_path / "a.gguf", arrays))
    assert compare(before, sketch_of(target(tmp_path / "b.gguf", fused))) is None
    odd = replace(before, types=("q1_0",), names=before.names[:1], sizes=(128,), data=bytes(18))
    assert compare(odd, replace(odd, data=bytes([1] * 18))) is None


def told(recorded: Pair, path: Path) -> str:
    return " ".join(check_pair(recorded, describe_target(path)))


def test_what_is_told(tmp_path: Path) -> None:
    arrays = random_weights()
    path = target(tmp_path / "Model-F16.gguf", arrays)
    recorded = describe_target(path)
    assert told(recorded, path) == ""
    quantised = told(recorded, target(tmp_path / "Model-Q8_0.gguf", arrays, "q8_0"))
    assert "this Model is another quantisation of the Model" in quantised
    assert "(Q8_0, not F16, weights 0.6% apart)" in quantised
    assert "expect nearly as many" in quantised
    near = dict(arrays)
    near["blk.4.attn_q.weight"] = arrays["blk.4.attn_q.weight"] * np.float32(1.0001)
    slightly = told(recorded, target(tmp_path / "Near.gguf", near))
    assert "Near differs a little from Model" in slightly
    moved = dict(arrays)
    moved["blk.4.attn_q.weight"] = arrays["blk.4.attn_q.weight"] * np.float32(1.1)
    tuned = told(recorded, target(tmp_path / "Tuned.gguf", moved))
    assert "Tuned is another version or a fine-tune of Model" in tuned
    assert "weights 9.1% apart: expect fewer" in tuned
    assert "--init-from" in tuned
    other = told(recorded, target(tmp_path / "Other.gguf", random_weights(2)))
    assert "is another model" in other
    fused = {name.replace("attn_q.", "attn_qkv."): array for name, array in arrays.items()}
    assert "cannot be compared" in told(recorded, target(tmp_path / "fused.gguf", fused))


def test_an_old_file_is_compared_by_its_one_tensor(tmp_path: Path) -> None:
    arrays = random_weights()
    recorded = replace(describe_target(target(tmp_path / "a.gguf", arrays)), sketch=None)
    moved = {**arrays, "blk.4.attn_q.weight": arrays["blk.4.attn_q.weight"] * np.float32(2)}
    assert told(recorded, target(tmp_path / "b.gguf", moved)) == ""
    moved["output_norm.weight"] = arrays["output_norm.weight"] * np.float32(2)
    assert "fine-tune" in told(recorded, target(tmp_path / "b.gguf", moved))


@pytest.mark.parametrize("config", [SMALL, SMALL_DFLASH], ids=lambda config: config.kind)
def test_convert_adds_a_sketch_and_changes_nothing_else(
    tmp_path: Path, config: DrafterConfig
) -> None:
    path = target(tmp_path / "a.gguf", random_weights())
    pair = describe_target(path)
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    write_drafter(old, config, replace(pair, sketch=None), RECORD, weights(config), target=path)
    assert convert_checkpoint(old, new, target=path) == []
    before, after = read_drafter(old), read_drafter(new)
    assert before.pair == replace(pair, sketch=None)
    assert (after.pair, after.record, after.config) == (pair, before.record, config)
    for name, tensor in before.tensors.items():
        assert after.tensors[name].type == tensor.type
        assert after.tensors[name].raw.tobytes() == tensor.raw.tobytes()
    added = {f"dspine.target.sketch.{part}" for part in ("names", "types", "sizes", "data")}
    found = dict(GgufFile(new).header.metadata)
    assert {key for key in found if "sketch" in key} == added
    for key, value in GgufFile(old).header.metadata.items():
        assert np.array_equal(found.pop(key), value), key
    assert set(found) == added
    write_checkpoint(tmp_path / "folder", config, pair, RECORD, weights(config))
    assert read_checkpoint(tmp_path / "folder").pair == pair


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": (64, 4)}, "84 bytes"),
        ({"types": ("q8_0", "f99")}, "types of weights"),
        ({"types": ("i32", "f32")}, "types of weights"),
        ({"sizes": (60, 3)}, "whole blocks"),
        ({"sizes": (64,)}, "as many names"),
        ({"data": b""}, "80 bytes"),
    ],
)
def test_a_damaged_sketch_is_refused(
    tmp_path: Path, change: dict[str, tuple[str, ...] | tuple[int, ...] | bytes], words: str
) -> None:
    assert PAIR.sketch is not None
    fields = {name: getattr(PAIR.sketch, name) for name in ("names", "types", "sizes", "data")}
    pair = replace(PAIR, sketch=Sketch(**{**fields, **change}))
    write_drafter(tmp_path / "d.gguf", SMALL, pair, RECORD, weights())
    with pytest.raises(FileError, match=words):
        read_drafter(tmp_path / "d.gguf")
    write_checkpoint(tmp_path / "folder", SMALL, pair, RECORD, weights())
    with pytest.raises(FileError, match=rf"pair.sketch is damaged.*{words}"):
        read_checkpoint(tmp_path / "folder")


def test_inspect_tells_of_the_sketch(tmp_path: Path) -> None:
    def inspected(pair: Pair) -> dict[str, Any]:
        path = tmp_path / "d.gguf"
        write_drafter(path, SMALL, pair, RECORD, weights(), overwrite=True)
        return dict(inspect_path(path))

    assert PAIR.sketch is not None
    assert inspected(PAIR)["pair"]["sketch"] == list(PAIR.sketch.names)
    old = inspected(replace(PAIR, sketch=None))
    assert old["pair"]["sketch"] is None
    assert any("no sketch of its target" in warning for warning in old["dspine"]["warnings"])
