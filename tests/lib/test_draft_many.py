"""Drafts of several sequences in one graph are the drafts of each alone, chain for chain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dspine.drafters.backbone.drafter import BackboneDrafter
from dspine.drafters.base import Draft, DraftAsk, Draw
from dspine.errors import UsageError
from dspine.llama.library import find_library
from tests.support.tiny_dflash import TinyDFlash
from tests.support.tiny_dflash import tiny_config as dflash_config
from tests.support.tiny_drafter import TinyPair, tiny_config

LENGTHS = (17, 3, 40, 0)
"""Context tokens of the four sequences: a windowed layer sees all of some."""

ANCHORS = (11, 5, 11, 29)

Pairs = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    find_library()


def pair_of(kind: str) -> TinyPair | TinyDFlash:
    if kind == "DSpine":
        return TinyPair(tiny_config((None, 12)), seed=1)
    causal = {"causal": (True, True)} if kind.endswith("causal") else {}
    return TinyDFlash(dflash_config(kind.split()[0], windows=(None, 12), **causal), seed=3)


KINDS = ("DSpine", "DFlash", "DFlash causal", "DFlash2")


@pytest.fixture(params=KINDS)
def drafter(request: pytest.FixtureRequest) -> Iterator[BackboneDrafter[Any, Any]]:
    pair = pair_of(request.param)
    with pair.drafter() as made:
        for seq, length in enumerate(LENGTHS):
            made.add_context(seq, 0, pair.features(length + 5)[5:])
        yield made


def drawing(seed: int) -> Draw:
    random = np.random.default_rng(seed)
    noise = random.gumbel(size=(8, 64))
    return Draw(0.9, 0.0, lambda ids: noise[: len(ids), : ids.shape[1]], with_distributions=True)


def close(found: Draft, expected: Draft) -> None:
    assert found.tokens == expected.tokens
    assert found.scores == pytest.approx(expected.scores, abs=1e-4)
    assert len(found.drawn) == len(expected.drawn)
    for one, other in zip(found.drawn, expected.drawn, strict=True):
        assert one.token == other.token
        assert sorted(one.candidates) == sorted(other.candidates)
        np.testing.assert_allclose(
            one.probabilities[np.argsort(one.candidates)],
            other.probabilities[np.argsort(other.candidates)],
            atol=1e-4,
        )


@pytest.mark.parametrize(
    "wanted",
    [
        {0: 4, 1: 4, 2: 4, 3: 4},
        {0: 6, 1: 2, 3: 3},
        {2: 2, 1: 2},
        {3: 5},
    ],
)
@pytest.mark.parametrize("drawn", [False, True])
def test_together_and_alone(
    drafter: BackboneDrafter[Any, Any], wanted: dict[int, int], drawn: bool
) -> None:
    asks = [
        DraftAsk(seq, ANCHORS[seq], width, drawing(seq) if drawn else None)
        for seq, width in wanted.items()
    ]
    alone = [drafter.draft(*ask) for ask in asks]
    for _ in range(2):
        for found, expected in zip(drafter.draft_many(asks), alone, strict=True):
            close(found, expected)
    assert [drafter.covered(seq) for seq in range(4)] == list(LENGTHS)


def test_leads_together_and_alone(drafter: BackboneDrafter[Any, Any]) -> None:
    asks = [DraftAsk(seq, ANCHORS[seq], 6, lead=(7, 9 + seq)[: seq % 3]) for seq in range(4)]
    if not drafter.follows:
        with pytest.raises(UsageError, match="cannot follow a lead"):
            drafter.draft_many(asks)
        return
    asks.append(DraftAsk(0, ANCHORS[0], 4, lead=(7,)))
    for group in (asks[:4], [asks[4], *asks[1:4]]):
        alone = [drafter.draft(*ask) for ask in group]
        for found, expected, ask in zip(drafter.draft_many(group), alone, group, strict=True):
            close(found, expected)
            assert (found.led is None) == (not ask.lead)
            if found.led is not None and expected.led is not None:
                assert len(found.led.tokens) == ask.width - 1 - len(ask.lead)
                close(found.led, expected.led)
    for lead in ((1, 2, 3), (-1,), (1_000_000,)):
        with pytest.raises(UsageError, match="the lead"):
            drafter.draft(0, 5, 4, None, lead)


def test_contexts_go_on_between_drafts(drafter: BackboneDrafter[Any, Any]) -> None:
    """Each sequence grows and is cut by itself; the same graph serves them all the time."""
    pair_rows = np.random.default_rng(0).standard_normal(
        (60, drafter.config.feature_size), np.float32
    )
    for turn in range(6):
        for seq in range(4):
            if turn % 3 == 2 and seq % 2:
                drafter.truncate(seq, max(0, drafter.covered(seq) - 1))
            count = 1 + (turn + seq) % 3
            drafter.add_context(seq, drafter.covered(seq), pair_rows[turn : turn + count])
        asks = [DraftAsk(seq, turn + seq, 4) for seq in range(4)]
        for found, ask in zip(drafter.draft_many(asks), asks, strict=True):
            close(found, drafter.draft(*ask))


def test_wrong_asks_are_refused_before_anything_is_computed(
    drafter: BackboneDrafter[Any, Any],
) -> None:
    for wrong in (DraftAsk(1, 5, 99), DraftAsk(1, -1, 3)):
        with pytest.raises(UsageError):
            drafter.draft_many([DraftAsk(0, 5, 3), wrong])
    assert drafter.draft_many([]) == []


def test_a_forgotten_sequence_takes_its_graphs_along(drafter: BackboneDrafter[Any, Any]) -> None:
    asks = [DraftAsk(seq, 5, 3) for seq in range(3)]
    before = drafter.draft_many(asks)
    drafter.forget(1)
    assert all(1 not in key[0] for key in drafter._shared_graphs)
    rest = drafter.draft_many([asks[0], asks[2]])
    close(rest[0], before[0])
    close(rest[1], before[2])
