"""Files that lie: whatever stands in a header, reading ends in a result or one sentence, and takes
no more memory than the file's size justifies.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspine.errors import FileError
from dspine.files.checkpoint import read_checkpoint, write_checkpoint
from dspine.files.drafter_file import write_drafter
from dspine.files.gguf_file import open_tensors, read_header
from dspine.files.inspect import inspect_path
from dspine.files.safetensors_file import read_safetensors
from dspine.files.schema import TrainingRecord
from tests.support.drafter_files import (
    PAIR,
    RECORD,
    SMALL,
    SMALL_DFLASH,
    SMALL_DFLASH2,
    gguf_bytes,
    text,
    weights,
)

BYTES_A_BYTE = 64
"""Objects of Python per byte of a header: an entry of 14 bytes becomes a dictionary's entry."""
FIXED_BYTES = 1 << 20
LONGEST_MESSAGE = 1200

quick = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
thorough = settings(
    max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck), database=None
)

# Counts and sizes: right, near the limits of each width, or anything.
EDGES = [0, 1, 2, 31, 32, 33, 255, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32]
EDGES += [1 << 40, 1 << 53, (1 << 62) + 3, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
COUNTS = st.sampled_from(EDGES) | st.integers(0, 40)
NAMES = (
    st.sampled_from([b"general.architecture", b"general.alignment", b"general.name", b"a", b"t"])
    | st.text(max_size=8).map(lambda t: t.encode("utf-8", "surrogatepass"))
    | st.binary(max_size=8)
    | st.sampled_from([b"x" * 60000, b"x" * 70000])
)


@st.composite
def strings(draw: st.DrawFn) -> bytes:
    """A string whose length may lie."""
    raw = draw(NAMES | st.sampled_from([b"llama", b"dspine", b"dflash", b"clip"]))
    length = draw(st.just(len(raw)) | COUNTS)
    return struct.pack("<Q", length) + raw


@st.composite
def values(draw: st.DrawFn) -> bytes:
    """A type and a value, of that type or not."""
    kind = draw(st.integers(0, 14) | st.sampled_from([99, 1 << 31]))
    if kind == 8:
        body = draw(strings())
    elif kind == 9:
        depth = draw(st.integers(0, 3) | st.just(300))
        # Arrays in arrays, each claiming some entries.
        body = struct.pack("<IQ", 9, draw(COUNTS)) * depth
        inner = draw(st.integers(0, 13))
        entries = [draw(strings()) for _ in range(draw(st.integers(0, 3)))] if inner == 8 else []
        count = draw(st.just(len(entries)) | COUNTS)
        body += struct.pack("<IQ", inner, count) + b"".join(entries)
        body += draw(st.binary(max_size=24))
    else:
        body = draw(st.binary(min_size=8, max_size=8))[: draw(st.sampled_from([1, 2, 4, 8]))]
    return struct.pack("<I", kind) + body


@st.composite
def gguf_files(draw: st.DrawFn) -> bytes:
    """Header, keys, tensor list and data, each consistent or not with the others."""
    pairs = [draw(strings()) + draw(values()) for _ in range(draw(st.integers(0, 4)))]
    entries = []
    for _ in range(draw(st.integers(0, 4))):
        ne = draw(st.lists(COUNTS, max_size=5))
        dims = draw(st.just(len(ne)) | st.sampled_from([0, 4, 5, (1 << 32) - 1]))
        place = struct.pack("<IQ", draw(st.integers(0, 45)), draw(COUNTS))
        shape = b"".join(struct.pack("<Q", n) for n in ne)
        entries.append(draw(strings()) + struct.pack("<I", dims) + shape + place)
    right = st.just((len(entries), len(pairs)))
    data = gguf_bytes(
        pairs,
        entries,
        draw(st.binary(max_size=96)),
        version=draw(st.sampled_from([3, 3, 3, 2, 1, 0, 4, 1 << 24])),
        counts=draw(right | st.tuples(COUNTS, COUNTS)),
    )
    return data[: draw(st.just(len(data)) | st.integers(0, len(data)))]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | COUNTS | st.integers(-(1 << 70), -1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
SHAPES = st.lists(COUNTS, max_size=4) | JSON_VALUES
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "BF16", "BOOL", "I64", "F8", "x" * 9000])
        | JSON_VALUES,
        "shape": SHAPES | st.just([1] * 5000),
        "data_offsets": st.lists(COUNTS, min_size=2, max_size=2) | JSON_VALUES,
    },
)


@st.composite
def safetensors_files(draw: st.DrawFn) -> bytes:
    """A header of JSON, nearly JSON or nesting, with a length that may lie, and data."""
    names = st.text(max_size=4) | st.sampled_from(["__metadata__", "\ud800", "x" * 9000])
    table = draw(st.dictionaries(names, TENSORS | JSON_VALUES, max_size=4))
    raw = json.dumps(table).encode()
    raw = draw(
        st.just(raw)
        | st.just(raw[:-1] + b',"t":1,"t":2}')
        | st.binary(max_size=30)
        | st.sampled_from([b"[" * 100000, b'{"a":' * 100000, b"1" * 5000, b'{"a":NaN}'])
    )
    length = draw(st.just(len(raw)) | COUNTS)
    data = struct.pack("<Q", length) + raw + draw(st.binary(max_size=40))
    return data[: draw(st.just(len(data)) | st.integers(0, len(data)))]


def check(path: Path, data: bytes, read: Callable[[Path], object]) -> None:
    """Reading ends in a result or a sentence, in bounded memory."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        read(path)
    except FileError as error:
        message = str(error)
        assert message.isprintable()
        assert len(message) < LONGEST_MESSAGE + len(str(path))
        assert str(path) in message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < FIXED_BYTES + BYTES_A_BYTE * len(data)


def read_gguf(path: Path) -> None:
    """All tensors as they are stored; their types need no knowledge beyond sizes."""
    for tensor in open_tensors(path):
        assert tensor.raw_rows().size == tensor.raw.size


def inspect(path: Path) -> None:
    """What `dspine inspect --json` prints must be encodable."""
    json.dumps(inspect_path(path), ensure_ascii=False).encode("utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@quick
@given(data=gguf_files())
def test_gguf(folder: Path, data: bytes) -> None:
    check(folder / "f.gguf", data, read_gguf)
    check(folder / "f.gguf", data, inspect)


@quick
@given(data=safetensors_files())
def test_safetensors(folder: Path, data: bytes) -> None:
    check(folder / "f.safetensors", data, read_safetensors)
    check(folder / "f.safetensors", data, inspect)


@pytest.fixture(scope="module")
def drafter(folder: Path) -> bytes:
    config = replace(SMALL, num_layers=1, windows=(24,), causal=(True,), draft_vocab_size=16)
    path = folder / "good.gguf"
    write_drafter(path, config, PAIR, RECORD, weights(config), "f16", range(16))
    read_header(path)
    return path.read_bytes()


@quick
@given(st.data())
def test_drafters_with_one_wrong_key(folder: Path, drafter: bytes, data: st.DataObject) -> None:
    """A key's value is overwritten: with another type of the same length, or other bytes."""
    marker = text(data.draw(st.sampled_from(KEYS)))
    at = drafter.index(marker) + len(marker)
    changed = bytearray(drafter)
    if data.draw(st.booleans()):
        changed[at : at + 4] = struct.pack("<I", data.draw(st.integers(0, 13)))
    else:
        width = data.draw(st.sampled_from([1, 4, 8]))
        at += 4 + data.draw(st.sampled_from([0, 4, 8, 12]))
        changed[at : at + width] = data.draw(COUNTS).to_bytes(8, "little")[:width]
    check(folder / "d.gguf", bytes(changed), inspect)


CONFIG_VALUES = JSON_VALUES | st.sampled_from(
    [True, False, 0, 1, -1, 10**12, 1.5, "x", ["full_attention"], ["sliding_attention"], [1, 4]]
)


@pytest.fixture(scope="module")
def configs(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """A checkpoint folder of each kind, and its configuration."""
    made = []
    for name, config in (("spine", SMALL), ("flash", SMALL_DFLASH), ("flash2", SMALL_DFLASH2)):
        record = TrainingRecord()
        write_checkpoint(folder / name, config, PAIR, record, weights(config))
        made.append((folder / name, json.loads((folder / name / "config.json").read_text())))
    return made


@quick
@given(data=st.data())
def test_configurations(configs: list[tuple[Path, dict[str, Any]]], data: st.DataObject) -> None:
    """Keys are dropped, added and given other values: a result, or a sentence that is short."""
    path, values = data.draw(st.sampled_from(configs))
    edited = json.loads(json.dumps(values))
    for _ in range(data.draw(st.integers(1, 3))):
        tables = [edited] + [v for v in edited.values() if isinstance(v, dict)]
        table = data.draw(st.sampled_from(tables))
        key = data.draw(st.sampled_from([*table, "rope_parameters", "config", "new"]))
        if data.draw(st.booleans()):
            table.pop(key, None)
        else:
            table[key] = data.draw(CONFIG_VALUES)
    (path / "config.json").write_text(json.dumps(edited))
    for read in (read_checkpoint, inspect):
        said = sentence(path, read)
        assert said.isprintable()
        assert len(said) < LONGEST_MESSAGE + len(str(path))
        assert not said or str(path) in said


def sentence(path: Path, read: Callable[[Path], object]) -> str:
    """What the error says, empty where there is none."""
    try:
        read(path)
    except FileError as error:
        return str(error)
    return ""


KEYS = [
    "general.architecture",
    "general.name",
    "dspine.block_count",
    "dspine.embedding_length",
    "dspine.attention.head_count",
    "dspine.attention.head_count_kv",
    "dspine.attention.key_length",
    "dspine.attention.layer_norm_rms_epsilon",
    "dspine.attention.causal",
    "dspine.attention.sliding_window",
    "dspine.rope.freq_base",
    "dspine.block_size",
    "dspine.target_layers",
    "dspine.vocab_size",
    "dspine.transfer_rank",
    "dspine.top_k",
    "dspine.mask_token_id",
    "dspine.target.name",
    "dspine.target.thinking",
    "dspine.acceptance_curve",
    "dspine.training",
]


@pytest.mark.slow
def test_many_more(folder: Path, drafter: bytes) -> None:
    """The same, thoroughly: takes minutes and draws anew each time."""

    @thorough
    @given(data=st.data())
    def everything(data: st.DataObject) -> None:
        read: Any
        for path, make, read in (
            (folder / "s.gguf", gguf_files(), read_gguf),
            (folder / "s.safetensors", safetensors_files(), read_safetensors),
        ):
            made = data.draw(make)
            check(path, made, read)
            check(path, made, inspect)
        cut = data.draw(st.integers(0, len(drafter)))
        check(folder / "s.gguf", drafter[:cut], inspect)

    everything()


@pytest.mark.parametrize("shape", ["[0,4611686018427387904,4]", "[9223372036854775807,0]"])
def test_empty_tensors_with_huge_sides(folder: Path, shape: str) -> None:
    raw = f'{{"t":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}'.encode()
    check(folder / "e.safetensors", struct.pack("<Q", len(raw)) + raw, read_safetensors)
