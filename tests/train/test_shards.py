"""Feature shards: rounding, round trip, foreign readers, damage, numbering, full disks."""

from __future__ import annotations

import errno
import json
import os
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dspine.errors import FileError, TrainingError
from dspine.files.dtypes import bf16_from_float32, float32_from_bf16
from dspine.train.shards import (
    Shard,
    ShardWriter,
    list_shards,
    read_info,
)

K = 64


def writer(folder: Path, shard_tokens: int = 10) -> ShardWriter:
    return ShardWriter(folder, taps=(1, 3), fingerprint="f00d", shard_tokens=shard_tokens)


def sequence(n: int, seed: int = 0, **changes: Any) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "sequence_id": f"s{seed}",
        "source": "maths",
        "temperature": 0.8,
        "tokens": random.integers(0, 100, n).astype(np.int32),
        "loss_mask": (np.arange(n) > 1).astype(np.uint8),
        "features": bf16_from_float32(random.normal(size=(n, 6)).astype(np.float32)),
        "teacher_ids": random.integers(0, 100, (n, K)).astype(np.int32),
        "teacher_probs": random.random((n, K)).astype(np.float16),
        **changes,
    }


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (0.0, 0x0000),
        (1.0, 0x3F80),
        (-2.5, 0xC020),
        (1 + 2**-8, 0x3F80),  # a tie goes to the even neighbour, here down
        (1 + 3 * 2**-8, 0x3F82),  # and here up
        (1 + 2**-8 + 2**-20, 0x3F81),  # just above a tie
        (24869.0, 0x46C2),  # a massive activation
    ],
)
def test_rounding_to_bfloat16(value: float, bits: int) -> None:
    assert bf16_from_float32(np.array([value], dtype=np.float32))[0] == bits


def test_rounding_agrees_with_torch_and_comes_back() -> None:
    values = np.random.default_rng(1).normal(scale=100, size=4096).astype(np.float32)
    bits = bf16_from_float32(values)
    rounded = torch.from_numpy(values).to(torch.bfloat16)
    assert np.array_equal(float32_from_bf16(bits), rounded.to(torch.float32).numpy())


def test_a_shard_comes_back_as_it_was_written(tmp_path: Path) -> None:
    out = writer(tmp_path)
    first, second = sequence(4, seed=1), sequence(7, seed=2, temperature=0.0, source="code")
    assert out.add(**first) is None
    path = out.add(**second)
    assert path == tmp_path / "shard-00000.safetensors"
    shard = Shard.read(path)
    assert (shard.num_tokens, shard.num_sequences, shard.num_labels) == (11, 2, 2 + 5)
    assert shard.info.taps == (1, 3)
    assert shard.info.fingerprint == "f00d"
    assert shard.info.ids == ("s1", "s2")
    assert shard.info.sources == ("maths", "code")
    assert shard.info.temperatures == (0.8, 0.0)
    assert read_info(path).num_tokens == 11
    for index, expected in enumerate((first, second)):
        rows = shard.sequence(index)
        for name in ("tokens", "loss_mask", "features", "teacher_ids", "teacher_probs"):
            assert np.array_equal(getattr(shard, name)[rows], expected[name]), name
    with pytest.raises(IndexError):
        shard.sequence(2)


def test_the_safetensors_library_reads_the_same(tmp_path: Path) -> None:
    out = writer(tmp_path)
    parts = sequence(12)
    path = out.add(**parts)
    assert path is not None
    loaded = load_file(path)
    assert loaded["features"].dtype == torch.bfloat16
    assert np.array_equal(loaded["tokens"].numpy(), parts["tokens"])
    assert loaded["sequence_offsets"].tolist() == [0, 12]
    assert np.array_equal(loaded["teacher_probs"].numpy(), parts["teacher_probs"])
    assert np.array_equal(
        loaded["features"].to(torch.float32).numpy(), float32_from_bf16(parts["features"])
    )
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["taps"]) == [1, 3]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(Shard.read(path).features_tensor(), loaded["features"])


def test_numbers_go_on_and_leftovers_of_a_kill_are_removed(tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.add(**sequence(10))
    killed = tmp_path / ".shard-00001.safetensors.0badcafe.partial"
    killed.write_bytes(b"half a shard")
    assert [p.name for p in list_shards(tmp_path)] == ["shard-00000.safetensors"]
    second = writer(tmp_path)
    assert not killed.exists()
    second.add(**sequence(3, seed=3))
    path = second.flush()
    assert path is not None
    assert path.name == "shard-00001.safetensors"
    assert second.flush() is None
    assert len(list_shards(tmp_path)) == 2
    assert list_shards(tmp_path / "absent") == []


def test_arrays_of_different_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="equally many rows"):
        writer(tmp_path).add(**sequence(4, loss_mask=np.ones(3, np.uint8)))


def test_a_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(TrainingError, match="cannot be used for shards"):
        writer(tmp_path / "taken")


def test_a_full_disk_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = writer(tmp_path)
    kept = out.add(**sequence(10))
    assert kept is not None
    before = kept.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(TrainingError, match=r"disk is full.*the shards written before"):
            out.add(**sequence(10, seed=1))
    assert [p.name for p in tmp_path.iterdir()] == [kept.name]
    assert kept.read_bytes() == before
    # What could not be written is still pending, so making room is enough.
    assert out.flush() == tmp_path / "shard-00001.safetensors"
    assert Shard.read(tmp_path / "shard-00001.safetensors").num_tokens == 10


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewrite(path: Path, header: dict[str, Any], body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


@pytest.fixture
def shard_path(tmp_path: Path) -> Path:
    path = writer(tmp_path).add(**sequence(12))
    assert path is not None
    return path


def test_a_cut_off_shard_is_refused(shard_path: Path) -> None:
    data = shard_path.read_bytes()
    for size in (0, 5, 40, len(data) // 2, len(data) - 1):
        shard_path.write_bytes(data[:size])
        with pytest.raises(FileError, match=str(shard_path)):
            Shard.read(shard_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["__metadata__"].update(format="other"), "not a feature shard"),
        (lambda h: h["__metadata__"].pop("taps"), "damaged shard metadata"),
        (lambda h: h["__metadata__"].update(ids='["only", "two"]'), "1 sequences but 2 ids"),
        (lambda h: h.pop("features"), "tensors overlap or leave a gap"),
        (lambda h: h["features"].update(dtype="F16"), "column 'features' is F16"),
        (lambda h: h.update(other=h.pop("teacher_ids")), "no column 'teacher_ids'"),
        (lambda h: h["tokens"].update(shape=[11]), "tokens has shape"),
        (lambda h: h["tokens"].update(shape=[4, 3]), "with 1 dimensions"),
        (lambda h: h["tokens"].update(shape=[-12]), "shape or place of tensor tokens"),
    ],
)
def test_damage_is_named(shard_path: Path, change: Any, message: str) -> None:
    header, body = header_of(shard_path)
    change(header)
    rewrite(shard_path, header, body)
    with pytest.raises(FileError, match=message):
        Shard.read(shard_path)


@pytest.mark.parametrize("offsets", [[0, 11], [1, 12], [0, 13]])
def test_offsets_must_cover_the_tokens(shard_path: Path, offsets: list[int]) -> None:
    header, body = header_of(shard_path)
    begin, end = header["sequence_offsets"]["data_offsets"]
    body = body[:begin] + np.array(offsets, dtype="<i8").tobytes() + body[end:]
    rewrite(shard_path, header, body)
    with pytest.raises(FileError, match="sequence offsets"):
        Shard.read(shard_path)


def test_a_missing_shard_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        Shard.read(tmp_path / "shard-00000.safetensors")
