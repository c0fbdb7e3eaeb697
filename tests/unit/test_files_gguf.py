"""The GGUF reader and writer: the gguf package as oracle, and damage of every kind."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspine.errors import FileError
from dspine.files.gguf_file import (
    dequantised_tensor,
    is_gguf,
    open_tensors,
    raw_tensor,
    read_header,
    split_files,
)
from dspine.files.gguf_writer import TensorToWrite, write_gguf
from dspine.ggml.types import type_by_name
from tests.support.drafter_files import gguf_bytes, pair_text, pair_u32, tensor_entry, text


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """A file written by the gguf package with every kind of value."""
    path = tmp_path / "official.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("a.u32", 7)
    writer.add_int64("a.i64", -5)
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_string("a.text", "grüß dich")
    writer.add_array("a.texts", ["one", "", "drei"])
    writer.add_key_value("a.list", [3, 1, 2], GGUFValueType.ARRAY, GGUFValueType.UINT32)
    writer.add_array("a.flags", [True, False])
    writer.add_tensor("token_embd.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("half", np.arange(5, dtype=np.float16))
    quantised = np.arange(2 * 34, dtype=np.uint8).reshape(2, 34)
    writer.add_tensor("q", quantised, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_the_gguf_package_wrote(official: Path) -> None:
    header = read_header(official)
    meta = header.metadata
    assert (header.version, header.architecture) == (3, "llama")
    assert (meta["a.u32"], meta["a.i64"], meta["a.f32"], meta["a.f64"]) == (7, -5, 0.5, 0.1)
    assert meta["a.yes"] is True
    assert meta["a.text"] == "grüß dich"
    assert meta["a.texts"] == ("one", "", "drei")
    numbers, flags = meta["a.list"], meta["a.flags"]
    assert isinstance(numbers, np.ndarray)
    assert isinstance(flags, np.ndarray)
    assert (numbers.tolist(), str(numbers.dtype)) == ([3, 1, 2], "uint32")
    assert (flags.tolist(), flags.dtype.kind) == ([True, False], "b")
    embedding = header.tensors["token_embd.weight"]
    assert (embedding.type.name, embedding.ne, embedding.shape) == ("f32", (4, 3), (3, 4))
    assert dequantised_tensor(official, "token_embd.weight").tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert dequantised_tensor(official, "half").tolist() == [0, 1, 2, 3, 4]
    stored = raw_tensor(official, "q")
    assert (stored.type.name, stored.ne) == ("q8_0", (32, 2))
    assert stored.raw.tolist() == list(range(68))
    assert not stored.raw.flags.writeable


def test_chosen_rows_of_a_tensor(official: Path) -> None:
    tensor = open_tensors(official).tensor("token_embd.weight")
    assert tensor.as_float32(np.array([2, 0])).tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert tensor.as_float32(slice(1, 2)).tolist() == [[4, 5, 6, 7]]


def test_the_gguf_package_reads_what_we_write(tmp_path: Path) -> None:
    path = tmp_path / "ours.gguf"
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    flat = np.arange(9, dtype=np.float32)
    f32 = type_by_name("f32")
    seen: list[tuple[int, int]] = []
    write_gguf(
        path,
        {
            "general.architecture": "dspine",
            "x.count": np.uint32(4),
            "x.theta": np.float32(0.25),
            "x.flag": False,
            "x.flags": np.array([True, False]),
            "x.none": np.array([], dtype=np.float32),
            "x.texts": ["ä", "b"],
        },
        [
            TensorToWrite("m", f32, (3, 2), lambda: [values.data.cast("B")]),
            TensorToWrite(
                "v", f32, (9,), lambda: [flat[:4].data.cast("B"), flat[4:].data.cast("B")]
            ),
        ],
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(24, 60), (40, 60), (60, 60)]
    reader = GGUFReader(path)
    assert reader.fields["x.count"].types == [GGUFValueType.UINT32]
    assert reader.fields["x.theta"].contents() == 0.25
    assert reader.fields["x.flag"].contents() is False
    assert reader.fields["x.texts"].contents() == ["ä", "b"]
    assert [t.name for t in reader.tensors] == ["m", "v"]
    assert (reader.tensors[0].data == values).all()
    assert (reader.tensors[1].data == flat).all()
    ours = read_header(path).metadata
    assert len(ours["x.none"]) == 0  # type: ignore[arg-type]
    assert [p.name for p in tmp_path.iterdir()] == ["ours.gguf"]


def test_a_tensor_that_gives_too_few_bytes_leaves_no_file(tmp_path: Path) -> None:
    short = TensorToWrite("v", type_by_name("f32"), (9,), lambda: [memoryview(bytes(8))])
    with pytest.raises(FileError, match=r"v gave 8 bytes.*36"):
        write_gguf(tmp_path / "x.gguf", {}, [short])
    assert not list(tmp_path.iterdir())


FLOATS = struct.pack("<8f", *range(8))
GOOD = gguf_bytes(
    [pair_text("general.architecture", "llama"), pair_u32("a.b", 1)],
    [tensor_entry("t", (4, 2), 0, 0)],
    FLOATS,
)


def test_the_hand_made_file_is_good(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(GOOD)
    assert is_gguf(path)
    assert dequantised_tensor(path, "t").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


DAMAGE = [
    (b"", "empty"),
    (b"GG", "not a GGUF"),
    (b"PK\x03\x04" + bytes(60), "not a GGUF"),
    (b"GGUF", "ends inside its header"),
    (GOOD[:30], "claims 1 tensors"),
    (GOOD[:90], "ends inside"),
    (GOOD[:-1], "outside the file"),
    (gguf_bytes([], [], version=1), "version 1"),
    (gguf_bytes([], [], version=9), "version 9"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    (gguf_bytes([], [], counts=(1 << 60, 0)), "1152921504606846976 tensors"),
    (gguf_bytes([], [], counts=(0, 1 << 63)), "metadata keys"),
    (gguf_bytes([pair_u32("a", 1)], [], counts=(0, 9)), "claims 9 metadata keys"),
    (gguf_bytes([pair_u32("a", 1), pair_u32("a", 2)], []), "key a appears twice"),
    (gguf_bytes([pair_text("a", b"\xff\xfe")], []), "a is not valid UTF-8"),
    (gguf_bytes([pair_u32("", 1)], []), "0 bytes long"),
    (gguf_bytes([pair_u32("a\nb", 1)], []), "control characters"),
    (gguf_bytes([text(b"\xc3") + struct.pack("<II", 4, 1)], []), "not valid UTF-8"),
    (gguf_bytes([text("a") + struct.pack("<II", 99, 1)], []), "unknown value type 99"),
    (gguf_bytes([text("a") + struct.pack("<IB", 7, 2)], []), "neither true nor false"),
    (gguf_bytes([text("a") + struct.pack("<IQ", 8, 1 << 62)], []), "4611686018427387904"),
    (gguf_bytes([text("a") + struct.pack("<IIQ", 9, 6, 1 << 61)], []), "values of a"),
    (gguf_bytes([text("a") + struct.pack("<IIQ", 9, 8, 1 << 61)], []), "texts"),
    (gguf_bytes([text("a") + struct.pack("<IIQQ", 9, 8, 1, 900)], []), "inside a text of a"),
    (gguf_bytes([text("a") + struct.pack("<IIQ", 9, 9, 1)], []), "array of arrays"),
    (gguf_bytes([pair_u32("general.alignment", 0)], []), "alignment"),
    (gguf_bytes([pair_u32("general.alignment", 48)], []), "alignment"),
    (gguf_bytes([], [tensor_entry("t", (4, 2), 0, 0)] * 2, FLOATS), "t appears twice"),
    (gguf_bytes([], [tensor_entry("x" * 64, (4,), 0, 0)], FLOATS), "64 bytes long"),
    (gguf_bytes([], [tensor_entry(b"\xff", (4,), 0, 0)], FLOATS), "not valid UTF-8"),
    (gguf_bytes([], [tensor_entry("t", (1, 1, 1, 1, 1), 0, 0)], FLOATS), "5 dimensions"),
    (gguf_bytes([], [tensor_entry("t", (4, 0), 0, 0)], FLOATS), "no values"),
    (gguf_bytes([], [tensor_entry("t", (4, 2), 77, 0)], FLOATS), "unknown type 77"),
    (gguf_bytes([], [tensor_entry("t", (33,), 8, 0)], bytes(68)), "33 values"),
    (gguf_bytes([], [tensor_entry("t", (4, 2), 0, 8)], FLOATS * 2), "not aligned"),
    (gguf_bytes([], [tensor_entry("t", (4, 2), 0, 32)], FLOATS), "outside the file"),
    (gguf_bytes([], [tensor_entry("t", (1 << 40, 1 << 40), 0, 0)], FLOATS), "outside"),
    (gguf_bytes([], [tensor_entry("t", (1 << 63, 1 << 63), 0, 0)], FLOATS), "outside"),
    (gguf_bytes([], [tensor_entry("t", (4,), 0, 1 << 63)], FLOATS), "outside"),
    (
        gguf_bytes([], [tensor_entry("t", (16,), 0, 0), tensor_entry("u", (4,), 0, 32)], bytes(64)),
        "t and u overlap",
    ),
]


@pytest.mark.parametrize(("data", "words"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_damage_ends_in_one_sentence(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(FileError, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(FileError, match="not a file"):
        read_header(tmp_path)
    with pytest.raises(FileError, match="not a file"):
        read_header(Path("/dev/zero"))


def test_token_texts_need_not_be_valid_utf8(tmp_path: Path) -> None:
    path = tmp_path / "tokens.gguf"
    array = struct.pack("<IIQ", 9, 8, 2) + text("a") + text(b"\xe2\x96")
    path.write_bytes(gguf_bytes([text("tokenizer.ggml.tokens") + array], []))
    tokens = read_header(path).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, tuple)
    assert [t.encode("utf-8", "surrogateescape") for t in tokens] == [b"a", b"\xe2\x96"]


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(GOOD)
    with pytest.raises(FileError, match=r"no tensor output\.weight"):
        raw_tensor(path, "output.weight")


def test_tensors_of_a_split_model_are_found_in_their_part(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    first.write_bytes(gguf_bytes([pair_text("general.architecture", "llama")], []))
    with pytest.raises(FileError, match="m-00002-of-00002"):
        raw_tensor(first, "t")
    second.write_bytes(gguf_bytes([], [tensor_entry("t", (8,), 0, 0)], FLOATS))
    assert split_files(first) == (first, second)
    assert dequantised_tensor(first, "t").tolist() == list(range(8))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "fuzzed.gguf"


def _read_all(path: Path, data: bytes) -> None:
    """Either the file is good and every tensor can be read, or there is a FileError."""
    path.write_bytes(data)
    try:
        for tensor in open_tensors(path):
            assert tensor.raw.size <= len(data)
            tensor.as_float32()
    except FileError as error:
        message = str(error)
    else:
        message = ""
    assert message.isprintable()


RICH = gguf_bytes(
    [
        pair_text("general.architecture", "llama"),
        pair_u32("general.alignment", 32),
        text("f") + struct.pack("<IIQ3f", 9, 6, 3, 1, 2, 3),
        text("t") + struct.pack("<IIQ", 9, 8, 2) + text("one") + text("two"),
        text("b") + struct.pack("<IB", 7, 1),
    ],
    [tensor_entry("m", (4, 2), 0, 0), tensor_entry("q", (32,), 8, 32)],
    FLOATS + bytes(34),
)


@settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(RICH) - 1), st.integers(0, 255)), min_size=1, max_size=6
    ),
    length=st.integers(0, len(RICH)) | st.just(len(RICH)),
)
def test_mutated_and_truncated_headers_never_crash(
    scratch: Path, changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(RICH)
    for position, value in changes:
        data[position] = value
    _read_all(scratch, bytes(data[:length]))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    position=st.integers(0, len(RICH) - 8),
    value=st.sampled_from([0, 1, 0xFF, 1 << 31, 1 << 32, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1]),
)
def test_huge_numbers_anywhere_never_crash(scratch: Path, position: int, value: int) -> None:
    data = bytearray(RICH)
    data[position : position + 8] = struct.pack("<Q", value)
    _read_all(scratch, bytes(data))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tail=st.binary(max_size=200))
def test_random_bytes_after_the_magic_never_crash(scratch: Path, tail: bytes) -> None:
    _read_all(scratch, b"GGUF" + struct.pack("<I", 3) + tail)
