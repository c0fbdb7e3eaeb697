"""Safetensors: the safetensors package as oracle, and damage."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspine.errors import FileError
from dspine.files.safetensors_file import SafeTensor, read_safetensors, write_safetensors

oracle = pytest.importorskip("safetensors.numpy")


def test_the_safetensors_package_reads_ours(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    arrays: dict[str, Any] = {
        "ü.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "half": np.arange(3, dtype=np.float16),
        "ids": np.arange(4, dtype=np.int64),
        "flag": np.array(True),
        "empty": np.zeros((0, 4), np.float32),
        "strided": np.arange(8, dtype=np.int32)[::2],
    }
    write_safetensors(path, arrays, {"format": "pt"})
    read = oracle.load_file(path)
    assert set(read) == set(arrays)
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype
        assert read[name].shape == array.shape
        assert (read[name] == array).all()
    assert read_safetensors(path).metadata == {"format": "pt"}


def test_ours_reads_the_safetensors_package(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    oracle.save_file(
        {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([True, False])}, path
    )
    read = read_safetensors(path)
    assert (read.tensors["b"].dtype, read.tensors["b"].data.tolist()) == (
        "F32",
        [[0, 1, 2], [3, 4, 5]],
    )
    assert (read.tensors["a"].dtype, read.tensors["a"].data.tolist()) == ("BOOL", [True, False])
    assert not read.tensors["b"].data.flags.writeable


def test_bfloat16_is_tagged_and_keeps_its_bits(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    bits = np.array([0x3F80, 0xC000, 0x7FC1], np.uint16)
    write_safetensors(path, {"w": bits, "n": SafeTensor("U16", bits)})
    header = path.read_bytes()[8:]
    assert b'"w":{"dtype":"BF16"' in header
    read = read_safetensors(path).tensors
    assert (read["w"].dtype, read["n"].dtype) == ("BF16", "U16")
    assert read["w"].data.tobytes() == bits.tobytes()


def test_data_starts_at_a_multiple_of_eight(tmp_path: Path) -> None:
    for length in range(1, 10):
        path = tmp_path / f"{length}.safetensors"
        write_safetensors(path, {"n" * length: np.zeros(1)})
        assert struct.unpack("<Q", path.read_bytes()[:8])[0] % 8 == 0


def _file(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def _one(**changes: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


DAMAGE = [
    (b"", "empty"),
    (b"1234", "only 4 bytes"),
    (struct.pack("<Q", 1 << 60) + b"{}", "cut off"),
    (_file(b"nonsense"), "not valid JSON"),
    (_file(b"\xff\xff"), "not valid JSON"),
    (_file(b"[" * 50000), "not valid JSON"),
    (_file([1]), "not a table"),
    (_file({"__metadata__": {"a": 1}}), "table of texts"),
    (_file({"t": 5}), "not described"),
    (_file(_one(dtype="F8_E4M3"), bytes(8)), "F8_E4M3"),
    (_file(_one(dtype=[1]), bytes(8)), "not supported"),
    (_file(_one(shape=[-2]), bytes(8)), "whole numbers"),
    (_file(_one(shape=[2.0]), bytes(8)), "whole numbers"),
    (_file(_one(shape=None), bytes(8)), "whole numbers"),
    (_file(_one(data_offsets=[0]), bytes(8)), "whole numbers"),
    (_file(_one(shape=[3]), bytes(8)), "8 bytes"),
    (_file(_one(shape=[1 << 40, 1 << 40]), bytes(8)), "8 bytes"),
    (_file(_one(), bytes(7)), "cut off"),
    (_file(_one(), bytes(9)), "end at data byte 8 of 9"),
    (_file(_one(data_offsets=[4, 12]), bytes(12)), "overlap or leave a gap"),
    (_file(_one() | {"u": _one()["t"]}, bytes(8)), "overlap or leave a gap"),
    (_file(b'{"t":{},"t":{}}'), "twice"),
]


@pytest.mark.parametrize(
    ("data", "words"), DAMAGE, ids=[f"{i}-{d[1]}" for i, d in enumerate(DAMAGE)]
)
def test_damage_ends_in_one_sentence(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(FileError, match=words) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)


def test_what_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    for tensor, words in (
        (np.zeros(2, np.complex64), "complex64"),
        (SafeTensor("F32", np.zeros(2, np.float64)), "cannot be stored as F32"),
        (SafeTensor("F4", np.zeros(2, np.float64)), "cannot be stored as F4"),
    ):
        with pytest.raises(FileError, match=words):
            write_safetensors(path, {"t": tensor})
    with pytest.raises(FileError, match="no tensor can be called __metadata__"):
        write_safetensors(path, {"__metadata__": np.zeros(2, np.float32)})
    with pytest.raises(FileError, match="does not exist"):
        write_safetensors(tmp_path / "none" / "w.safetensors", {"t": np.zeros(1)})
    assert not list(tmp_path.iterdir())


GOOD = _file(_one() | {"u": {"dtype": "BOOL", "shape": [], "data_offsets": [8, 9]}}, bytes(9))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "fuzzed.safetensors"


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4),
    length=st.integers(0, len(GOOD)) | st.just(len(GOOD)),
)
def test_mutated_and_truncated_files_never_crash(
    scratch: Path, changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(GOOD)
    for position, value in changes:
        data[position] = value
    scratch.write_bytes(bytes(data[:length]))
    try:
        read = read_safetensors(scratch)
    except FileError:
        return
    assert sum(t.data.nbytes for t in read.tensors.values()) < len(GOOD)
