"""DFlash and DFlash2 against NumPy: windows, causality, convolutions, selector, heads, draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspine.drafters.base import Draw
from dspine.drafters.dflash.block import CANDIDATES
from dspine.llama.library import find_library
from tests.support.tiny_dflash import TinyDFlash, tiny_config

ANCHOR = 11
KINDS = pytest.mark.parametrize("kind", ["DFlash", "DFlash2"])


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    find_library()


SCALED = {"embedding_scale": 4.0, "logit_scale": 0.5, "logit_softcap": 5.0}
FORMED = {"sink_layers": (1,), "value_scale": 0.5, "rotary_size": 6}


@KINDS
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": (True, True)},
        {"causal": (True, False), "windows": (4, 4)},
        {"windows": (3, None), "taps": (2,)},
        {"num_layers": 1, "windows": (None,), "causal": (False,), "head_dim": 32},
        {"draft_vocab_size": 23},
        SCALED,
        FORMED,
    ],
    ids=["mixed", "causal", "narrow", "one-tap", "one-layer", "reduced", "scaled", "formed"],
)
def test_a_block_is_what_numpy_says(kind: str, changes: dict[str, Any]) -> None:
    pair = TinyDFlash(tiny_config(kind, **changes), seed=3, tied=len(changes) != 1)
    with pair.drafter() as drafter:
        for count in (0, 5, 21):
            features = pair.features(count)
            drafter.truncate(0, 0)
            drafter.add_context(0, 0, features)
            for width in (2, 4, 6):
                expected = pair.oracle().draft(features, ANCHOR, width)
                trace = drafter.draft_trace(0, ANCHOR, width)
                np.testing.assert_allclose(trace.hidden, expected.hidden, atol=2e-4)
                assert list(trace.draft.tokens) == expected.tokens
                assert trace.draft.tokens == drafter.draft(0, ANCHOR, width).tokens


@KINDS
@pytest.mark.parametrize("changes", [{}, SCALED], ids=["plain", "scaled"])
def test_scores_are_the_chances_among_the_candidates(kind: str, changes: dict[str, Any]) -> None:
    pair = TinyDFlash(tiny_config(kind, **changes), seed=5)
    features = pair.features(9)
    expected = pair.oracle().draft(features, ANCHOR, 6)
    rows = expected.scores or [np.sort(row)[-CANDIDATES:] for row in expected.logits]
    chances = [1 / np.exp(row - row.max()).sum() for row in rows]
    with pair.drafter() as drafter:
        drafter.add_context(0, 0, features)
        assert drafter.draft(0, ANCHOR, 6).scores == pytest.approx(chances, rel=1e-3)


@KINDS
@pytest.mark.parametrize("own_head", [False, True])
def test_a_reduced_head_may_be_the_drafters_own(kind: str, own_head: bool) -> None:
    pair = TinyDFlash(tiny_config(kind, draft_vocab_size=32), seed=8, tied=False, own_head=own_head)
    features = pair.features(7)
    with pair.drafter() as drafter:
        drafter.add_context(0, 0, features)
        tokens = list(drafter.draft(0, ANCHOR, 6).tokens)
    assert tokens == pair.oracle().draft(features, ANCHOR, 6).tokens
    assert pair.draft_vocab is not None and set(tokens) <= set(pair.draft_vocab.tolist())


@KINDS
@pytest.mark.parametrize("type_name", ["f16", "bf16", "q8_0"])
def test_stored_types_come_close(kind: str, type_name: str) -> None:
    pair = TinyDFlash(tiny_config(kind), seed=2, tied=False)
    features = pair.features(12)
    with pair.drafter() as exact, pair.drafter(type_name=type_name, target_type="q8_0") as drafter:
        for one in (exact, drafter):
            one.add_context(0, 0, features)
        expected = exact.draft_trace(0, ANCHOR, 6).hidden
        found = drafter.draft_trace(0, ANCHOR, 6).hidden
    closeness = 0.25 if type_name == "q8_0" else 0.08
    assert np.abs(found - expected).mean() < closeness * np.abs(expected).mean()


@KINDS
def test_causal_layers_alone_make_a_narrow_block_a_prefix(kind: str) -> None:
    for causal, is_prefix in ((True, True), (False, False)):
        pair = TinyDFlash(tiny_config(kind, causal=(causal, causal)), seed=4)
        with pair.drafter() as drafter:
            drafter.add_context(0, 0, pair.features(9))
            wide = drafter.draft_trace(0, ANCHOR, 6).hidden
            narrow = drafter.draft_trace(0, ANCHOR, 3).hidden
        assert np.allclose(narrow, wide[:2], atol=2e-5) is is_prefix


@KINDS
def test_a_draw_follows_the_rows_of_the_walk(kind: str) -> None:
    """With noise that makes a chosen candidate win, the next row is that candidate's."""
    pair = TinyDFlash(tiny_config(kind), seed=6)
    features = pair.features(6)
    seen: list[np.ndarray[Any, Any]] = []

    def noise(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        seen.append(ids.copy())
        out = np.zeros(ids.shape)
        out[:, 2] = 1e6
        return out

    with pair.drafter() as drafter:
        drafter.add_context(0, 0, features)
        trace = drafter.draft_trace(0, ANCHOR, 4)
        drawn = drafter.draft(0, ANCHOR, 4, Draw(0.7, 0.0, noise, True))
    assert drawn.tokens == tuple(trace.candidates[:, 2])
    np.testing.assert_array_equal(seen[0], trace.candidates)
    rows = [trace.first_row, trace.table[0, 2], trace.table[1, 2]]
    for one, row in zip(drawn.drawn, rows, strict=True):
        odds = np.exp((row - row.max()) / 0.7)
        np.testing.assert_allclose(one.probabilities, odds / odds.sum(), rtol=1e-5)
    if kind == "DFlash":
        np.testing.assert_array_equal(trace.table[0, 0], trace.table[0, 1])
