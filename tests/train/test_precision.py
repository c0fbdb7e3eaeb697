"""Products in bf16: when they are chosen, how near they come, and that a run with them resumes."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspine.cli.main import run_cli
from dspine.errors import UsageError
from dspine.files.checkpoint import read_checkpoint
from dspine.train import precision
from dspine.train.batches import Sampler, ShardPool, make_batch
from dspine.train.kinds import TeacherForcing, build, train_losses
from dspine.train.module import DSpineModule
from dspine.train.objective import DraftHead, StepWeights
from dspine.train.options import Geometry
from dspine.train.setup import drafter_config
from dspine.train.target import Target
from dspine.train.trainer import fit
from tests.support.fits import losses, options, tiny_data, weights


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [(("avx2", "amx_bf16"), "bf16"), (("avx2", "avx512_bf16", "amx_int8"), "f32"), ((), "f32")],
)
def test_auto_follows_the_matrix_units(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], expected: str
) -> None:
    assert precision.resolve("auto", flags) == expected
    monkeypatch.setattr(precision, "cpu_flags", lambda: frozenset(flags))
    assert precision.resolve("auto") == expected
    assert precision.resolve("f32") == "f32"
    assert precision.resolve("bf16") == "bf16"


def test_an_unknown_precision_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"precision is 'f16': choose one of auto, f32, bf16"):
        options(tmp_path, tmp_path, precision="f16")
    given = ["--shards", "x", "-o", str(tmp_path / "run"), "--steps", "1", "--precision", "f16"]
    assert run_cli(["train", "fit", *given]) == 2
    told = capsys.readouterr().err
    assert "--precision" in told and "f16" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("kind", ["dspine", "dflash", "dflash2"])
def test_losses_and_gradients_are_near_those_of_float32(data: Path, kind: str) -> None:
    chosen = options(data, data)
    geometry = replace(chosen.geometry, kind=kind, conv_group_size=8, selector_rank=8)
    with precision.apart(1) as thread:
        names = ("f32", "bf16")
        found = {name: thread.submit(one_step, data, geometry, name).result() for name in names}
    (total, gradient), (rough_total, rough_gradient) = found["f32"], found["bf16"]
    assert rough_total != total
    assert rough_total == pytest.approx(total, rel=0.02)
    assert float(torch.cosine_similarity(gradient, rough_gradient, dim=0)) > 0.99
    assert float(rough_gradient.norm() / gradient.norm()) == pytest.approx(1, rel=0.02)


def one_step(data: Path, geometry: Geometry, name: str) -> tuple[float, torch.Tensor]:
    """Total loss and the whole gradient of one step with random weights."""
    torch.manual_seed(5)
    chosen = options(data, data, geometry=geometry)
    target = Target.read(chosen.target)
    config = drafter_config(chosen, target)
    pool = ShardPool(chosen.shards, config)
    sampler = Sampler(pool, seed=3, anchors_per_step=64, anchors_per_sequence=8)
    sampler.add(pool.scan(), 0)
    module = build(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 1.0)
    if isinstance(module, DSpineModule):
        codes = torch.nn.functional.normalize(torch.randn_like(module.transfer_codes), dim=-1)
        module.transfer_codes.copy_(codes)
        module.transfer_ready.fill_(True)
    head = DraftHead.build(target.head, torch.arange(160))
    with precision.products(name):
        found = train_losses(
            module,
            target.embedding,
            head.to(precision.FORMATS[name]),
            make_batch(sampler.next(0), config),
            StepWeights(ce_share=0.5, beta=0.3, gamma=4.0),
            TeacherForcing(0.5, 1),
        )
    assert found.total.dtype == torch.float32
    torch.autograd.backward(found.total)
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert all(g.dtype == torch.float32 for g in gradients)
    return float(found.total.detach()), torch.cat([g.flatten() for g in gradients])


def test_a_stopped_bf16_run_continues_as_if_nothing_had_happened(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit(options(data, tmp_path / "whole", precision="bf16"))
    plain = fit(options(data, tmp_path / "plain", precision="f32"))
    assert losses(tmp_path / "plain") != losses(tmp_path / "whole")

    def stop_after_three(entry: Any) -> None:
        if entry["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    fit(options(data, tmp_path / "parts", precision="bf16"), on_log=stop_after_three)
    # auto goes on as the run began, also on a processor without matrix units.
    monkeypatch.setattr(precision, "cpu_flags", frozenset)
    parts = fit(options(data, tmp_path / "parts"))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    one, other = weights(whole.checkpoint), weights(parts.checkpoint)
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert all(value.dtype == np.float32 for value in one.values())
    for result, expected in ((whole, "bf16"), (parts, "bf16"), (plain, "f32")):
        recorded: Any = read_checkpoint(result.checkpoint).record.provenance["options"]
        assert recorded["precision"] == expected


def test_bf16_products_leave_the_calling_thread_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # ggml's products in a thread where torch's had changed the tile registers ended the process.
    used: set[int] = set()

    def noted(*arguments: Any) -> Any:
        used.add(threading.get_ident())
        return train_losses(*arguments)

    monkeypatch.setattr("dspine.train.trainer.train_losses", noted)
    fit(options(data, tmp_path, steps=2, precision="bf16"))
    assert used and threading.get_ident() not in used


@pytest.mark.parametrize("flags", [frozenset({"amx_bf16"}), frozenset[str]()])
def test_the_record_says_what_auto_was(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: frozenset[str]
) -> None:
    monkeypatch.setattr(precision, "cpu_flags", lambda: flags)
    result = fit(options(data, tmp_path, steps=1))
    recorded: Any = read_checkpoint(result.checkpoint).record.provenance["options"]
    assert recorded["precision"] == ("bf16" if flags else "f32")
