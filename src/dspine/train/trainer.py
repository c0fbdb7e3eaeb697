"""The training run: steps, schedules, checkpoints, evaluation, resuming.

`fit(options)` starts a run or continues the one in its folder. A run may end at any moment: the
newest complete checkpoint holds the weights, the optimiser, the sampler and the generators.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from dspine.errors import TrainingError
from dspine.files.atomic import reason
from dspine.files.checkpoint import read_checkpoint
from dspine.files.dtypes import to_float32
from dspine.files.run_folder import Best, list_checkpoints, read_best
from dspine.files.schema import DSpineConfig, TrainingRecord
from dspine.files.source import Source
from dspine.machine import physical_cores
from dspine.train import checkpoints
from dspine.train.batches import Sampler, ShardPool, StepBatch, make_batch
from dspine.train.evaluate import Evaluation, evaluate_shards
from dspine.train.initialise import initialise
from dspine.train.module import DSpineModule, block_embedding
from dspine.train.objective import DraftHead, Losses, StepWeights, step_losses
from dspine.train.options import FitOptions, FitResult, LogEntry, OnLog
from dspine.train.provenance import provenance
from dspine.train.schedules import learning_rate
from dspine.train.shards import Shard, list_shards, read_info
from dspine.train.start_from import fill_module, read_start
from dspine.train.target import Target
from dspine.train.vocabulary import count_answers, count_shards, most_frequent

_LOG = "log.jsonl"
_CURVE_POINTS = 40
_seconds = time.monotonic


def fit(options: FitOptions, on_log: OnLog | None = None) -> FitResult:
    """Train until the budget is spent or SIGINT / SIGTERM asks to stop.

    Continues from the newest checkpoint in `options.output` when there is one. Raises
    TrainingError or FileError with one sentence; what was written before stays valid.
    """
    torch.set_num_threads(options.threads or physical_cores())
    with _stop_requests() as stop:
        return _Run(options, on_log).loop(stop)


class _Run:
    def __init__(self, options: FitOptions, on_log: OnLog | None) -> None:
        self.options = options
        self.on_log = on_log
        self.folder = options.output
        self.held_out = _held_out(options.held_out)
        target = Target.read(options.target)
        self.pair = target.pair
        self.embedding = target.embedding
        known = list_checkpoints(self.folder)
        start: Source | None = None
        if options.init_from is None:
            self.config = _config(options, target)
        else:
            # A run that goes on has its own checkpoints: the file may be gone by then.
            source = self.folder if known else options.init_from
            self.config, start = read_start(source, target.pair, options.shards)
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
            self.module = DSpineModule(self.config)
            fill_module(self.module, start, self.pool.shards)
            self.optimiser = self._make_optimiser()
        elif not known:
            self._scan()
            self.draft_vocab = _draft_vocab(options, target, self.pool)
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
        vocab = None if self.draft_vocab is None else torch.tensor(self.draft_vocab)
        self.head = DraftHead.build(target.head, vocab)

    # --- state ---------------------------------------------------------------------------------

    def _make_optimiser(self) -> torch.optim.AdamW:
        """Weight decay for matrices only."""
        matrices = [p for p in self.module.parameters() if p.dim() == 2]
        vectors = [p for p in self.module.parameters() if p.dim() != 2]
        groups = [
            {"params": matrices, "weight_decay": self.options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)

    def _resume(self, checkpoint: Path, target: Target) -> None:
        state = checkpoints.load_state(checkpoint)
        if state["config"] != _as_plain(self.config):
            raise TrainingError(
                f"{self.folder} holds a run of another drafter geometry: use its options or "
                f"another output folder"
            )
        if state["fingerprint"] != self.pair.fingerprint:
            raise TrainingError(
                f"{self.folder} holds a run for another target than {target.path.name}: name that "
                f"target or another output folder"
            )
        self.draft_vocab = state["draft_vocab"]
        self.module = DSpineModule(self.config)
        # The stored codes: making them again could turn an eigenvector by a rounding.
        stored = to_float32(read_checkpoint(checkpoint).tensors["transfer_codes"])
        self.module.transfer_codes.copy_(torch.from_numpy(stored.copy()))
        self.module.transfer_ready.fill_(True)
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
            "config": _as_plain(self.config),
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

    def loop(self, stop: threading.Event) -> FitResult:
        options = self.options
        last_save = last_evaluation = _seconds()
        saved_step = self.step if list_checkpoints(self.folder) else -1
        window: list[tuple[Losses, float]] = []
        window_start, window_anchors = _seconds(), self.anchors_seen
        while self.progress < 1 and not stop.is_set():
            if self.step % options.scan_steps == 0:
                self._scan()
            window.append(self._train_step())
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
        batch = make_batch(self.sampler.next(self.step), self.config, width)
        losses = train_losses(
            self.module,
            self.embedding,
            self.head,
            batch,
            StepWeights(
                ce_share=options.schedule.ce_share(progress),
                beta=options.schedule.beta(self.step),
                gamma=options.gamma,
                mass_threshold=options.mass_threshold,
                refinement=options.refinement_weight,
            ),
            replacement=options.schedule.replacement(progress),
            replacement_layers=options.replacement_layers,
        )
        if not bool(torch.isfinite(losses.total)):
            raise TrainingError(
                f"the loss is not a number at step {self.step}: lower the learning rate and "
                f"continue from the last checkpoint"
            )
        torch.autograd.backward(losses.total)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), options.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=False)
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
        curve = () if evaluation is None else evaluation.overall.acceptance_curve
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


def train_losses(
    module: DSpineModule,
    embedding: Tensor,
    head: DraftHead,
    batch: StepBatch,
    weights: StepWeights,
    *,
    replacement: float,
    replacement_layers: int,
) -> Losses:
    """Forward pass of one step. A share `replacement` of the blocks gets true predecessors."""
    c = module.config
    true_codes = replaced = None
    if replacement > 0:
        previous = torch.cat([batch.anchors[:, None], batch.labels[:, :-1]], dim=1)
        true_codes = module.code(previous)
        replaced = torch.rand(len(batch.anchors)) < replacement
    output = module(
        block_embedding(embedding, batch.anchors, c.mask_token_id, batch.labels.shape[1] + 1),
        module.code(batch.anchors),
        batch.anchor_positions,
        module.context(batch.features, batch.context_positions),
        batch.context_positions,
        batch.views,
        true_codes=true_codes,
        replaced=replaced,
        replacement_layers=replacement_layers,
    )
    return step_losses(module, output, batch, head, weights)


def _config(options: FitOptions, target: Target) -> DSpineConfig:
    paths = [p for folder in options.shards for p in list_shards(folder)]
    if not paths:
        raise TrainingError(
            f"no feature shard in {', '.join(str(f) for f in options.shards)}: capture features "
            f"first"
        )
    g = options.geometry
    return target.drafter_config(
        num_layers=g.num_layers,
        block_size=g.block_size,
        taps=read_info(paths[0]).taps,
        transfer_rank=g.transfer_rank,
        message_size=g.message_size,
        top_k=g.top_k,
        window=g.window,
        mask_token_id=g.mask_token_id,
        intermediate_size=g.intermediate_size,
        draft_vocab_size=options.draft_vocab_size,
        max_positions=g.max_positions,
    )


def _held_out(folders: Sequence[Path]) -> list[Shard]:
    shards = []
    for folder in folders:
        found = list_shards(folder)
        if not found:
            raise TrainingError(
                f"no feature shard in the held-out folder {folder}: name the one that "
                f"`dspine train features --held-out-output` filled"
            )
        shards += [Shard.read(path) for path in found]
    return shards


def _draft_vocab(options: FitOptions, target: Target, pool: ShardPool) -> list[int] | None:
    if options.draft_vocab_size is None:
        return None
    if options.vocabulary_answers:
        counts = count_answers(options.vocabulary_answers, target.pair.vocab_size)
    else:
        counts = count_shards(pool.shards, target.pair.vocab_size)
    return most_frequent(counts, options.draft_vocab_size)


def _as_plain(config: DSpineConfig) -> dict[str, object]:
    plain: dict[str, object] = {f.name: getattr(config, f.name) for f in fields(config)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM set the event; the step in progress still ends and is saved."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {s: signal.signal(s, request) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
