"""The default target through our objects, compared with llama-cpp-python's own class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest

from dspine.ggml.tensor import Tensor
from dspine.llama.batch import Batch
from dspine.llama.context import Context
from dspine.llama.model import Model

TAPS = (1, 8, 15, 22, 28)
TEXT = "The capital of France is Paris, and the capital of Italy is"


@pytest.fixture(scope="module")
def model(default_target: Path) -> Iterator[Model]:
    with Model.load(default_target) as model:
        yield model


def decode(context: Context, tokens: list[int]) -> int:
    batch = Batch(len(tokens))
    batch.add_tokens(tokens, 0)
    context.decode(batch)
    return len(tokens)


def test_facts_are_those_of_the_file(model: Model) -> None:
    assert (model.architecture, model.num_layers, model.hidden_size) == ("llama", 30, 576)
    assert (model.vocab_size, model.context_train) == (49152, 8192)
    assert (model.is_recurrent, model.num_heads) == (False, 9)
    assert model.num_parameters == 134515008
    assert model.metadata("llama.attention.head_count_kv") == "3"
    assert model.metadata("no.such.key") is None
    assert model.metadata("general.license") == "apache-2.0"
    # Longer than a first buffer.
    template = model.metadata("tokenizer.chat_template")
    assert template is not None and template.startswith("{% for message in messages %}")
    assert len(template) > 256


def test_tensors_come_without_a_copy(model: Model) -> None:
    embedding = model.tensor("token_embd.weight")
    assert isinstance(embedding, Tensor)
    assert tuple(embedding.ne[:2]) == (576, 49152)
    assert model.tensor("output.weight") is None  # tied


def test_tokens_match_the_reference_and_round_trip(model: Model, default_target: Path) -> None:
    reference = llama_cpp.Llama(str(default_target), vocab_only=True, verbose=False)
    texts = [
        TEXT,
        "",
        " leading",
        "naïve 日本語 😀\n\ttab",
        "x = 3.14159 # π\r\n",
        "a\x00b",
        "<|im_end|>",
    ]
    for text in texts:
        for special in (False, True):
            tokens = model.tokenizer.encode(text, parse_special=special)
            expected = reference.tokenize(text.encode(), add_bos=False, special=special)
            assert tokens == expected
        assert model.tokenizer.decode(model.tokenizer.encode(text)) == text
    reference.close()
    assert model.tokenizer.encode("<|im_end|>", parse_special=True) == [2]
    assert (model.tokenizer.bos, model.tokenizer.eos) == (1, 2)
    assert model.tokenizer.is_end(2) and not model.tokenizer.is_end(100)
    assert model.tokenizer.piece(2) == b""
    assert model.tokenizer.piece(2, special=True) == b"<|im_end|>"
    half = model.tokenizer.encode("😀")
    assert b"".join(model.tokenizer.piece(t) for t in half) == "😀".encode()
    texts = model.tokenizer.token_texts()
    assert len(texts) == 49152
    assert texts[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("flash_attention", [False, True])
def test_logits_equal_those_of_the_high_level_class(
    model: Model, default_target: Path, flash_attention: bool
) -> None:
    tokens = model.tokenizer.encode(TEXT)
    reference = llama_cpp.Llama(
        str(default_target),
        n_ctx=256,
        n_batch=64,
        n_ubatch=64,
        n_threads=1,
        n_threads_batch=1,
        logits_all=True,
        flash_attn=flash_attention,
        verbose=False,
    )
    reference.eval(tokens)
    expected = np.asarray(reference.scores[: len(tokens)], dtype=np.float32)
    reference.close()
    with Context(
        model, n_ctx=256, n_batch=64, n_threads=1, flash_attention=flash_attention
    ) as context:
        rows = decode(context, tokens)
        found = np.stack([context.logits(row) for row in range(rows)])
        assert np.array_equal(found, expected)
        assert context.argmax(rows - 1) == int(expected[-1].argmax())
        assert model.tokenizer.piece(context.argmax(rows - 1)) == b" Rome"


def test_both_ways_to_read_taps_agree_bit_for_bit(model: Model) -> None:
    tokens = model.tokenizer.encode(TEXT)
    features = []
    for by_callback in (False, True):
        with Context(
            model, n_ctx=256, n_threads=1, taps=TAPS, taps_by_callback=by_callback
        ) as context:
            rows = decode(context, tokens)
            features.append(context.features(0, rows))
            part = context.features(3, 4)
            assert part.tobytes() == features[-1][3:7].tobytes()
    assert features[0].shape == (len(tokens), 5 * 576)
    assert features[0].tobytes() == features[1].tobytes()
    assert np.abs(features[0]).min(axis=1).max() > 0


def test_the_hidden_state_times_the_head_gives_the_logits(
    model: Model, default_target: Path
) -> None:
    tokens = model.tokenizer.encode(TEXT)
    with Context(model, n_ctx=256, n_threads=1, embeddings=True) as context:
        rows = decode(context, tokens)
        hidden = context.hidden(rows - 1).copy()
        logits = context.logits(rows - 1).copy()
    [table] = [
        tensor
        for tensor in gguf.GGUFReader(default_target).tensors
        if tensor.name == "token_embd.weight"
    ]
    head = gguf.dequantize(table.data, table.tensor_type)
    expected = head @ hidden
    assert np.abs(expected - logits).max() < 0.02 * np.abs(logits).max()
    assert int(expected.argmax()) == int(logits.argmax())
