"""Acceptance counted by hand, and against real block-by-block decoding of the drafter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dspine.errors import TrainingError
from dspine.train.chain import draft_chain, top_candidates
from dspine.train.evaluate import AcceptanceReport, Evaluation, evaluate_shards, simulate
from dspine.train.objective import DraftHead
from dspine.train.shards import Shard, ShardWriter, list_shards
from tests.support.tiny_drafter import TinyPair, tiny_config
from tests.support.training import add_sequence, run_blocks, torch_module


@pytest.mark.parametrize(
    ("accepted", "steps"),
    [([0, 0, 0], 3), ([2, 0, 0], 1), ([1, 9, 0, 0], 3), ([0, 2, 1, 0], 2), ([], 0)],
)
def test_simulated_decoding_by_hand(accepted: list[int], steps: int) -> None:
    assert simulate(np.array(accepted, dtype=np.int64)) == steps


def test_report_by_hand() -> None:
    report = AcceptanceReport(
        tokens=30, steps=12, unary_steps=15, expected_steps=10,
        slot_tried=(20, 10, 0), slot_accepted=(10, 4, 0),
        covered=(18, 9, 1), labels=(20, 18, 2),
    )  # fmt: skip
    assert report.acceptance_length == 2.5
    assert report.unary_acceptance_length == 2.0
    assert report.expected_acceptance_length == 3.0
    assert report.acceptance_curve == (0.5, 0.4, 0.0)
    assert report.coverage == (0.9, 0.5, 0.5)


def report(tokens: int, tried: tuple[int, ...], accepted: tuple[int, ...]) -> AcceptanceReport:
    return AcceptanceReport(tokens, tokens, tokens, tokens, tried, accepted, (), ())


def test_sources_count_alike_in_the_typical_curve() -> None:
    maths = report(5000, (1000, 800, 400, 0), (800, 400, 0, 0))
    prose = report(500, (100, 40, 20, 10), (40, 20, 10, 0))
    few = report(250, (50, 10, 0, 0), (10, 0, 0, 0))
    overall = report(5750, (1150, 850, 420, 10), (850, 420, 10, 0))
    both = Evaluation(overall, {"maths": maths, "prose": prose})
    assert both.typical_curve == pytest.approx((0.6, 0.5, 0.05 / 0.3, 0.0))
    three = Evaluation(overall, {"maths": maths, "prose": prose, "few": few})
    assert three.typical_curve[0] == pytest.approx((0.8 + 0.4 + 0.5 * 0.2) / 2.5)
    assert Evaluation(overall).typical_curve == overall.acceptance_curve


@pytest.fixture
def pair() -> TinyPair:
    return TinyPair(tiny_config((None, 9), draft_vocab_size=48), seed=8)


def held_out(pair: TinyPair, folder: Path, answers: list[list[int]], temperature: float) -> Shard:
    writer = ShardWriter(folder, taps=pair.config.taps, fingerprint="f")
    for i, tokens in enumerate(answers):
        features = pair.features(len(tokens)).astype(np.float64)
        add_sequence(
            writer, str(i), np.array(tokens), features,
            prompt=3, temperature=temperature, source="ab"[i % 2],
        )  # fmt: skip
    writer.flush()
    return Shard.read(list_shards(folder)[0])


def plain_decode(pair: TinyPair, shard: Shard, sequence: int) -> tuple[int, int]:
    """Tokens and verifies of decoding one stored answer, one block at a time."""
    module, rows = torch_module(pair), shard.sequence(sequence)
    tokens = shard.tokens[rows].tolist()
    features = shard.features_tensor()[rows].float()
    assert pair.draft_vocab is not None
    vocab = torch.tensor(sorted(pair.draft_vocab.tolist()))
    head = torch.from_numpy(pair.head)[vocab]
    position, steps = 3, 0
    while position < len(tokens) - 1:
        with torch.no_grad():
            output = run_blocks(
                module,
                torch.from_numpy(pair.embedding),
                [(features[:position], [(tokens[position], position)])],
            )
            best = top_candidates(output.hidden, head, pair.config.top_k)[1]
            anchor = torch.tensor([tokens[position]])
            chain = draft_chain(module, output, anchor, head, best, vocab[best])[0].tolist()
        accepted = 0
        for drafted, right in zip(chain, tokens[position + 1 :], strict=False):
            if drafted != right:
                break
            accepted += 1
        position += accepted + 1
        steps += 1
    return len(tokens) - 4, steps


def follow_drafter(pair: TinyPair, folder: Path) -> list[list[int]]:
    """Answers that agree with the drafter now and then, so that runs get accepted."""
    random = np.random.default_rng(1)
    answers = [random.integers(0, pair.config.vocab_size, 26).tolist() for _ in range(3)]
    module = torch_module(pair)
    assert pair.draft_vocab is not None
    vocab = torch.tensor(sorted(pair.draft_vocab.tolist()))
    head = torch.from_numpy(pair.head)[vocab]
    state = pair.random.bit_generator.state
    for tokens in answers:
        features = torch.from_numpy(pair.features(len(tokens)))
        for position, keep in ((4, 3), (9, 5), (16, 1)):
            with torch.no_grad():
                output = run_blocks(
                    module,
                    torch.from_numpy(pair.embedding),
                    [(features[:position], [(tokens[position], position)])],
                )
                best = top_candidates(output.hidden, head, pair.config.top_k)[1]
                anchor = torch.tensor([tokens[position]])
                chain = draft_chain(module, output, anchor, head, best, vocab[best])[0]
            tokens[position + 1 : position + 1 + keep] = chain[:keep].tolist()
    # The shard must get the very features the chains were made from.
    pair.random.bit_generator.state = state
    return answers


def test_equals_decoding_block_by_block(pair: TinyPair, tmp_path: Path) -> None:
    shard = held_out(pair, tmp_path, follow_drafter(pair, tmp_path), 0.0)
    assert pair.draft_vocab is not None
    # bfloat16 features of the shard differ from those the answers followed; decode with them.
    vocab = torch.tensor(sorted(pair.draft_vocab.tolist()))
    head = DraftHead.build(torch.from_numpy(pair.head), vocab)
    embedding = torch.from_numpy(pair.embedding)
    found = evaluate_shards(torch_module(pair), embedding, head, [shard])
    decoded = [plain_decode(pair, shard, i) for i in range(3)]
    assert found.overall.tokens == sum(t for t, _ in decoded)
    assert found.overall.steps == sum(s for _, s in decoded)
    assert found.overall.steps < found.overall.tokens
    assert found.by_source["a"].steps == decoded[0][1] + decoded[2][1]
    assert found.by_source["b"].tokens == decoded[1][0]


def test_only_temperature_0_counts(pair: TinyPair, tmp_path: Path) -> None:
    shard = held_out(pair, tmp_path, [list(range(10, 20))], 0.8)
    head = DraftHead.build(torch.from_numpy(pair.head), None)
    with pytest.raises(TrainingError, match="no answer at temperature 0"):
        evaluate_shards(torch_module(pair), torch.from_numpy(pair.embedding), head, [shard])


def test_a_cap_takes_fewer_answers(pair: TinyPair, tmp_path: Path) -> None:
    shard = held_out(pair, tmp_path, [list(range(10, 30))] * 6, 0.0)
    head = DraftHead.build(torch.from_numpy(pair.head), None)
    embedding = torch.from_numpy(pair.embedding)
    found = evaluate_shards(torch_module(pair), embedding, head, [shard], max_tokens=20)
    assert found.overall.tokens == 2 * 16
