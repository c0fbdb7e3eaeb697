"""Sequences, memory, rollback and saved states on tiny targets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from dspine.errors import CapacityError, UsageError
from dspine.llama.batch import Batch
from dspine.llama.context import Context
from dspine.llama.model import Model
from tests.support.tiny_models import tiny_llama, tiny_qwen35

PROMPT = [1, 70, 80, 90, 100, 110, 120, 77]
BLOCK = [31, 32, 33, 34, 35, 36]

Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model.load(tiny_llama(tmp_path_factory.mktemp("dense") / "m.gguf", seed=1)) as model:
        yield model


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model.load(tiny_qwen35(tmp_path_factory.mktemp("hybrid") / "m.gguf", seed=2)) as model:
        yield model


def run(context: Context, tokens: list[int], position: int, sequence: int = 0) -> Logits:
    """Decode `tokens` in one batch and return a copy of all logits."""
    batch = Batch(len(tokens))
    batch.add_tokens(tokens, position, sequence)
    context.decode(batch)
    return np.stack([context.logits(row) for row in range(len(tokens))])


def test_a_dense_target_forgets_rejected_tokens_exactly(dense: Model) -> None:
    with Context(dense, n_ctx=64, n_threads=1) as context:
        run(context, PROMPT, 0)
        run(context, BLOCK, 8)
        assert context.memory.last_position(0) == 13
        assert context.memory.remove(0, 10)
        assert context.memory.last_position(0) == 9
        after = run(context, [50, 51], 10)
    with Context(dense, n_ctx=64, n_threads=1) as fresh:
        run(fresh, PROMPT, 0)
        run(fresh, BLOCK[:2], 8)
        expected = run(fresh, [50, 51], 10)
    assert np.abs(after - expected).max() < 1e-4
    assert (after.argmax(1) == expected.argmax(1)).all()


def test_a_hybrid_target_cannot_be_trimmed_but_returns_to_its_checkpoint_exactly(
    hybrid: Model,
) -> None:
    assert hybrid.is_recurrent
    with Context(hybrid, n_ctx=64, n_threads=1, taps=(0, 2)) as context:
        run(context, PROMPT, 0)
        assert context.state.checkpoint(0) == 8
        run(context, BLOCK, 8)
        assert not context.memory.remove(0, 10)
        assert context.state.restore(0) == 8
        assert context.memory.last_position(0) == 7
        # deferred replay: the accepted tokens stand in front of the next block
        after = run(context, [*BLOCK[:2], 50, 51, 52], 8)
        features = context.features(0, 5)
        assert context.state.restore(0) == 8  # a checkpoint can be used again
        again = run(context, [*BLOCK[:2], 50, 51, 52], 8)
    with Context(hybrid, n_ctx=64, n_threads=1, taps=(0, 2)) as fresh:
        run(fresh, PROMPT, 0)
        expected = run(fresh, [*BLOCK[:2], 50, 51, 52], 8)
        assert features.tobytes() == fresh.features(0, 5).tobytes()
    assert after.tobytes() == expected.tobytes()
    assert again.tobytes() == expected.tobytes()


def test_both_ways_to_read_taps_agree_on_a_hybrid_target(hybrid: Model) -> None:
    features = []
    for by_callback in (False, True):
        with Context(
            hybrid, n_ctx=64, n_threads=1, taps=(2, 0, 1), taps_by_callback=by_callback
        ) as context:
            run(context, PROMPT, 0)
            features.append(context.features(0, 8))
    assert features[0].shape == (8, 3 * 64)
    assert features[0].tobytes() == features[1].tobytes()


def test_checkpoints_work_the_same_on_a_dense_target(dense: Model) -> None:
    with Context(dense, n_ctx=64, n_threads=1) as context:
        first = run(context, PROMPT, 0)
        context.state.checkpoint(0)
        block = run(context, BLOCK, 8)
        assert context.state.restore(0) == 8
        assert run(context, BLOCK, 8).tobytes() == block.tobytes()
        context.memory.clear()
        assert context.state.checkpoint(0) == 0  # an empty sequence has a checkpoint too
        run(context, BLOCK, 0)
        assert context.state.restore(0) == 0
        assert run(context, PROMPT, 0).tobytes() == first.tobytes()


def test_a_hybrid_target_can_return_to_the_empty_state(hybrid: Model) -> None:
    with Context(hybrid, n_ctx=64, n_threads=1) as context:
        assert context.state.checkpoint(0) == 0
        first = run(context, PROMPT, 0)
        assert context.state.restore(0) == 0
        assert run(context, PROMPT, 0).tobytes() == first.tobytes()


def test_a_checkpoint_is_gone_when_what_it_stands_on_is_removed(dense: Model) -> None:
    with Context(dense, n_ctx=64, n_threads=1) as context:
        run(context, PROMPT, 0)
        context.state.checkpoint(0)
        assert context.memory.remove(0, 5)
        with pytest.raises(UsageError, match="sequence 0 has no checkpoint"):
            context.state.restore(0)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_sequences_in_one_batch_equal_sequences_alone(
    kind: str, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(kind)
    texts = [[3 + i, 40 + i, 90, 100 + 2 * i, 7 * i + 5][: 3 + i % 3] for i in range(32)]
    taps = (0, 1)
    alone = []
    with Context(model, n_ctx=64, n_threads=1, taps=taps) as context:
        for text in texts:
            context.memory.clear()
            logits = run(context, text, 0)
            alone.append((logits, context.features(0, len(text))))
    with Context(model, n_ctx=64, n_threads=1, n_sequences=32, taps=taps) as context:
        batch = Batch(512)
        first = [batch.add_tokens(text, 0, sequence) for sequence, text in enumerate(texts)]
        context.decode(batch)
        for row, text, (logits, features) in zip(first, texts, alone, strict=True):
            count = len(text)
            together = np.stack([context.logits(row + i) for i in range(count)])
            assert np.abs(together - logits).max() < 1e-3
            assert np.abs(context.features(row, count) - features).max() < 1e-3
        # one more token each, as generation does
        batch.clear()
        for sequence, text in enumerate(texts):
            batch.add(context.argmax(first[sequence] + len(text) - 1), len(text), (sequence,))
        tokens = batch.tokens
        context.decode(batch)
        step = [context.logits(row).copy() for row in range(32)]
    with Context(model, n_ctx=64, n_threads=1) as context:
        for sequence in (0, 13, 31):
            context.memory.clear()
            run(context, texts[sequence], 0)
            expected = run(context, [tokens[sequence]], len(texts[sequence]))[0]
            assert np.abs(step[sequence] - expected).max() < 1e-3


def test_removing_one_sequence_leaves_the_others(dense: Model) -> None:
    with Context(dense, n_ctx=64, n_threads=1, n_sequences=2) as context:
        run(context, PROMPT, 0, 0)
        run(context, PROMPT[:5], 0, 1)
        assert context.memory.remove(0, 0)
        assert [context.memory.last_position(s) for s in (0, 1)] == [-1, 4]
        context.memory.clear()
        assert context.memory.last_position(1) == -1


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_copied_sequence_goes_on_like_its_source(
    kind: str, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(kind)
    with Context(model, n_ctx=64, n_threads=1, n_sequences=3) as context:
        run(context, PROMPT, 0, 0)
        run(context, BLOCK, 0, 2)
        context.memory.copy(0, 2)
        assert context.memory.last_position(2) == 7
        copied = run(context, BLOCK, 8, 2)
        assert context.memory.last_position(0) == 7
        assert np.abs(run(context, BLOCK, 8, 0) - copied).max() < 1e-4


def test_part_of_a_sequence_is_copied_only_within_a_shared_cache(dense: Model) -> None:
    with Context(dense, n_ctx=64, n_threads=1, n_sequences=2) as context:
        run(context, PROMPT, 0, 0)
        with pytest.raises(UsageError, match="cannot be copied alone"):
            context.memory.copy(0, 1, 0, 4)
    with Context(dense, n_ctx=64, n_threads=1, n_sequences=2, shared_cache=True) as context:
        run(context, PROMPT, 0, 0)
        context.memory.copy(0, 1, 0, 4)
        assert context.memory.last_position(1) == 3
        shared = run(context, PROMPT[4:], 4, 1)
    with Context(dense, n_ctx=64, n_threads=1) as context:
        run(context, PROMPT[:4], 0)
        assert np.abs(run(context, PROMPT[4:], 4) - shared).max() < 1e-4


def test_one_row_can_belong_to_several_sequences(dense: Model) -> None:
    with Context(dense, n_ctx=64, n_threads=1, n_sequences=2, shared_cache=True) as context:
        batch = Batch(8)
        for position, token in enumerate(PROMPT):
            batch.add(token, position, (0, 1), logits=position == 7)
        context.decode(batch)
        assert [context.memory.last_position(s) for s in (0, 1)] == [7, 7]
        expected = context.logits(7).copy()
        batch.clear()  # the shared rows leave nothing behind in the reused arrays
        batch.add_tokens(BLOCK, 8, 1)
        context.decode(batch)
        assert [context.memory.last_position(s) for s in (0, 1)] == [7, 13]
    with Context(dense, n_ctx=64, n_threads=1) as context:
        assert np.abs(run(context, PROMPT, 0)[-1] - expected).max() < 1e-4


def test_a_full_shared_cache_is_a_capacity_error_and_changes_nothing(dense: Model) -> None:
    with Context(dense, n_ctx=256, n_threads=1, n_sequences=2, shared_cache=True) as context:
        run(context, [5] * 200, 0, 0)
        with pytest.raises(CapacityError, match=r"100 more rows do not fit .*256 tokens"):
            run(context, [6] * 100, 0, 1)
        assert [context.memory.last_position(s) for s in (0, 1)] == [199, -1]
        run(context, [6] * 50, 0, 1)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_saved_sequence_comes_back_in_another_context(
    kind: str, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(kind)
    with Context(model, n_ctx=64, n_threads=1) as context:
        run(context, PROMPT, 0)
        saved = context.state.save(0)
        expected = run(context, BLOCK, 8)
    with Context(model, n_ctx=64, n_threads=1) as context:
        run(context, BLOCK, 0)
        assert context.state.load(0, saved) == 8
        assert run(context, BLOCK, 8).tobytes() == expected.tobytes()
        with pytest.raises(UsageError, match="do not fit this context"):
            context.state.load(0, saved[: len(saved) // 2])
        assert context.memory.last_position(0) == -1
        run(context, PROMPT, 0)
        with pytest.raises(UsageError, match="0 bytes of saved state"):
            context.state.load(0, b"")


def test_taps_through_the_callback_need_equal_parts(dense: Model) -> None:
    def batch(*parts: tuple[int, list[int], int]) -> Batch:
        made = Batch(16)
        for sequence, tokens, position in parts:
            made.add_tokens(tokens, position, sequence)
        return made

    features = []
    for by_callback in (True, False):
        with Context(
            dense, n_ctx=64, n_threads=1, n_sequences=4, taps=(0, 2), taps_by_callback=by_callback
        ) as context:
            context.decode(batch((0, [5, 6], 0), (1, [7, 8], 0), (3, [9, 10], 0)))
            features.append(context.features(0, 6))
            context.decode(batch((3, [9, 10], 2), (2, [5, 6], 0)))
            features.append(context.features(0, 4))
            mixed = batch((0, [5], 2), (1, [7], 2), (0, [6], 3), (1, [8], 3))
            uneven = batch((0, [5], 2), (1, [7, 8], 2))
            if by_callback:
                for wrong in (mixed, uneven):
                    with pytest.raises(UsageError, match="only where each has as many"):
                        context.decode(wrong)
            else:
                context.decode(mixed)
    assert [one.tobytes() for one in features[:2]] == [one.tobytes() for one in features[2:]]
