"""The ggml drafter against the NumPy oracle: hidden states, candidates, tables, chains."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from dspine.drafters.dspine import DSpineDrafter, DSpineTrace
from dspine.files.dtypes import decode_rows
from dspine.ggml import HostTensor, quantise
from dspine.llama.library import find_library
from tests.support.numpy_dspine import NumpyDSpine, OracleDraft
from tests.support.tiny_drafter import FloatArray, TinyPair, tiny_config

ANCHOR = 11


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    find_library()


def cosines(found: FloatArray, expected: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return np.asarray((found * expected).sum(axis=1) / norms)


def assert_same(found: DSpineTrace, expected: OracleDraft) -> None:
    """F32 weights: everything equal up to rounding."""
    np.testing.assert_allclose(found.hidden, expected.hidden, atol=2e-5)
    np.testing.assert_allclose(found.pre_injection, expected.pre_injection, atol=2e-5)
    assert (cosines(found.hidden, expected.hidden) > 0.999999).all()
    assert list(found.draft.tokens) == expected.tokens
    tables = [found.first_row[None, :], *found.table]
    for slot, (table, oracle) in enumerate(zip(tables, expected.tables, strict=True)):
        # Candidates come in any order; bring both axes into the oracle's.
        ids = found.candidates[slot].tolist()
        assert sorted(ids) == sorted(expected.candidates[slot])
        columns = [ids.index(token) for token in expected.candidates[slot]]
        rows = [0]
        if slot:
            before = found.candidates[slot - 1].tolist()
            rows = [before.index(token) for token in expected.candidates[slot - 1]]
        np.testing.assert_allclose(table[np.ix_(rows, columns)], oracle, atol=5e-5)


@pytest.mark.parametrize("width", [2, 3, 6])
@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize(
    "windows",
    [(None, None), (6, 6), (3,), (20, None, 5)],
    ids=["full", "window", "narrow", "mixed"],
)
def test_hidden_states_tables_and_chain_are_the_oracles(
    windows: tuple[int | None, ...], count: int, width: int
) -> None:
    pair = TinyPair(tiny_config(windows), seed=count + width)
    features = pair.features(count)
    with pair.drafter() as drafter:
        drafter.add_context(0, 0, features)
        found = drafter.draft_trace(0, ANCHOR, width)
    assert_same(found, pair.oracle().draft(features, ANCHOR, width))


@pytest.mark.parametrize("draft_vocab_size", [None, 30])
@pytest.mark.parametrize("windows", [(None, None), (6,)], ids=["full", "one layer"])
def test_a_lead_goes_on_as_the_oracle_says(
    windows: tuple[int | None, ...], draft_vocab_size: int | None
) -> None:
    """With candidates of the slots and with tokens that are none, also beyond the drafter's own
    vocabulary; the block's own chain stays.
    """
    pair = TinyPair(tiny_config(windows, draft_vocab_size=draft_vocab_size), seed=21)
    pair.tensors[f"blk.{len(windows) - 1}.inj_write.weight"] *= 8.0
    features, oracle = pair.features(12), pair.oracle()
    expected = oracle.draft(features, ANCHOR, 6)
    found_any = 0
    with pair.drafter() as drafter:
        drafter.add_context(0, 0, features)
        for length in (1, 2, 4):
            candidates = expected.candidates[length - 1]
            others = [token for token in range(0, 80, 9) if token not in candidates]
            for last in (*candidates[:2], *others[:4]):
                lead = (*range(3, 2 + length), last)
                draft = drafter.draft(0, ANCHOR, 6, None, lead)
                assert list(draft.tokens) == expected.tokens
                tokens, scores = oracle.led(expected, lead)
                assert draft.led is not None and list(draft.led.tokens) == tokens
                np.testing.assert_allclose(draft.led.scores, scores, atol=1e-4)
                found_any += tokens != expected.tokens[length:]
        # Forced through the chain's own tokens, it is the chain.
        own = drafter.draft(0, ANCHOR, 6)
        led = drafter.draft(0, ANCHOR, 6, None, own.tokens[:3]).led
        assert led is not None and led.tokens == own.tokens[3:]
    assert found_any > 1, "the lead made no difference"


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_vocab_size": 30},
        {"num_heads": 4, "num_kv_heads": 4},
        {"num_heads": 5, "num_kv_heads": 1},
        {"top_k": 1},
        {"block_size": 16},
        {"taps": (0, 1, 2, 5)},
        {"transfer_rank": 5, "message_size": 3, "head_dim": 6, "hidden_size": 22},
    ],
    ids=["draft vocabulary", "mha", "mqa", "one candidate", "wide", "4 taps", "odd sizes"],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_other_geometries(changes: dict[str, object], tied: bool) -> None:
    pair = TinyPair(tiny_config((12, None), **changes), seed=3, tied=tied)
    features = pair.features(25)
    with pair.drafter(n_threads=2) as drafter:
        drafter.add_context(0, 0, features)
        width = pair.config.block_size
        found = drafter.draft_trace(0, ANCHOR, width)
    assert_same(found, pair.oracle().draft(features, ANCHOR, width))


def test_a_context_longer_than_the_ring() -> None:
    pair = TinyPair(tiny_config((30, 9)), seed=5)
    features = pair.features(700)
    with pair.drafter(n_ctx=1024) as drafter:
        for first in range(0, 700, 90):
            drafter.add_context(0, first, features[first : first + 90])
        assert drafter.covered(0) == 700
        found = drafter.draft_trace(0, ANCHOR, 6)
    assert_same(found, pair.oracle().draft(features, ANCHOR, 6))


def test_zero_writes_leave_a_causal_drafter_without_injection() -> None:
    pair = TinyPair(tiny_config((None, None)), seed=6)
    for i in range(2):
        pair.tensors[f"blk.{i}.inj_write.weight"][:] = 0
    features = pair.features(9)
    with pair.drafter() as drafter:
        drafter.add_context(0, 0, features)
        found = drafter.draft_trace(0, ANCHOR, 4)
    assert_same(found, pair.oracle().draft(features, ANCHOR, 4))
    # Without writes a slot's scores cannot depend on the candidate before it.
    assert np.ptp(found.table, axis=1).max() < 1e-5


@pytest.mark.parametrize(
    ("weights", "target", "cache", "least"),
    [
        ("f16", "f16", "f16", 0.99999),
        ("bf16", "f32", "f16", 0.999),
        ("q8_0", "q8_0", "f16", 0.999),
        ("q8_0", "q4_1", "f16", 0.98),
        ("q4_0", "q8_0", "f16", 0.9),
    ],
)
@pytest.mark.parametrize("draft_vocab_size", [None, 30])
def test_stored_types_stay_close(
    weights: str, target: str, cache: str, least: float, draft_vocab_size: int | None
) -> None:
    config = tiny_config((20, 20), draft_vocab_size=draft_vocab_size)
    pair = TinyPair(config, seed=7, tied=False)
    features = pair.features(30)
    with pair.drafter(type_name=weights, target_type=target, cache_type=cache) as drafter:
        drafter.add_context(0, 0, features)
        found = drafter.draft_trace(0, ANCHOR, 6)
    expected = pair.oracle().draft(features, ANCHOR, 6)
    assert cosines(found.hidden, expected.hidden).min() > least
    shared = [
        len(set(a) & set(b))
        for a, b in zip(found.candidates.tolist(), expected.candidates, strict=True)
    ]
    assert np.mean(shared) >= (4.5 if least > 0.99 else 3)


def test_scores_come_from_exact_head_rows_when_a_reduced_head_is_stored_for_speed() -> None:
    # A q4_1 head is copied as q8_0 to choose candidates; scores must use the q4_1 values.
    pair = TinyPair(tiny_config((None,), draft_vocab_size=40), seed=8)
    features = pair.features(10)
    with pair.drafter(target_type="q4_1") as drafter:
        drafter.add_context(0, 0, features)
        found = drafter.draft_trace(0, ANCHOR, 2)
    head = _decode_q4_1(pair)
    rows = head[found.candidates[0]]
    np.testing.assert_allclose(found.first_row, rows @ found.hidden[0], atol=1e-4)
    assert np.abs(rows - pair.head[found.candidates[0]]).max() > 0.01, "q4_1 differs from f32"


@pytest.mark.parametrize("draft_vocab_size", [None, 1500])
def test_candidates_are_the_best_by_exact_scores_although_the_heads_product_rounds(
    draft_vocab_size: int | None,
) -> None:
    # Among 2000 rows the scores around the last candidate lie closer than 8-bit rounding moves.
    config = tiny_config((None,), vocab_size=2000, top_k=16, draft_vocab_size=draft_vocab_size)
    pair = TinyPair(config, seed=12)
    head = HostTensor.quantised(pair.embedding, "q8_0")
    exact = decode_rows(head.data.reshape(config.vocab_size, -1), "q8_0", "head").astype(np.float64)
    ids = np.arange(config.vocab_size) if pair.draft_vocab is None else pair.draft_vocab
    features = pair.features(10)
    with pair.drafter(target_type="q8_0") as drafter:
        drafter.add_context(0, 0, features)
        for anchor in range(12):
            found = drafter.draft_trace(0, anchor, 6)
            for hidden, candidates in zip(found.hidden, found.candidates.tolist(), strict=True):
                scores = exact[ids] @ hidden
                best = ids[np.argsort(-scores)[: config.top_k]]
                assert set(candidates) == set(best.tolist())
            np.testing.assert_allclose(
                found.first_row, exact[found.candidates[0]] @ found.hidden[0], atol=1e-4
            )


def test_mixed_types_inside_one_stack() -> None:
    """Files may store v or down in a finer type than q, k and gate."""
    pair = TinyPair(tiny_config((None, 10)), seed=9)
    features = pair.features(12)
    tensors = dict(pair.stored("f32"))
    fine = pair.stored("f16")
    for name in tensors:
        if name.endswith(("attn_v.weight", "ffn_up.weight")) or name == "inj_message.weight":
            tensors[name] = fine[name]
    table = HostTensor.from_numpy(pair.embedding)
    with DSpineDrafter(
        pair.config, tensors, embedding=table, head=table, n_ctx=64, cache_type="f32"
    ) as drafter:
        drafter.add_context(0, 0, features)
        found = drafter.draft_trace(0, ANCHOR, 5)
    expected = pair.oracle().draft(features, ANCHOR, 5)
    assert cosines(found.hidden, expected.hidden).min() > 0.9999
    assert list(found.draft.tokens) == expected.tokens


def test_the_oracle_itself_knows_the_difference_that_an_anchor_makes() -> None:
    """Guards the oracle: its chain depends on anchor, context and position."""
    pair = TinyPair(tiny_config((None, None)), seed=10)
    features = pair.features(6)
    oracle: NumpyDSpine = pair.oracle()
    base = oracle.draft(features, ANCHOR, 4).hidden
    assert np.abs(base - oracle.draft(features, ANCHOR + 1, 4).hidden).max() > 0.01
    assert np.abs(base - oracle.draft(features[1:], ANCHOR, 4).hidden).max() > 0.01


def _decode_q4_1(pair: TinyPair) -> FloatArray:
    raw = quantise(pair.head, "q4_1").reshape(-1, 20)
    scale = raw[:, :2].copy().view(np.float16).astype(np.float32)
    least = raw[:, 2:4].copy().view(np.float16).astype(np.float32)
    low, high = raw[:, 4:] & 15, raw[:, 4:] >> 4
    values: FloatArray = np.concatenate((low, high), axis=1) * scale + least
    return values.reshape(pair.head.shape)
