"""The trainer end to end on a tiny target: it learns, resumes exactly, and survives bad days."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspine.errors import TrainingError, UsageError
from dspine.files import run_folder
from dspine.files.checkpoint import read_checkpoint, write_checkpoint
from dspine.files.gguf_file import read_header
from dspine.files.schema import tensor_specs
from dspine.train import checkpoints, setup, trainer
from dspine.train.options import Geometry
from dspine.train.shards import Shard, list_shards
from dspine.train.trainer import fit
from tests.support.fits import TAPS, losses, options, tiny_data, weights
from tests.support.training import pattern_shards


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and shards of a repeated pattern; `train` and `held` differ in phase."""
    return tiny_data(tmp_path_factory.mktemp("data"))


def test_acceptance_rises_on_a_pattern(data: Path, tmp_path: Path) -> None:
    result = fit(options(data, tmp_path, steps=120, learning_rate=4e-3, held_out=(data / "held",)))
    assert result.finished and result.steps == 120
    assert result.acceptance_length is not None and result.acceptance_length > 4.0
    assert result.best == result.checkpoint
    found = losses(tmp_path)
    assert found[120] < 0.3 * found[1]
    checkpoint = read_checkpoint(result.checkpoint)
    assert set(checkpoint.tensors) == {s.torch_name for s in tensor_specs(checkpoint.config)}
    assert len(checkpoint.record.acceptance_curve) == 4
    assert min(checkpoint.record.acceptance_curve) > 0.8
    assert checkpoint.record.provenance["steps"] == 120
    assert checkpoint.draft_vocab is not None and len(checkpoint.draft_vocab) == 160


@pytest.mark.parametrize("thinks", [True, False])
def test_whether_the_answers_hold_thoughts_is_recorded(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thinks: bool
) -> None:
    texts = read_header(data / "target.gguf").metadata["tokenizer.ggml.tokens"]
    shard = Shard.read(list_shards(data / "train")[0])
    seen = shard.tokens[shard.loss_mask > 0].tolist()
    assert isinstance(texts, tuple)
    mark = seen[0] if thinks else next(t for t in range(len(texts)) if t not in seen)
    monkeypatch.setattr(setup, "CLOSE", texts[mark])
    pair = read_checkpoint(fit(options(data, tmp_path, steps=1)).checkpoint).pair
    assert pair is not None and pair.thinking is thinks


def test_a_stopped_run_continues_as_if_nothing_had_happened(data: Path, tmp_path: Path) -> None:
    whole = fit(options(data, tmp_path / "whole"))
    assert whole.finished

    def stop_after_three(entry: Any) -> None:
        if entry["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    first = fit(options(data, tmp_path / "parts"), on_log=stop_after_three)
    assert not first.finished and first.steps == 3
    second = fit(options(data, tmp_path / "parts"))
    assert second.finished and second.steps == 8
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    one, other = weights(whole.checkpoint), weights(second.checkpoint)
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_killed_run_goes_back_to_its_last_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Death in the middle of writing a checkpoint: what was complete before is used."""
    whole = fit(options(data, tmp_path / "whole"))
    monkeypatch.setattr(trainer, "_seconds", Clock(step=60.0))
    written: list[int] = []
    real = write_checkpoint

    def die_at_the_third(folder: Path, *args: Any, **more: Any) -> None:
        real(folder, *args, **more)
        written.append(1)
        if len(written) == 3:
            raise Killed

    monkeypatch.setattr(checkpoints, "write_checkpoint", die_at_the_third)
    with pytest.raises(Killed):
        fit(options(data, tmp_path / "parts", checkpoint_minutes=0.5))
    names = sorted(p.name for p in (tmp_path / "parts").iterdir())
    assert names[:2] == ["checkpoint-00000001", "checkpoint-00000002"]
    assert names[2].endswith(".partial")
    monkeypatch.setattr(checkpoints, "write_checkpoint", real)
    result = fit(options(data, tmp_path / "parts"))
    assert result.finished
    one, other = weights(whole.checkpoint), weights(result.checkpoint)
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert not list((tmp_path / "parts").glob("*.partial"))


class Killed(BaseException):
    """Stands for SIGKILL: nothing may handle it."""


class Clock:
    """Every reading is `step` seconds after the one before."""

    def __init__(self, step: float) -> None:
        self.now = 0.0
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_full_disk_keeps_the_old_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(options(data, tmp_path, steps=2))
    before = weights(tmp_path / "checkpoint-00000002")

    def full(*_args: Any, **_more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match="the disk is full") as caught:
        fit(options(data, tmp_path, steps=4))
    assert "\n" not in str(caught.value)
    assert [p.name for p in run_folder.list_checkpoints(tmp_path)] == ["checkpoint-00000002"]
    assert not list(tmp_path.glob("*.partial"))
    after = weights(tmp_path / "checkpoint-00000002")
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_keeps_the_last_two_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        (tmp_path / f"checkpoint-{step:08d}").mkdir()
    checkpoints.write_best(tmp_path, run_folder.Best("checkpoint-00000002", 2.5))
    (tmp_path / "checkpoint-00000006.partial").mkdir()
    checkpoints.prune(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best.json",
        "checkpoint-00000002",
        "checkpoint-00000004",
        "checkpoint-00000005",
    ]
    assert run_folder.read_best(tmp_path) == run_folder.Best("checkpoint-00000002", 2.5)


def test_a_kill_while_a_checkpoint_is_replaced_loses_neither(tmp_path: Path) -> None:
    """A run that is evaluated again writes its checkpoint anew under the same name."""
    for name in ("checkpoint-00000004", "checkpoint-00000005.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(name)
    checkpoints.prepare(tmp_path)
    assert [p.name for p in run_folder.list_checkpoints(tmp_path)] == [
        "checkpoint-00000004",
        "checkpoint-00000005",
    ]
    (tmp_path / "checkpoint-00000005.replaced").mkdir()
    checkpoints.prepare(tmp_path)
    assert not list(tmp_path.glob("*.replaced"))
    assert (tmp_path / "checkpoint-00000005" / "which").read_text().endswith("replaced")


def test_a_folder_that_takes_no_checkpoint_is_told_before_the_work(
    data: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(TrainingError, match="cannot be used for a run"):
            fit(options(data, folder), on_log=lambda _: pytest.fail("it trained"))


def test_new_shards_join_a_run(data: Path, tmp_path: Path) -> None:
    growing = tmp_path / "growing"
    pattern_shards(growing, data / "target.gguf", taps=TAPS, sequences=4, seed=5)
    tokens: list[int] = []

    def grow(entry: Any) -> None:
        tokens.append(entry["tokens"])
        if entry["step"] == 3:
            pattern_shards(growing, data / "target.gguf", taps=TAPS, sequences=4, seed=6)

    fit(options(data, tmp_path / "run", shards=(growing,), scan_steps=2), on_log=grow)
    assert tokens[:4] == [4 * 48] * 4
    assert tokens[4:] == [8 * 48] * 4


def test_time_budget_counts_earlier_parts(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learning rate goes on falling after a resumption and ends at the floor."""
    rates: list[float] = []

    def note(entry: Any) -> None:
        rates.append(entry["lr"])
        if len(rates) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(trainer, "_seconds", Clock(step=1.0))
    base = options(data, tmp_path, steps=None, minutes=2.0, warmup=0.0)
    first = fit(base, on_log=note)
    assert not first.finished
    monkeypatch.setattr(trainer, "_seconds", Clock(step=1.0))
    second = fit(base, on_log=note)
    assert second.finished
    assert all(a > b for a, b in itertools.pairwise(rates))
    assert rates[-1] < 0.2 * rates[0]
    elapsed = checkpoints.load_state(second.checkpoint)["elapsed"]
    assert 120 <= elapsed < 140


def test_runs_outside_the_main_thread(data: Path, tmp_path: Path) -> None:
    results: list[bool] = []
    thread = threading.Thread(
        target=lambda: results.append(fit(options(data, tmp_path, steps=1)).finished)
    )
    thread.start()
    thread.join()
    assert results == [True]


def test_signal_handlers_are_put_back(data: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    fit(options(data, tmp_path, steps=1))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shards": (Path("nowhere"),)}, "no feature shard in nowhere"),
        ({"draft_vocab_size": 100}, "multiple of 16"),
        ({"geometry": Geometry(mask_token_id=999, transfer_rank=16)}, "mask_token_id 999"),
    ],
)
def test_wrong_options_are_one_sentence(
    data: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message) as caught:
        fit(options(data, tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_another_geometry_does_not_continue_a_run(data: Path, tmp_path: Path) -> None:
    base = options(data, tmp_path, steps=1)
    fit(base)
    with pytest.raises(TrainingError, match=r"another drafter geometry \(top_k 4, not 2\)"):
        fit(dataclasses.replace(base, geometry=dataclasses.replace(base.geometry, top_k=2)))


def test_exactly_one_length(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="either steps or minutes"):
        options(data, tmp_path, minutes=3.0)
    with pytest.raises(UsageError, match="either steps or minutes"):
        options(data, tmp_path, steps=None)


def test_export_folds_the_feature_scale(data: Path, tmp_path: Path) -> None:
    result = fit(options(data, tmp_path, steps=1))
    state = checkpoints.load_state(result.checkpoint)
    expected = state["parameters"]["fc.weight"] * state["feature_scale"]
    found = torch.from_numpy(weights(result.checkpoint)["fc.weight"].copy())
    torch.testing.assert_close(found, expected.detach())
    assert float((state["feature_scale"] - 1).abs().max()) > 1e-3


def test_the_record_has_command_and_curves(data: Path, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 7, "lo\n')  # what a killed run may leave
    result = fit(options(data, tmp_path, steps=6, held_out=(data / "held",)))
    record = read_checkpoint(result.checkpoint).record.provenance
    assert record["command"]
    assert record["commit"] is None or len(str(record["commit"])) >= 40
    curves: Any = record["curves"]
    assert [entry["step"] for entry in curves["training"]] == [1, 2, 3, 4, 5, 6]
    assert curves["held_out"][-1]["acceptance_length"] == pytest.approx(result.acceptance_length)
