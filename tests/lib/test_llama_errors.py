"""What goes wrong becomes one sentence: nothing here may end the process or print."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from dspine.errors import CapacityError, ClosedError, FileError, LibraryError, UsageError
from dspine.llama import cache_size
from dspine.llama import context as context_module
from dspine.llama.batch import Batch
from dspine.llama.context import Context
from dspine.llama.model import Model
from dspine.llama.taps import CallbackTaps, LayerInputTaps
from dspine.machine import available_bytes
from tests.support.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("errors") / "tiny.gguf", seed=5)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with Model.load(path) as model:
        yield model


@pytest.fixture
def context(model: Model) -> Iterator[Context]:
    with Context(
        model, n_ctx=64, n_batch=16, n_threads=1, n_sequences=2, taps=(0,), max_outputs=4
    ) as context:
        yield context


def batch_of(tokens: list[int], position: int = 0, sequence: int = 0) -> Batch:
    batch = Batch(max(1, len(tokens)))
    batch.add_tokens(tokens, position, sequence, logits="last")
    return batch


# Files


@pytest.mark.parametrize("kept", [30, 2000, 9000, 400_000, -1])
def test_a_truncated_file_is_refused_with_the_reason(path: Path, tmp_path: Path, kept: int) -> None:
    damaged = tmp_path / "cut.gguf"
    damaged.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(FileError, match=r"cut\.gguf cannot be loaded: .{10,}check that it is comp"):
        Model.load(damaged)


def test_a_file_with_missing_tensors_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    reader = gguf.GGUFReader(tiny_llama(tmp_path / "whole.gguf"))
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=sub)
    for tensor in reader.tensors:
        if tensor.name != "blk.2.ffn_up.weight":
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FileError, match=r"part\.gguf .*blk\.2\.ffn_up\.weight"):
        Model.load(tmp_path / "part.gguf")


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("dspine", "is a DSpine drafter, not a target: name the language model's own file"),
        ("dflash", "is a drafter of the DFlash family, not a target"),
        ("clip", r"is a multimodal projector \(mmproj\), not a target"),
        ("nosuch", "is a model of architecture 'nosuch', which this llama.cpp library does not"),
    ],
)
def test_files_of_an_architecture_that_is_no_target_are_explained(
    architecture: str, words: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_tensor("x", np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(FileError, match=words):
        Model.load(tmp_path / "m.gguf")


@pytest.mark.parametrize("layers", [0, 513])
def test_a_layer_count_that_would_end_the_process_is_refused(
    path: Path, tmp_path: Path, layers: int
) -> None:
    data, key = bytearray(path.read_bytes()), b"llama.block_count"
    start = data.index(key) + len(key) + 4  # after the key comes the type, then the value
    data[start : start + 4] = layers.to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(FileError, match=f"says that it has {layers} layers, possible are 1 to"):
        Model.load(tmp_path / "m.gguf")


# Contexts


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"n_ctx": 0}, UsageError, "n_ctx is 0"),
        ({"n_batch": -1}, UsageError, "n_batch is -1"),
        ({"n_threads": 0}, UsageError, "n_threads is 0"),
        ({"n_sequences": 100_000}, UsageError, "serves at most"),
        ({"n_ctx": 2049}, CapacityError, "2049 tokens is above the 2048 .* trained"),
        ({"taps": (3,)}, UsageError, "output of layer 3 cannot be read: of the 4 layers"),
        ({"taps": (3,), "taps_by_callback": True}, UsageError, "output of layer 3"),
        ({"cache_type_k": "q9"}, UsageError, "cache_type_k is 'q9': choose one of f32, f16"),
        ({"cache_type_v": "q8_0"}, UsageError, "q8_0 needs flash attention"),
        ({"cache_type_k": "q8_0"}, UsageError, "blocks of 32 .* head size of 16"),
    ],
)
def test_a_context_that_cannot_be_is_refused(
    model: Model, options: dict[str, int], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Context(model, **{"n_ctx": 64, **options})  # type: ignore[arg-type]  # wrong on purpose


def test_a_context_larger_than_memory_says_how_much_fits(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one position: 4 layers x 2 kv heads x (16 + 16) values x 2 bytes = 512 bytes
    assert cache_size.bytes_per_position(model, "f16", "f16") == 512
    assert cache_size.bytes_per_position(model, "f32", "f16") == 768
    monkeypatch.setattr(cache_size, "available_bytes", lambda: 512 * 4 * 500)
    with pytest.raises(CapacityError, match=r"1000 tokens for 4 .*choose at most 500 tokens"):
        Context(model, n_ctx=1000, n_sequences=4)
    Context(model, n_ctx=500, n_sequences=4).close()


def test_free_memory_is_known_here() -> None:
    free = available_bytes()
    assert free is not None and free > 2**20


def test_a_context_that_fails_half_way_frees_what_it_took(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = []
    release = context_module._release

    def counting(*arguments: object) -> None:
        released.append(arguments)
        release(*arguments)  # type: ignore[arg-type]  # passed on unchanged

    def fail(*_: object) -> None:
        raise RuntimeError("half way")

    monkeypatch.setattr(context_module, "_release", counting)
    monkeypatch.setattr(context_module, "State", fail)
    with Model.load(path) as model, pytest.raises(RuntimeError, match="half way"):
        Context(model, n_ctx=64)
    assert len(released) == 1
    assert model._handle.users == 0


# Decoding


def test_rows_that_do_not_fit_are_refused_and_change_nothing(context: Context) -> None:
    context.decode(batch_of([5, 6, 7]))
    refused: list[tuple[Batch, type[Exception], str]] = [
        (Batch(4), UsageError, "the batch is empty"),
        (batch_of([320], 3), UsageError, "token id 320 is outside the vocabulary of 320"),
        (batch_of([5], 2), UsageError, "position 2 of sequence 0 does not follow 2"),
        (batch_of([5], 4), UsageError, "position 4 of sequence 0 does not follow 2"),
        (batch_of([5] * 17, 3), CapacityError, "17 rows, this context decodes at most 16"),
        (batch_of([5] * 3, 62, 1), CapacityError, "position 64 .* beyond the context of 64"),
    ]
    with pytest.raises(UsageError, match="sequence 2 does not exist: the context has 2"):
        context.decode(batch_of([5], 0, 2))
    for batch, error, words in refused:
        with pytest.raises(error, match=words):
            context.decode(batch)
    many = Batch(8)
    many.add_tokens([1] * 5, 3)
    with pytest.raises(CapacityError, match="5 rows want logits, this context has room for 4"):
        context.decode(many)
    assert [context.memory.last_position(s) for s in (0, 1)] == [2, -1]
    context.decode(batch_of([5], 3))


def test_a_batch_refuses_what_cannot_be_decoded() -> None:
    batch = Batch(4)
    refused: list[tuple[str, Callable[[], object]]] = [
        ("token id -1 is negative", lambda: batch.add(-1, 0)),
        ("token id -2 is negative", lambda: batch.add_tokens([3, -2], 0)),
        ("position -1 is negative", lambda: batch.add(1, -1)),
        ("sequence -1 is negative", lambda: batch.add(1, 0, (-1,))),
        ("token id 2147483648 is larger", lambda: batch.add(2**31, 0)),
        ("position 2147483648 is too large", lambda: batch.add_tokens([1], 2**31 - 1)),
        (r"sequences \[2, 2\] name one twice", lambda: batch.add(1, 0, (2, 2))),
        ("sequence -1 is negative", lambda: batch.add(1, 0, (4, -1))),
        ("at least one sequence", lambda: batch.add(1, 0, ())),
        ("logits is 'some'", lambda: batch.add_tokens([1], 0, 0, "some")),  # type: ignore[arg-type]  # wrong on purpose
    ]
    for words, call in refused:
        with pytest.raises(UsageError, match=words):
            call()
    assert (len(batch), batch.spans) == (0, {})
    batch.add_tokens([1, 2], 5)
    with pytest.raises(UsageError, match="position 6 of sequence 0 does not follow 6"):
        batch.add(3, 6)
    with pytest.raises(UsageError, match="position 9 of sequence 0 does not follow 6"):
        batch.add_tokens([3], 9)
    with pytest.raises(CapacityError, match="5 rows do not fit into a batch of 4"):
        batch.add_tokens([1, 2, 3], 7)
    assert (batch.tokens, batch.outputs, batch.spans) == ([1, 2], 2, {0: (5, 7)})
    assert batch.add(9, 0, (3,), logits=False) == 2
    assert (batch.wanted, batch.outputs, batch.highest_token) == (b"\x01\x01\x00", 2, 9)
    batch.clear()
    assert (len(batch), batch.outputs, batch.spans, batch.add_tokens([], 3)) == (0, 0, {}, 0)
    batch.add_tokens([1, 2, 3], 0, 0, 2)
    assert (batch.wanted, batch.outputs) == (b"\x00\x01\x01", 2)
    with pytest.raises(UsageError, match="logits is 2: choose all, last, none or a number of"):
        batch.add_tokens([4], 3, 0, 2)
    batch.clear()
    with pytest.raises(UsageError, match="capacity is 0"):
        Batch(0)


def test_results_that_do_not_exist_are_refused(context: Context) -> None:
    with pytest.raises(UsageError, match="row 0 was not decoded: the last decode had 0 rows"):
        context.logits(0)
    context.decode(batch_of([5, 6, 7]))
    with pytest.raises(UsageError, match="row 3 was not decoded"):
        context.argmax(3)
    with pytest.raises(UsageError, match="row 1 was added without logits"):
        context.logits(1)
    with pytest.raises(UsageError, match="make the context with embeddings"):
        context.hidden(2)
    with pytest.raises(UsageError, match="rows 2 to 3 were not decoded"):
        context.features(2, 2)
    with pytest.raises(UsageError, match="rows -1 to 0"):
        context.features(-1, 2)
    assert context.features(0, 3).shape == (3, 64)
    with Context(context.model, n_ctx=64) as plain, pytest.raises(UsageError, match="no layer is"):
        plain.features(0, 1)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        (2, LibraryError, "aborted"),
        (-2, LibraryError, r"failed to decode 1 rows \(code -2\)"),
        (1, CapacityError, "1 more rows do not fit"),
    ],
)
def test_return_codes_of_the_library_become_errors(
    model: Model, code: int, error: type[Exception], words: str
) -> None:
    with Context(model, n_ctx=64, n_threads=1) as context:
        fields = {name: getattr(context._native, name) for name in context._native.__slots__}
        context._native = SimpleNamespace(**{**fields, "decode": lambda *_: code})  # type: ignore[assignment]  # a stand-in
        with pytest.raises(error, match=words):
            context.decode(batch_of([5]))
        with pytest.raises(UsageError, match="row 0 was not decoded"):
            context.logits(0)


def test_a_layer_that_never_shows_its_output_is_refused_when_it_is_read(model: Model) -> None:
    with Context(model, n_ctx=64, n_threads=1, taps=(1,), taps_by_callback=True) as context:
        reader = context._tap_reader
        reader._names = {b"another-name": 0}  # type: ignore[union-attr]  # as such a graph would be
        context.decode(batch_of([5]))
        with pytest.raises(UsageError, match="layer 1 of this target does not show its output"):
            context.features(0, 1)


@pytest.mark.parametrize("lacking", ["symbols", "architecture"])
def test_without_published_layer_inputs_taps_are_read_by_callback(
    path: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Model.load(path) as model:
        with Context(model, n_ctx=64, n_threads=1, taps=(2, 0)) as context:
            context.decode(batch_of([5, 6, 7]))
            expected = context.features(0, 3)
            assert isinstance(context._tap_reader, LayerInputTaps)
        if lacking == "symbols":
            model.handle.native = replace(model.handle.native, set_tap=None, get_tap=None)
        else:
            monkeypatch.setattr(context_module, "PUBLISHING_ARCHITECTURES", frozenset({"qwen3"}))
        with Context(model, n_ctx=64, n_threads=1, taps=(2, 0)) as context:
            context.decode(batch_of([5, 6, 7]))
            assert isinstance(context._tap_reader, CallbackTaps)
            assert context.features(0, 3).tobytes() == expected.tobytes()


# Closing


def test_use_after_close_is_refused_everywhere(path: Path) -> None:
    model = Model.load(path)
    context = Context(model, n_ctx=64, n_threads=1, taps=(0,))
    context.decode(batch_of([5]))
    model.close()
    model.close()
    assert model.is_closed and not context.is_closed
    context.decode(batch_of([6], 1))  # a context keeps the weights it needs
    assert context.features(0, 1).shape == (1, 64)
    on_model: list[Callable[[], object]] = [
        lambda: model.metadata("general.name"),
        lambda: model.tensor("output.weight"),
        lambda: model.tokenizer.encode("x"),
        lambda: model.tokenizer.is_end(2),
        lambda: Context(model, n_ctx=64),
    ]
    for call in on_model:
        with pytest.raises(ClosedError, match=r"tiny\.gguf is closed"):
            call()
    context.close()
    context.close()
    assert model._handle.users == 0
    on_context: list[Callable[[], object]] = [
        lambda: context.decode(batch_of([5])),
        lambda: context.features(0, 0),
        lambda: context.set_threads(2),
        context.memory.clear,
        lambda: context.memory.last_position(0),
        lambda: context.state.checkpoint(0),
        lambda: context.state.restore(0),
    ]
    for call in on_context:
        with pytest.raises(ClosedError, match="this context is closed"):
            call()
    assert "closed" in repr(model)


def test_memory_is_given_back(path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cycle() -> None:
        with (
            Model.load(path) as model,
            Context(model, n_ctx=2048, n_threads=1, n_sequences=8, taps=(0, 1)) as context,
        ):
            context.decode(batch_of([5, 6, 7]))

    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)

    def resident_after(cycles: int) -> int:
        for _ in range(cycles):
            cycle()
        trim(0)  # freed memory that the C library keeps for itself is not ours
        return resident()

    before = resident_after(3)
    # one cycle holds 2048 x 8 x 512 bytes = 8 MiB of cache alone
    assert resident_after(10) - before < 4 * 2**20
