"""DFlash and DFlash2 through the same trainer: what they minimise, that they learn and resume."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspine.errors import TrainingError, UsageError
from dspine.files.checkpoint import read_checkpoint
from dspine.files.convert import convert_checkpoint
from dspine.files.schema import DFlash2Config, DFlashConfig, DSpineConfig, tensor_specs
from dspine.train.backbone import BlockOutput
from dspine.train.batches import StepBatch
from dspine.train.dflash import DFlash2Module, DFlashModule
from dspine.train.evaluate_checkpoint import evaluate_checkpoint
from dspine.train.kinds import build
from dspine.train.losses import dflash_losses
from dspine.train.objective import DraftHead, StepWeights
from dspine.train.options import FitOptions
from dspine.train.schedules import LossSchedule
from dspine.train.trainer import fit
from tests.support.fits import losses, options, tiny_data, weights


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("data"))


def of_kind(kind: str, base: FitOptions, **geometry: Any) -> FitOptions:
    """The same run for another kind, with its published objective."""
    made = dataclasses.replace(base.geometry, kind=kind, selector_rank=8, **geometry)
    return dataclasses.replace(base, geometry=made, schedule=None)


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_acceptance_rises_on_a_pattern(kind: str, data: Path, tmp_path: Path) -> None:
    base = options(data, tmp_path, steps=120, learning_rate=4e-3, held_out=(data / "held",))
    result = fit(of_kind(kind, base))
    assert result.acceptance_length is not None and result.acceptance_length > 4.0
    assert losses(tmp_path)[120] < 0.3 * losses(tmp_path)[1]
    checkpoint = read_checkpoint(result.checkpoint)
    assert checkpoint.config.kind.lower() == kind
    assert checkpoint.config.causal == (False, False)
    assert set(checkpoint.tensors) == {s.torch_name for s in tensor_specs(checkpoint.config)}
    again = evaluate_checkpoint(tmp_path, data / "target.gguf", [data / "held"])
    assert again.overall.acceptance_length == pytest.approx(result.acceptance_length)
    assert sum(a.steps for a in again.answers) == again.overall.steps
    convert_checkpoint(tmp_path, tmp_path / "drafter.gguf", dtype="f32")
    file = evaluate_checkpoint(tmp_path / "drafter.gguf", data / "target.gguf", [data / "held"])
    assert file == again
    if kind == "dflash":
        assert again.overall.unary_steps == again.overall.steps == again.overall.expected_steps


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_a_stopped_run_continues_as_if_nothing_had_happened(
    kind: str, data: Path, tmp_path: Path
) -> None:
    whole = fit(of_kind(kind, options(data, tmp_path / "whole")))

    def stop_after_three(entry: Any) -> None:
        if entry["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    first = fit(of_kind(kind, options(data, tmp_path / "parts")), on_log=stop_after_three)
    assert not first.finished and first.steps == 3
    second = fit(of_kind(kind, options(data, tmp_path / "parts")))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    one, other = weights(whole.checkpoint), weights(second.checkpoint)
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_causality_is_an_option(data: Path, tmp_path: Path) -> None:
    result = fit(of_kind("dflash", options(data, tmp_path, steps=1), causal=True))
    assert read_checkpoint(result.checkpoint).config.causal == (True, True)


def test_another_kind_does_not_continue_a_run(data: Path, tmp_path: Path) -> None:
    fit(of_kind("dflash", options(data, tmp_path, steps=1)))
    with pytest.raises(Exception, match="another drafter geometry"):
        fit(of_kind("dflash2", options(data, tmp_path, steps=1)))


def test_without_injection_writes_stay_zero(data: Path, tmp_path: Path) -> None:
    base = options(data, tmp_path, steps=6, held_out=(data / "held",))
    result = fit(dataclasses.replace(base, injection=False))
    checkpoint = read_checkpoint(result.checkpoint)
    assert isinstance(checkpoint.config, DSpineConfig)
    for layer in range(checkpoint.config.num_layers):
        assert not np.asarray(checkpoint.tensors[f"injection.writes.{layer}.weight"]).any()
    found = evaluate_checkpoint(tmp_path, data / "target.gguf", [data / "held"]).overall
    assert found.steps == found.unary_steps
    with pytest.raises(UsageError, match="no injection"):
        dataclasses.replace(of_kind("dflash", base), injection=False)


def test_each_kind_has_its_published_share_of_cross_entropy(data: Path, tmp_path: Path) -> None:
    shares = {
        kind: of_kind(kind, options(data, tmp_path)).loss_schedule.ce_share(0.9)
        for kind in ("dspine", "dflash", "dflash2")
    }
    assert shares == {"dspine": 0.1, "dflash": 1.0, "dflash2": 1.0}
    assert LossSchedule.of("dflash").ce_share(0.2) == 1.0


def test_an_unknown_kind_is_a_sentence(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="kind is 'dflash3'"):
        of_kind("dflash3", options(data, tmp_path))


def test_a_run_begins_with_a_drafter_of_its_kind(data: Path, tmp_path: Path) -> None:
    """One step at a rate of almost nothing leaves the weights where they were."""
    first = fit(of_kind("dflash2", options(data, tmp_path / "first", steps=30)))
    base = options(
        data, tmp_path / "second", steps=1, learning_rate=1e-9, init_from=first.checkpoint
    )
    second = fit(of_kind("dflash2", base))
    one, other = weights(first.checkpoint), weights(second.checkpoint)
    for name, array in one.items():
        np.testing.assert_allclose(other[name], array, atol=1e-6, err_msg=name)
    with pytest.raises(TrainingError, match="is a DFlash2 drafter: say so with --kind dflash2"):
        fit(of_kind("dflash", dataclasses.replace(base, output=tmp_path / "third")))


# --- the objective, recomputed slot by slot ------------------------------------------------------

VOCAB, HIDDEN, SLOTS = 20, 6, 3


def config(kind: type[DFlashConfig | DFlash2Config]) -> DFlashConfig | DFlash2Config:
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 2,
        "vocab_size": VOCAB,
        "target_hidden_size": HIDDEN,
        "block_size": SLOTS + 1,
        "taps": (1,),
        "mask_token_id": 0,
        "windows": (None,),
        "causal": (False,),
    }
    if kind is DFlashConfig:
        return DFlashConfig(**values)
    return DFlash2Config(**values, conv_group_size=2, selector_rank=4, top_k=5)


def step(generator: torch.Generator) -> tuple[StepBatch, Tensor]:
    """Two blocks of which the second ends after one slot; hidden states of their slots."""
    teacher = torch.zeros(2, SLOTS, 64)
    teacher[..., 0] = 1.0
    labels = torch.randint(1, VOCAB, (2, SLOTS), generator=generator)
    supervised = torch.tensor([[True] * SLOTS, [True] + [False] * (SLOTS - 1)])
    batch = StepBatch(
        features=torch.zeros(0, HIDDEN),
        context_positions=torch.zeros(0, dtype=torch.long),
        views=(),
        anchor_positions=torch.tensor([3, 4]),
        anchors=torch.tensor([5, 6]),
        labels=labels * supervised,
        supervised=supervised,
        teacher_ids=labels[..., None].expand(-1, -1, 64),
        teacher_probs=teacher,
    )
    return batch, 2 * torch.randn(2, SLOTS, HIDDEN, generator=generator)


def test_dflash_is_cross_entropy_with_decay() -> None:
    generator = torch.Generator().manual_seed(1)
    batch, hidden = step(generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    module = build(config(DFlashConfig))
    assert isinstance(module, DFlashModule)
    found = dflash_losses(
        module,
        BlockOutput(hidden),
        batch,
        DraftHead.build(head, None),
        StepWeights(ce_share=1.0, beta=0.0, gamma=2.0),
    )
    total = scale = 0.0
    for block, slot in ((0, 0), (0, 1), (0, 2), (1, 0)):
        weight = math.exp(-slot / 2.0)
        log_p = torch.log_softmax(head @ hidden[block, slot], dim=0)
        total -= weight * float(log_p[batch.labels[block, slot]])
        scale += weight
    assert float(found.total) == pytest.approx(total / scale, rel=1e-5)
    assert (found.refine_ce, found.alignment) == (0.0, 0.0)
    assert found.chain_accuracy == found.accuracy == found.coverage


def test_dflash2_adds_the_selector_after_the_true_predecessor() -> None:
    generator = torch.Generator().manual_seed(2)
    batch, hidden = step(generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    module = build(config(DFlash2Config))
    assert isinstance(module, DFlash2Module)
    selector = module.candidate_selector
    with torch.no_grad():
        selector.successor_codebook.copy_(torch.randn(VOCAB, 4, generator=generator))
        # The second block's label gets in among the candidates, those of the first mostly do not.
        hidden[1, 0] = 3 * head[batch.labels[1, 0]]
    found = dflash_losses(
        module,
        BlockOutput(hidden),
        batch,
        DraftHead.build(head, None),
        StepWeights(ce_share=1.0, beta=0.0, gamma=2.0, refinement=0.5),
    )
    total = scale = selected = 0.0
    for block, slot in ((0, 0), (0, 1), (0, 2), (1, 0)):
        weight = math.exp(-slot / 2.0)
        state, label = hidden[block, slot], int(batch.labels[block, slot])
        logits = head @ state
        total -= weight * float(torch.log_softmax(logits, dim=0)[label])
        scale += weight
        previous = int(batch.anchors[block] if slot == 0 else batch.labels[block, slot - 1])
        candidates = sorted(range(VOCAB), key=lambda t: -float(logits[t]))[:5]
        if label in candidates:
            gate = selector.predecessor_codebook[previous] * selector.hidden_projection(state)
            scores = torch.stack(
                [logits[c] + (gate * selector.successor_codebook[c]).sum() for c in candidates]
            )
            log_q = torch.log_softmax(scores, dim=0)[candidates.index(label)]
            selected -= weight * float(log_q.detach())
    assert selected > 0
    assert found.refine_ce == pytest.approx(selected / scale, rel=1e-4)
    assert float(found.total.detach()) == pytest.approx((total + 0.5 * selected) / scale, rel=1e-4)


def test_a_drafter_with_scales_is_not_trained() -> None:
    scaled = dataclasses.replace(config(DFlashConfig), logit_softcap=30.0)
    with pytest.raises(TrainingError, match=r"logit_softcap 30\.0, which training does not"):
        build(scaled)
