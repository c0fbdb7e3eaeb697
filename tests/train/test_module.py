"""The torch drafter: against the NumPy oracle, hand-computed injection, causality, masks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dspine.errors import TrainingError
from dspine.files.schema import tensor_specs
from dspine.train.backbone import block_bias, context_bias, rotary_tables
from dspine.train.chain import draft_chain, top_candidates, walk_chain
from dspine.train.module import DSpineModule, Injection
from tests.support.tiny_drafter import TinyPair, tiny_config
from tests.support.training import run_blocks, small_config, torch_module

INF = math.inf
WINDOWS = [(None, None), (6, 6), (20, None, 5)]


def write_matrix(injection: Injection, layer: int) -> torch.Tensor:
    return injection.get_parameter(f"writes.{layer}.weight").data


@pytest.mark.parametrize("windows", WINDOWS, ids=["full", "window", "mixed"])
@pytest.mark.parametrize("reduced", [None, 32])
def test_agrees_with_the_numpy_oracle(windows: tuple[int | None, ...], reduced: int | None) -> None:
    pair = TinyPair(tiny_config(windows, draft_vocab_size=reduced), seed=3, tied=False)
    module, oracle = torch_module(pair), pair.oracle()
    embedding, head = torch.from_numpy(pair.embedding), torch.from_numpy(pair.head)
    vocab = torch.arange(len(head)) if reduced is None else torch.tensor(pair.draft_vocab)
    rows = head[vocab.long()]
    contexts = [pair.features(30), pair.features(9)]
    blocks = [[(11, 30), (5, 17)], [(60, 9), (11, 1)]]
    sequences = [(torch.from_numpy(f), b) for f, b in zip(contexts, blocks, strict=True)]
    with torch.no_grad():
        output = run_blocks(module, embedding, sequences)
        anchors = torch.tensor([a for b in blocks for a, _ in b])
        best = top_candidates(output.hidden, rows, pair.config.top_k)[1]
        tokens = vocab[best].long()
        table = module.transition_table(output, anchors, tokens, best, rows)
        chain = draft_chain(module, output, anchors, rows, best, tokens)
    index = 0
    for features, pairs in zip(contexts, blocks, strict=True):
        for anchor, position in pairs:
            expected = oracle.draft(features[:position], anchor, pair.config.block_size)
            np.testing.assert_allclose(output.hidden[index], expected.hidden, atol=5e-5)
            np.testing.assert_allclose(output.last_state[index], expected.pre_injection, atol=5e-5)
            assert tokens[index].tolist() == expected.candidates
            np.testing.assert_allclose(table[index, 0, :1], expected.tables[0], atol=1e-4)
            for slot, oracle_table in enumerate(expected.tables[1:], start=1):
                np.testing.assert_allclose(table[index, slot], oracle_table, atol=1e-4)
            assert chain[index].tolist() == expected.tokens
            index += 1


def test_state_has_exactly_the_tensors_of_the_schema() -> None:
    config = tiny_config()
    state = DSpineModule(config).state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    assert shapes.pop("transfer_ready") == ()
    assert shapes == {s.torch_name: s.shape for s in tensor_specs(config)}


def test_injection_by_hand() -> None:
    """One slot, r = 2, m = 1: every number of the formula written out."""
    injection = DSpineModule(small_config()).injection
    with torch.no_grad():
        injection.readout(0).weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]))
        injection.message.weight.copy_(torch.tensor([[0.5, -1.0]]))
        injection.receiver_gate.weight.copy_(torch.tensor([[1.0, 0.0]]))
        injection.predecessor_gate.weight.copy_(torch.tensor([[0.0, 2.0]]))
        injection.bias.copy_(torch.tensor([0.25]))
        write_matrix(injection, 0).copy_(torch.tensor([[1.0], [0.0], [0.0], [-2.0]]))
    h = torch.tensor([3.0, 4.0, 0.0, 12.0])
    feature = injection.feature(0, h)
    # R h = (3, 4), length 5; times sqrt(2).
    torch.testing.assert_close(feature, torch.tensor([0.6, 0.8]) * 2**0.5)
    predecessor = torch.tensor([1.0, -1.0])
    gate = 1 / (1 + math.exp(-(0.6 * 2**0.5 - 2.0 + 0.25)))
    message = 0.5 + 1.0
    scale = 13.0 / 2.0
    expected = h + scale * gate * message * torch.tensor([1.0, 0.0, 0.0, -2.0])
    torch.testing.assert_close(injection.write(0, h, feature, predecessor), expected)


@pytest.fixture
def pair() -> TinyPair:
    return TinyPair(tiny_config((None, 7)), seed=5)


def hidden_of(
    module: DSpineModule, pair: TinyPair, context: torch.Tensor, anchors: list[tuple[int, int]],
    width: int | None = None,
) -> torch.Tensor:  # fmt: skip
    with torch.no_grad():
        embedding = torch.from_numpy(pair.embedding)
        return run_blocks(module, embedding, [(context, anchors)], width).hidden


@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_narrow_block_is_the_prefix_of_a_wide_one(pair: TinyPair, width: int) -> None:
    module, context = torch_module(pair), torch.from_numpy(pair.features(12))
    wide = hidden_of(module, pair, context, [(9, 12)])
    narrow = hidden_of(module, pair, context, [(9, 12)], width)
    torch.testing.assert_close(narrow, wide[:, : width - 1], atol=1e-5, rtol=1e-5)


def test_other_blocks_and_later_context_change_nothing(pair: TinyPair) -> None:
    module, context = torch_module(pair), torch.from_numpy(pair.features(20))
    alone = hidden_of(module, pair, context[:12], [(9, 12)])
    beside = hidden_of(module, pair, context, [(40, 3), (9, 12), (2, 20)])
    torch.testing.assert_close(beside[1:2], alone, atol=1e-5, rtol=1e-5)


def test_future_slots_cannot_alter_earlier_ones(pair: TinyPair) -> None:
    """Predecessors forced in slots 5 and later leave slots 1 ... 4 as they are."""
    module, context = torch_module(pair), torch.from_numpy(pair.features(12))
    embedding = torch.from_numpy(pair.embedding)
    codes = torch.zeros(1, pair.config.block_size - 1, pair.config.transfer_rank)
    hidden = []
    for late in (1.0, -1.0):
        forced = codes.clone()
        forced[:, 4:] = late
        with torch.no_grad():
            output = run_blocks(
                module,
                embedding,
                [(context, [(9, 12)])],
                true_codes=forced,
                replaced=torch.tensor([True]),
                replacement_layers=1,
            )
        hidden.append(output.hidden)
    torch.testing.assert_close(hidden[0][:, :4], hidden[1][:, :4])
    assert not torch.allclose(hidden[0][:, 4:], hidden[1][:, 4:])


def test_without_writes_codes_do_not_matter(pair: TinyPair) -> None:
    """Then the drafter is a causal DFlash: no path from the code table to the output."""
    module, context = torch_module(pair), torch.from_numpy(pair.features(12))
    before = hidden_of(module, pair, context, [(9, 12)])
    with torch.no_grad():
        module.transfer_codes.copy_(module.transfer_codes.roll(1, 0))
    assert not torch.allclose(hidden_of(module, pair, context, [(9, 12)]), before)
    with torch.no_grad():
        for i in range(pair.config.num_layers):
            write_matrix(module.injection, i).zero_()
    one = hidden_of(module, pair, context, [(9, 12)])
    with torch.no_grad():
        module.transfer_codes.copy_(module.transfer_codes.roll(1, 0))
    torch.testing.assert_close(hidden_of(module, pair, context, [(9, 12)]), one)


def test_information_moves_one_slot_per_layer(pair: TinyPair) -> None:
    """The anchor's code reaches slot i only after i writes: two layers, so slots 1 and 2."""
    module, context = torch_module(pair), torch.from_numpy(pair.features(12))
    with torch.no_grad():
        # Without attention inside the block, injection is the only way from slot to slot.
        for i in range(pair.config.num_layers):
            module.layer(i).self_attn.o_proj.weight.zero_()
    before = hidden_of(module, pair, context, [(9, 12)])
    with torch.no_grad():
        module.transfer_codes[9] *= -1
    after = hidden_of(module, pair, context, [(9, 12)])
    changed = (after - before).abs().amax(dim=-1)[0] > 1e-4
    assert changed.tolist() == [True, True, False, False, False]


def test_refining_slot_1_with_the_anchor_changes_nothing(pair: TinyPair) -> None:
    module, context = torch_module(pair), torch.from_numpy(pair.features(12))
    with torch.no_grad():
        output = run_blocks(module, torch.from_numpy(pair.embedding), [(context, [(9, 12)])])
        z = module.refine(
            output.last_state[:, 0], output.last_feature[:, 0], module.code(torch.tensor([9]))
        )
    torch.testing.assert_close(z, output.hidden[:, 0], atol=1e-6, rtol=1e-6)


def test_chain_equals_sequential_refinement(pair: TinyPair) -> None:
    module, context = torch_module(pair), torch.from_numpy(pair.features(12))
    head = torch.from_numpy(pair.head)
    with torch.no_grad():
        output = run_blocks(module, torch.from_numpy(pair.embedding), [(context, [(9, 12)])])
        best = top_candidates(output.hidden, head, pair.config.top_k)[1]
        chain = draft_chain(module, output, torch.tensor([9]), head, best, best)
        previous, expected = 9, []
        for slot in range(pair.config.block_size - 1):
            z = module.refine(
                output.last_state[0, slot],
                output.last_feature[0, slot],
                module.code(torch.tensor(previous)),
            )
            candidates = best[0, slot].tolist()
            previous = max(candidates, key=lambda token: float(head[token] @ z))
            expected.append(previous)
    assert chain[0].tolist() == expected


def test_walk_chain_by_hand() -> None:
    table = torch.zeros(1, 3, 2, 2)
    table[0, 0] = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    table[0, 1] = torch.tensor([[0.0, 9.0], [2.0, 1.0]])
    table[0, 2] = torch.tensor([[3.0, 4.0], [8.0, 0.0]])
    # Slot 1 takes 1; row 1 of slot 2 takes 0; row 0 of slot 3 takes 1.
    assert walk_chain(table).tolist() == [[1, 0, 1]]


def test_context_mask_at_the_window_edge() -> None:
    # Anchor 5, window 3: offset 0 sees 3 and 4, offset 1 sees 4, offset 2 sees nothing before it.
    bias = context_bias(torch.tensor([5]), torch.arange(7), 3, 3)
    seen = [[p for p in range(7) if bias[0, o, p] == 0] for o in range(3)]
    assert seen == [[3, 4], [4], []]


def test_context_mask_without_window_is_one_row() -> None:
    bias = context_bias(torch.tensor([2, 0]), torch.arange(4), 5, None)
    assert bias.tolist() == [[[0, 0, -INF, -INF]], [[-INF] * 4]]


def test_block_mask_is_causal_and_windowed() -> None:
    assert block_bias(3, None).tolist() == [[0, -INF, -INF], [0, 0, -INF], [0, 0, 0]]
    assert block_bias(3, 2).tolist() == [[0, -INF, -INF], [0, 0, -INF], [-INF, 0, 0]]


def test_rotary_tables_by_hand() -> None:
    cos, sin = rotary_tables(torch.tensor([3]), 4, 100.0)
    # Frequencies 1 and 100 ** -0.5 = 0.1, each for both halves.
    angles = torch.tensor([[3.0, 0.3, 3.0, 0.3]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_refuses_to_run_without_codes() -> None:
    config = small_config()
    module = DSpineModule(config)
    with pytest.raises(TrainingError, match="no transfer codes"):
        run_blocks(module, torch.zeros(10, 4), [(torch.zeros(3, 4), [(1, 3)])])
