"""The training run: steps, schedules, checkpoints, evaluation, resuming.

`fit(options)` starts a run or continues the one in its folder. A run may end at any moment: the
newest complete checkpoint holds the weights, the optimiser, the sampler and the generators.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspine.errors import TrainingError
from dspine.files.atomic import reason
from dspine.files.checkpoint import read_checkpoint
from dspine.files.run_folder import Best, list_checkpoints, read_best
from dspine.files.schema import TrainingRecord
from dspine.files.source import Source
from dspine.machine import physical_cores
from dspine.train import checkpoints
from dspine.train.batches import Sampler, ShardPool, make_batch
from dspine.train.evaluate import Evaluation, evaluate_shards
from dspine.train.initialise import initialise
from dspine.train.kinds import TeacherForcing, build, restore_frozen, train_losses
from dspine.train.module import DSpineModule
from dspine.train.objective import DraftHead, Losses, StepWeights
from dspine.train.options import FitOptions, FitResult, LogEntry, OnLog
from dspine.train.precision import FORMATS, apart, products, resolve, row_multiple
from dspine.train.provenance import provenance
from dspine.train.schedules import learning_rate
from dspine.train.setup import (
    as_plain,
    choose_vocabulary,
    drafter_config,
    geometry_differences,
    has_thoughts,
    read_held_out,
)
from dspine.train.start_from import fill_module, read_start
from dspine.train.stopping import stop_requests
from dspine.train.target import Target

_LOG = "log.jsonl"
_CURVE_POINTS = 40
_seconds = time.monotonic


def fit(options: FitOptions, on_log: OnLog | None = None) -> FitResult:
    """Train until the budget is spent or SIGINT / SIGTERM asks to stop.

    Continues from the newest checkpoint in `options.output` when there is one. Raises
    TrainingError or FileError with one sentence; what was written before stays valid.
    """
    threads = options.threads or physical_cores()
    torch.set_num_threads(threads)
    with stop_requests() as stop, apart(threads) as products_thread:
        return _Run(options, on_log).loop(stop, products_thread)


class _Run:
    def __init__(self, options: FitOptions, on_log: OnLog | None) -> None:
        self.options = options
        self.on_log = on_log
        self.folder = options.output
        checkpoints.prepare(self.folder)
        self.held_out = read_held_out(options.held_out)
        target = Target.read(options.target)
        self.pair = target.pair
        self.embedding = target.embedding
        known = list_checkpoints(self.folder)
        start: Source | None = None
        if options.init_from is None:
            self.config = drafter_config(options, target)
        else:
            # A run that goes on has its own checkpoints: the file may be gone by then.
            source = self.folder if known else options.init_from
            start = read_start(source, target.pair, options.shards, options.geometry.kind)
            self.config = start.config
        self.pool = ShardPool(options.shards, self.config, target.pair.fingerprint)
        self.sampler = Sampler(
            self.pool,
            seed=options.seed,
            anchors_per_step=options.anchors_per_step,
            anchors_per_sequence=options.anchors_per_sequence,
        )
        self.step = 0
        self.elapsed_before = 0.0
        self.anchors_seen = 0
        self.started = _seconds()
        self.last_evaluation: Evaluation | None = None
        if not known and start is not None:
            self._scan()
            self.draft_vocab = None if start.draft_vocab is None else start.draft_vocab.tolist()
            self.module = build(self.config)
            fill_module(self.module, start, self.pool.shards)
            self.optimiser = self._make_optimiser()
        elif not known:
            self._scan()
            self.draft_vocab = choose_vocabulary(options, target, self.pool)
            self.module = initialise(
                self.config,
                target,
                self.pool.shards,
                seed=options.seed,
                copy_layers=options.copy_layers,
            )
            self.optimiser = self._make_optimiser()
        else:
            self._resume(known[-1], target)
        thinking = has_thoughts(options.target, self.pool.shards)
        self.pair = replace(self.pair, thinking=thinking)
        vocab = None if self.draft_vocab is None else torch.tensor(self.draft_vocab)
        self.head = DraftHead.build(target.head, vocab)
        # What is recorded is what was computed. Evaluation takes the float32 head.
        self.options = replace(self.options, precision=resolve(self.options.precision))
        self.training_head = self.head.to(FORMATS[self.options.precision])

    # --- state ---------------------------------------------------------------------------------

    def _make_optimiser(self) -> torch.optim.AdamW:
        """Weight decay for matrices only."""
        if isinstance(self.module, DSpineModule) and not self.options.injection:
            # Writes start at zero, and stay there without a gradient.
            self.module.injection.requires_grad_(False)
        matrices = [p for p in self.module.parameters() if p.dim() == 2]
        vectors = [p for p in self.module.parameters() if p.dim() != 2]
        groups = [
            {"params": matrices, "weight_decay": self.options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)

    def _resume(self, checkpoint: Path, target: Target) -> None:
        state = checkpoints.load_state(checkpoint)
        if self.options.precision == "auto":
            began_with = state.get("precision", "f32")
            self.options = replace(self.options, precision=began_with)
        if differences := geometry_differences(state["config"], self.config):
            raise TrainingError(
                f"{self.folder} holds a run of another drafter geometry ({differences}): use its "
                f"options or another output folder"
            )
        if state["fingerprint"] != self.pair.fingerprint:
            raise TrainingError(
                f"{self.folder} holds a run for another target than {target.path.name}: name that "
                f"target or another output folder"
            )
        self.draft_vocab = state["draft_vocab"]
        self.module = build(self.config)
        # The stored codes: making them again could turn an eigenvector by a rounding.
        restore_frozen(self.module, read_checkpoint(checkpoint).tensors)
        self.module.load_state_dict(state["parameters"], strict=False)
        self.module.feature_scale.copy_(state["feature_scale"])
        self.optimiser = self._make_optimiser()
        self.optimiser.load_state_dict(state["optimiser"])
        self.sampler.restore(state["sampler"])
        self.step = state["step"]
        self.elapsed_before = state["elapsed"]
        self.anchors_seen = state["anchors_seen"]
        torch.set_rng_state(state["generator"])

    def _state(self) -> dict[str, object]:
        return {
            "config": as_plain(self.config),
            "fingerprint": self.pair.fingerprint,
            "draft_vocab": self.draft_vocab,
            "parameters": dict(self.module.named_parameters()),
            "feature_scale": self.module.feature_scale,
            "optimiser": self.optimiser.state_dict(),
            "sampler": self.sampler.state(),
            "step": self.step,
            "elapsed": self.elapsed,
            "anchors_seen": self.anchors_seen,
            "generator": torch.get_rng_state(),
            "precision": self.options.precision,
        }

    # --- progress ------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        """Seconds of this run, earlier parts included."""
        return self.elapsed_before + _seconds() - self.started

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        if self.options.steps is not None:
            return self.step / self.options.steps
        assert self.options.minutes is not None
        return self.elapsed / (60 * self.options.minutes)

    def _scan(self) -> None:
        new = self.pool.scan()
        if new:
            self.sampler.add(new, self.step)

    # --- the loop ------------------------------------------------------------------------------

    def loop(self, stop: threading.Event, products_thread: Executor) -> FitResult:
        options = self.options
        last_save = last_evaluation = _seconds()
        saved_step = self.step if list_checkpoints(self.folder) else -1
        window: list[tuple[Losses, float]] = []
        window_start, window_anchors = _seconds(), self.anchors_seen
        while self.progress < 1 and not stop.is_set():
            if self.step % options.scan_steps == 0:
                self._scan()
            window.append(products_thread.submit(self._train_step).result())
            if self.step % options.log_steps == 0:
                now = _seconds()
                rate = (self.anchors_seen - window_anchors) / (now - window_start)
                self._log(self._summary(window, rate))
                window, window_start, window_anchors = [], now, self.anchors_seen
            now = _seconds()
            if self.held_out and now - last_evaluation >= 60 * options.evaluate_minutes:
                self._evaluate_and_save(options.evaluate_tokens)
                last_save = last_evaluation = _seconds()
                saved_step = self.step
            elif now - last_save >= 60 * options.checkpoint_minutes:
                self._save()
                last_save, saved_step = _seconds(), self.step
        finished = not stop.is_set() or self.progress >= 1
        if finished and self.held_out:
            self._evaluate_and_save(options.evaluate_tokens)
        elif saved_step != self.step:
            self._save()
        best = read_best(self.folder)
        return FitResult(
            checkpoint=list_checkpoints(self.folder)[-1],
            best=None if best is None else self.folder / best.name,
            acceptance_length=None if best is None else best.acceptance_length,
            steps=self.step,
            finished=finished,
        )

    def _train_step(self) -> tuple[Losses, float]:
        options, progress = self.options, self.progress
        rate = learning_rate(
            progress,
            peak=options.learning_rate,
            warmup=options.warmup,
            floor=options.learning_rate_floor,
        )
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        widths = options.block_widths
        width = widths[self.step % len(widths)] if widths else None
        pieces = self.sampler.next(self.step)
        batch = make_batch(pieces, self.config, width, row_multiple(options.precision))
        schedule, injected = options.loss_schedule, options.injection
        with products(options.precision):
            losses = train_losses(
                self.module,
                self.embedding,
                self.training_head,
                batch,
                StepWeights(
                    ce_share=schedule.ce_share(progress),
                    beta=schedule.beta(self.step) if injected else 0.0,
                    gamma=options.gamma,
                    mass_threshold=options.mass_threshold,
                    refinement=options.refinement_weight if injected else 0.0,
                ),
                TeacherForcing(schedule.replacement(progress), options.replacement_layers),
            )
        if not bool(torch.isfinite(losses.total)):
            raise TrainingError(
                f"the loss is not a number at step {self.step}: lower the learning rate and "
                f"continue from the last checkpoint"
            )
        torch.autograd.backward(losses.total)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), options.clip)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        self.anchors_seen += len(batch.anchors)
        # The graph of the step must not outlive it in the log window.
        return replace(losses, total=losses.total.detach()), float(norm)

    # --- records -------------------------------------------------------------------------------

    def _summary(self, window: list[tuple[Losses, float]], rate: float) -> dict[str, object]:
        entry: dict[str, object] = {
            "step": self.step,
            "progress": round(self.progress, 5),
            "elapsed": round(self.elapsed, 1),
            "lr": float(f"{self.optimiser.param_groups[0]['lr']:.4g}"),
            "anchors": self.anchors_seen,
            "anchors_per_second": round(rate, 1),
            "epoch": self.sampler.epoch,
            "shards": len(self.pool.shards),
            "tokens": self.pool.num_tokens,
        }
        names = ("ce", "l1", "refine_ce", "refine_l1", "alignment", "accuracy", "coverage")
        for name in (*names, "chain_accuracy"):
            entry[name] = round(sum(getattr(w[0], name) for w in window) / len(window), 4)
        entry["loss"] = round(sum(float(w[0].total) for w in window) / len(window), 4)
        entry["gradient"] = round(sum(w[1] for w in window) / len(window), 3)
        return entry

    def _log(self, entry: LogEntry) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / _LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise TrainingError(
                f"cannot write {self.folder / _LOG}: {reason(error)}; the last checkpoint is "
                f"complete"
            ) from error
        if self.on_log is not None:
            self.on_log(entry)

    def _evaluate_and_save(self, max_tokens: int | None) -> None:
        began = _seconds()
        result = evaluate_shards(
            self.module, self.embedding, self.head, self.held_out, max_tokens=max_tokens
        )
        self.last_evaluation = result
        self._log(
            {
                "step": self.step,
                "elapsed": round(self.elapsed, 1),
                "evaluation": result.as_dict(),
                "seconds": round(_seconds() - began, 1),
            }
        )
        path = self._save(prune=False)
        best = read_best(self.folder)
        length = result.overall.acceptance_length
        if best is None or length > best.acceptance_length:
            checkpoints.write_best(self.folder, Best(path.name, length))
        checkpoints.prune(self.folder)

    def _save(self, *, prune: bool = True) -> Path:
        path = checkpoints.save(
            self.folder,
            self.step,
            self.module,
            self.pair,
            self._record(),
            self.draft_vocab,
            self._state(),
        )
        if prune:
            checkpoints.prune(self.folder)
        return path

    def _curves(self) -> dict[str, object]:
        """Losses and held-out acceptance over the run so far, thinned out, from the log."""
        try:
            text = (self.folder / _LOG).read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        # A killed run may have left half a line, and repeats the steps after its checkpoint.
        entries = {}
        for line in text.split("\n"):
            with suppress(ValueError):
                entry = json.loads(line)
                entries[entry["step"], "evaluation" in entry] = entry
        return {
            "training": _thinned([e for (_, held), e in sorted(entries.items()) if not held]),
            "held_out": [
                {"step": step, "acceptance_length": e["evaluation"]["acceptance_length"]}
                for (step, held), e in sorted(entries.items())
                if held
            ],
        }

    def _record(self) -> TrainingRecord:
        evaluation = self.last_evaluation
        curve = () if evaluation is None else evaluation.typical_curve
        return TrainingRecord(
            acceptance_curve=curve,
            provenance={
                **provenance(),
                "options": self.options.as_dict(),
                "steps": self.step,
                "anchors": self.anchors_seen,
                "seconds": round(self.elapsed),
                "shards": len(self.pool.shards),
                "tokens": self.pool.num_tokens,
                "epoch": self.sampler.epoch,
                "evaluation": {} if evaluation is None else evaluation.as_dict(),
                "curves": self._curves(),
            },
        )


def _thinned(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most _CURVE_POINTS log entries, evenly spaced, with what a curve needs."""
    stride = max(1, -(-len(entries) // _CURVE_POINTS))
    names = ("step", "anchors", "loss", "ce", "l1", "chain_accuracy")
    return [{name: entry[name] for name in names} for entry in entries[::stride]]
