"""The drafter contract: coverage, rollback, ring, sequences, causal widths, closing, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from dspine.drafters.backbone import drafter as drafter_module
from dspine.drafters.backbone.context import CHUNKS, ring_capacity
from dspine.drafters.base import Drafter
from dspine.drafters.dspine import DSpineDrafter
from dspine.errors import CapacityError, ClosedError, FileError, UsageError
from dspine.ggml import HostTensor
from dspine.llama.library import find_library
from tests.support.tiny_drafter import FloatArray, TinyPair, tiny_config

ANCHOR = 11


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    find_library()


@pytest.fixture
def full() -> TinyPair:
    return TinyPair(tiny_config((None, 30)), seed=1)


@pytest.fixture
def ring() -> TinyPair:
    """All layers windowed: 20 tokens, in a ring of 160 rows."""
    return TinyPair(tiny_config((20, 12)), seed=2)


@pytest.fixture
def windowed(ring: TinyPair) -> Iterator[DSpineDrafter]:
    with ring.drafter(n_ctx=4096) as drafter:
        yield drafter


def hidden(drafter: DSpineDrafter, seq: int = 0, width: int = 4) -> FloatArray:
    return drafter.draft_trace(seq, ANCHOR, width).hidden


def fresh(pair: TinyPair, features: FloatArray) -> FloatArray:
    """Hidden states of a new drafter that saw `features` in one piece."""
    with pair.drafter(n_ctx=4096) as drafter:
        drafter.add_context(0, 0, features)
        return hidden(drafter)


def same(found: FloatArray, expected: FloatArray) -> None:
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_it_is_a_drafter(full: TinyPair) -> None:
    with full.drafter() as drafter:
        contract: Drafter = drafter
        assert (contract.name, contract.block_size, contract.taps) == ("dspine", 6, (1, 3))


@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_a_narrow_block_is_a_prefix_of_the_wide_one(full: TinyPair, width: int) -> None:
    with full.drafter() as drafter:
        drafter.add_context(0, 0, full.features(17))
        wide = drafter.draft_trace(0, ANCHOR, 6)
        narrow = drafter.draft_trace(0, ANCHOR, width)
        draft = drafter.draft(0, ANCHOR, width)
    same(narrow.hidden, wide.hidden[: width - 1])
    assert draft.tokens == narrow.draft.tokens == wide.draft.tokens[: width - 1]
    assert draft.scores == pytest.approx(wide.draft.scores[: width - 1], abs=1e-4)


def test_drafting_leaves_the_context_alone(full: TinyPair) -> None:
    features = full.features(20)
    with full.drafter() as drafter:
        drafter.add_context(0, 0, features)
        first = hidden(drafter)
        for width in (6, 2, 5):
            drafter.draft(0, ANCHOR + width, width)
        assert (hidden(drafter) == first).all()
        assert drafter.covered(0) == 20


@pytest.mark.parametrize("pieces", [[1] * 9, [9], [4, 5], [8, 1], [3, 0, 6]])
def test_pieces_do_not_matter(full: TinyPair, pieces: list[int]) -> None:
    features = full.features(9)
    with full.drafter() as drafter:
        position = 0
        for count in pieces:
            drafter.add_context(0, position, features[position : position + count])
            position += count
        assert drafter.covered(0) == 9
        same(hidden(drafter), fresh(full, features))


def test_counts_between_the_graph_sizes_are_padded(full: TinyPair) -> None:
    assert 21 not in CHUNKS and max(CHUNKS) < 300
    for count in (21, 300):
        features = full.features(count)
        with full.drafter(n_ctx=512) as drafter:
            drafter.add_context(0, 0, features[:5])
            drafter.add_context(0, 5, features[5:])
            same(hidden(drafter), fresh(full, features))


def test_rolled_back_rows_are_gone_and_can_be_replaced(full: TinyPair) -> None:
    features, other = full.features(20), full.features(6)
    with full.drafter() as drafter:
        drafter.add_context(0, 0, features)
        drafter.truncate(0, 25)
        assert drafter.covered(0) == 20, "nothing to forget there"
        drafter.truncate(0, 14)
        assert drafter.covered(0) == 14
        same(hidden(drafter), fresh(full, features[:14]))
        drafter.add_context(0, 14, other)
        same(hidden(drafter), fresh(full, np.concatenate((features[:14], other))))
        drafter.truncate(0, 0)
        assert drafter.covered(0) == 0
        same(hidden(drafter), fresh(full, features[:0]))


def test_earlier_rows_overwrite(full: TinyPair) -> None:
    features, other = full.features(20), full.features(3)
    with full.drafter() as drafter:
        drafter.add_context(0, 0, features)
        drafter.add_context(0, 10, other)
        assert drafter.covered(0) == 13
        same(hidden(drafter), fresh(full, np.concatenate((features[:10], other))))


def test_the_ring_is_window_sized_and_serves_any_position(
    ring: TinyPair, windowed: DSpineDrafter
) -> None:
    assert ring_capacity(ring.config, 4096) == 160
    features = ring.features(500)
    for first in range(0, 500, 7):
        windowed.add_context(0, first, features[first : first + 7])
    assert windowed.covered(0) == 500
    same(hidden(windowed), fresh(ring, features))


def test_the_ring_forgives_a_short_rollback(ring: TinyPair, windowed: DSpineDrafter) -> None:
    features = ring.features(400)
    windowed.add_context(0, 0, features)
    windowed.truncate(0, 290)
    assert windowed.covered(0) == 290
    same(hidden(windowed), fresh(ring, features[:290]))
    windowed.add_context(0, 290, features[290:])
    same(hidden(windowed), fresh(ring, features))


def test_a_rollback_beyond_the_ring_is_noticed_and_can_be_refilled(
    ring: TinyPair, windowed: DSpineDrafter
) -> None:
    features = ring.features(400)
    windowed.add_context(0, 0, features)
    # The ring holds 240 ... 399; a block at 258 would also see 239.
    windowed.truncate(0, 258)
    assert (windowed.first_held(0), windowed.covered(0)) == (240, 258)
    with pytest.raises(UsageError, match="sees context from 239 on"):
        windowed.draft(0, ANCHOR, 4)
    first = windowed.first_visible(258)
    assert first == 239
    windowed.add_context(0, first, features[first:258])
    assert (windowed.first_held(0), windowed.covered(0)) == (239, 258)
    same(hidden(windowed), fresh(ring, features[:258]))


def test_after_a_rollback_the_rows_that_are_left_serve_a_later_anchor(
    ring: TinyPair, windowed: DSpineDrafter
) -> None:
    features = ring.features(400)
    windowed.add_context(0, 0, features)
    windowed.truncate(0, 245)
    windowed.add_context(0, 245, features[245:260])
    assert (windowed.first_held(0), windowed.covered(0)) == (240, 260)
    assert windowed.first_visible(260) == 241
    same(hidden(windowed), fresh(ring, features[:260]))
    windowed.truncate(0, 240)
    assert (windowed.first_held(0), windowed.covered(0)) == (0, 0)


def test_rows_before_the_window_may_be_left_out(ring: TinyPair, windowed: DSpineDrafter) -> None:
    features = ring.features(300)
    first = windowed.first_visible(300)
    assert first == 281
    windowed.add_context(0, 281, features[281:290])
    with pytest.raises(UsageError, match=r"at position 290 sees context from 271 on.*before 281"):
        windowed.draft(0, ANCHOR, 4)
    windowed.add_context(0, 290, features[290:])
    same(hidden(windowed), fresh(ring, features))
    windowed.add_context(0, 320, ring.features(3))
    with pytest.raises(UsageError, match="before 320 were never added"):
        windowed.draft(0, ANCHOR, 4)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_steps_equals_a_fresh_drafter(
    ring: TinyPair, windowed: DSpineDrafter, seed: int
) -> None:
    """Random adds, drafts and rollbacks, with the confirmed features kept beside."""
    random = np.random.default_rng(seed)
    features = ring.features(0)
    for _ in range(60):
        if random.random() < 0.25 and len(features):
            keep = max(0, len(features) - int(random.integers(1, 200)))
            features = features[:keep]
            windowed.truncate(0, keep)
            covered = windowed.covered(0)
            assert covered in (0, keep)
            if covered < keep or windowed.first_held(0) > windowed.first_visible(keep):
                first = windowed.first_visible(keep)
                windowed.add_context(0, first, features[first:])
        else:
            added = ring.features(int(random.integers(1, 40)))
            windowed.add_context(0, len(features), added)
            features = np.concatenate((features, added))
        assert windowed.covered(0) == len(features)
        windowed.draft(0, ANCHOR, int(random.integers(2, 7)))
    same(hidden(windowed), fresh(ring, features))


def test_sequences_do_not_see_each_other(full: TinyPair) -> None:
    one, two = full.features(9), full.features(14)
    with full.drafter() as drafter:
        drafter.add_context(3, 0, two[:6])
        drafter.add_context(0, 0, one)
        drafter.add_context(3, 6, two[6:])
        assert [drafter.covered(seq) for seq in (0, 3, 5)] == [9, 14, 0]
        same(hidden(drafter, 3), fresh(full, two))
        same(hidden(drafter, 0), fresh(full, one))
        drafter.forget(3)
        assert drafter.covered(3) == 0
        same(hidden(drafter, 0), fresh(full, one))


def test_masks_follow_every_change_of_the_context(ring: TinyPair) -> None:
    """One graph through additions, rollbacks and new texts sees what a new one would."""
    random, features = np.random.default_rng(3), ring.features(420)
    with ring.drafter(n_ctx=4096) as drafter:
        length = 0
        for count, back in [(1, 0), (70, 0), *random.integers(0, 7, (12, 2)), (150, 3), (90, 0)]:
            length = max(0, length - int(back))
            drafter.truncate(0, length)
            drafter.add_context(0, length, features[length : length + count])
            length += int(count)
            same(hidden(drafter), fresh(ring, features[:length]))
        drafter.truncate(0, 0)
        drafter.add_context(0, 0, features[:5])
        same(hidden(drafter), fresh(ring, features[:5]))


@pytest.mark.parametrize("kind", ["full", "ring"])
def test_prepared_graphs_are_those_of_the_first_drafts(
    kind: str, request: pytest.FixtureRequest
) -> None:
    pair: TinyPair = request.getfixturevalue(kind)
    features = pair.features(9)
    with pair.drafter() as drafter:
        drafter.prepare(0, (2, 4))
        made = dict(drafter._block_graphs)
        assert [key[:2] for key in made] == [((0,), 2), ((0,), 4)]
        drafter.add_context(0, 0, features)
        same(hidden(drafter), fresh(pair, features))
        assert drafter.draft(0, ANCHOR, 4, None, (5, 6)).led is not None
        assert dict(drafter._block_graphs) == made, "a draft after a lead needs no other graph"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_feature_that_is_not_a_number_ends_with_the_context(full: TinyPair, bad: float) -> None:
    features = full.features(9)
    spoilt = features.copy()
    spoilt[4, 3] = bad
    with full.drafter() as drafter:
        drafter.add_context(0, 0, spoilt)
        with pytest.raises(UsageError, match="not numbers"):
            drafter.draft(0, ANCHOR, 4)
        assert drafter.covered(0) == 0
        drafter.add_context(0, 0, features)
        same(hidden(drafter), fresh(full, features))


def test_few_block_graphs_are_kept(full: TinyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_module, "_MAX_BLOCK_GRAPHS", 2)
    with full.drafter() as drafter:
        drafter.add_context(0, 0, full.features(5))
        wide = drafter.draft(0, ANCHOR, 6)
        for width in (2, 3, 4, 5):
            drafter.draft(0, ANCHOR, width)
        assert [key[1] for key in drafter._block_graphs] == [4, 5]
        assert drafter.draft(0, ANCHOR, 6) == wide


def test_the_context_may_fill_the_cache_but_not_more(full: TinyPair) -> None:
    features = full.features(65)
    with full.drafter(n_ctx=64) as drafter:
        with pytest.raises(CapacityError, match=r"position 64 is outside .* 64 rows: raise n_ctx"):
            drafter.add_context(0, 0, features)
        drafter.add_context(0, 0, features[:64])
        same(hidden(drafter), fresh(full, features[:64]))


def test_a_closed_drafter_refuses_everything(full: TinyPair) -> None:
    drafter = full.drafter()
    drafter.add_context(0, 0, full.features(3))
    drafter.draft(0, ANCHOR, 3)
    drafter.close()
    drafter.close()
    uses: list[Callable[[], object]] = [
        lambda: drafter.covered(0),
        lambda: drafter.draft(0, ANCHOR, 3),
        lambda: drafter.truncate(0, 1),
        lambda: drafter.add_context(0, 3, full.features(1)),
        lambda: drafter.set_threads(1),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="drafter was used after it was closed"):
            use()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda d, f: d.draft(0, ANCHOR, 1), "width is 1: this drafter drafts 2 to 6"),
        (lambda d, f: d.draft(0, ANCHOR, 7), "width is 7"),
        (lambda d, f: d.draft(0, 80, 3), "anchor 80 is outside of the vocabulary of 80"),
        (lambda d, f: d.draft(0, -1, 3), "anchor -1"),
        (lambda d, f: d.draft(-1, ANCHOR, 3), "sequence -1"),
        (lambda d, f: d.add_context(0, 5, f(2)), "start at position 5, but only 3 are present"),
        (lambda d, f: d.add_context(0, -1, f(2)), "position -1 is negative"),
        (lambda d, f: d.add_context(0, 3, f(2)[:, :-1]), r"shape \(2, 95\).*rows of 96"),
        (lambda d, f: d.add_context(0, 3, f(2)[0]), r"shape \(96,\)"),
        (lambda d, f: d.truncate(0, -1), "length is -1"),
        (lambda d, f: d.set_threads(0), "n_threads is 0"),
    ],
)
def test_mistakes_are_sentences_and_change_nothing(
    full: TinyPair, use: Callable[..., object], message: str
) -> None:
    with full.drafter() as drafter:
        drafter.add_context(0, 0, full.features(3))
        before = hidden(drafter)
        with pytest.raises(UsageError, match=message):
            use(drafter, full.features)
        assert drafter.covered(0) == 3
        assert (hidden(drafter) == before).all()


def test_tensors_must_fit_the_configuration_and_the_target() -> None:
    pair = TinyPair(tiny_config((None,), draft_vocab_size=30))
    vocab = pair.draft_vocab
    assert vocab is not None
    table = HostTensor.from_numpy(pair.embedding)
    narrow = HostTensor.from_numpy(pair.embedding[:, :60])
    short = HostTensor.from_numpy(pair.embedding[:70])
    good: dict[str, Any] = {
        "tensors": pair.tensors,
        "embedding": table,
        "head": table,
        "draft_vocab": vocab,
    }
    without = {k: v for k, v in pair.tensors.items() if k != "fc.weight"}
    turned = {**pair.tensors, "fc.weight": pair.tensors["fc.weight"].T}
    repeated = vocab.copy()
    repeated[1] = repeated[0]
    outside = vocab.copy()
    outside[0] = 80
    for change, message in (
        ({"tensors": without}, "no tensor fc.weight"),
        ({"tensors": turned}, r"fc.weight has shape \(64, 96\), .* says \(96, 64\)"),
        ({"embedding": narrow}, "token embedding has 80 rows of 60, .* 80 rows of 64"),
        ({"head": short}, "output head has 70 rows of 64"),
        ({"draft_vocab": None}, "reduced vocabulary but no d2t"),
        ({"draft_vocab": vocab[:29]}, "d2t names 29 tokens, .* says 30"),
        ({"draft_vocab": repeated}, "different tokens from 0 to 79"),
        ({"draft_vocab": outside}, "different tokens from 0 to 79"),
    ):
        arguments: dict[str, Any] = {**good, **change}
        with pytest.raises(FileError, match=message):
            DSpineDrafter(pair.config, n_ctx=16, **arguments)


def test_options_are_checked(full: TinyPair) -> None:
    with pytest.raises(UsageError, match="n_ctx is 0"):
        full.drafter(n_ctx=0)
    with pytest.raises(UsageError, match="cache_type is 'q8_0'"):
        full.drafter(cache_type="q8_0")
