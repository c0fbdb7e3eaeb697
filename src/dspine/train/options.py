"""Everything that can be chosen about a training run, and what a run gives back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dspine.errors import UsageError
from dspine.train.precision import PRECISIONS
from dspine.train.schedules import LossSchedule
from dspine.train.target import KINDS

LogEntry = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The drafter's own sizes; the rest follows the target, the taps are those of the shards."""

    kind: str = "dspine"
    """dspine, dflash or dflash2."""
    num_layers: int = 3
    block_size: int = 8
    transfer_rank: int = 192
    message_size: int = 128
    top_k: int = 16
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 64
    causal: bool = False
    """Attention inside the block of DFlash and DFlash2; DSpine's is always causal."""
    window: int | None = 512
    intermediate_size: int | None = None
    mask_token_id: int = 16
    max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class FitOptions:
    """One training run. Exactly one of `steps` and `minutes` sets its length.

    With `minutes` the schedules follow elapsed time, over all resumptions together.
    """

    target: Path
    shards: tuple[Path, ...]
    output: Path
    steps: int | None = None
    minutes: float | None = None
    held_out: tuple[Path, ...] = ()
    geometry: Geometry = field(default_factory=Geometry)
    draft_vocab_size: int | None = 12288
    """None trains and drafts with the target's whole vocabulary."""
    vocabulary_answers: tuple[Path, ...] = ()
    """Answer files whose tokens are counted for the draft vocabulary; empty: the shards' labels."""
    init_from: Path | None = None
    """A drafter file, checkpoint or run to begin with: its sizes and draft vocabulary stand for
    `geometry` and `draft_vocab_size`. A run that goes on does not read it again."""
    copy_layers: bool = True
    learning_rate: float = 1e-3
    learning_rate_floor: float = 0.01
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    anchors_per_step: int = 128
    anchors_per_sequence: int = 32
    block_widths: tuple[int, ...] = ()
    """Widths of the blocks of successive steps, in turn; empty: always the whole block. In a causal
    drafter a narrow block is a prefix of the whole one and costs less; in others it is a block of
    its own."""
    gamma: float = 4.0
    schedule: LossSchedule | None = None
    """None: the published one of the kind."""
    replacement_layers: int = 2
    mass_threshold: float = 1e-4
    refinement_weight: float = 1.0
    """Of DSpine's refinement, of DFlash2's selector."""
    injection: bool = True
    """False keeps DSpine's writes at zero, for comparison: a causal DFlash in DSpine's form."""
    seed: int = 42
    precision: str = "auto"
    """Number format of the products: f32, bf16, or auto, which is bf16 where the processor has
    matrix units for it and otherwise f32. A run that goes on with auto keeps what it began with."""
    threads: int | None = None
    checkpoint_minutes: float = 5.0
    evaluate_minutes: float = 10.0
    evaluate_tokens: int = 3000
    log_steps: int = 10
    scan_steps: int = 20
    """New shards are looked for every so many steps."""

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise UsageError("give either steps or minutes: exactly one sets the length of a run")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"steps is {self.steps}: a run needs at least 1")
        if self.minutes is not None and not self.minutes > 0:
            raise UsageError(f"minutes is {self.minutes}: a run needs more than 0")
        if not self.shards:
            raise UsageError(
                "no shard folder is given: capture features and name theirs with --shards FOLDER"
            )
        for name in ("anchors_per_step", "anchors_per_sequence", "log_steps", "scan_steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("learning_rate", "gamma", "clip"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}: it must be above 0")
        if any(not 2 <= width <= self.geometry.block_size for width in self.block_widths):
            raise UsageError(
                f"block_widths are {list(self.block_widths)}: each must be from 2 to the block "
                f"size {self.geometry.block_size}"
            )
        if self.geometry.kind not in KINDS:
            raise UsageError(f"kind is {self.geometry.kind!r}: choose one of {', '.join(KINDS)}")
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"precision is {self.precision!r}: choose one of {', '.join(PRECISIONS)}"
            )
        if not self.injection and self.geometry.kind != "dspine":
            raise UsageError(
                f"a drafter of kind {self.geometry.kind} has no injection that could be left out: "
                f"leave no_injection out"
            )
        if not 0 <= self.warmup < 1:
            raise UsageError(f"warmup is {self.warmup}: it is a share of the run, 0 up to 1")

    @property
    def loss_schedule(self) -> LossSchedule:
        """The schedule of this run."""
        return self.schedule or LossSchedule.of(self.geometry.kind)

    def as_dict(self) -> dict[str, object]:
        """For a training record; paths become bare names, so that no machine's folders show."""
        options = dataclasses.asdict(dataclasses.replace(self, schedule=self.loss_schedule))
        text = json.dumps(options, default=lambda path: Path(path).name)
        loaded: dict[str, object] = json.loads(text)
        return loaded


@dataclass(frozen=True, slots=True)
class FitResult:
    """Where a run ended."""

    checkpoint: Path
    """The newest checkpoint."""
    best: Path | None
    """The one with the greatest held-out acceptance length, when that was measured."""
    acceptance_length: float | None
    """Of `best`."""
    steps: int
    finished: bool
    """False when a signal ended the run early; the same call continues it."""


OnLog = Callable[[LogEntry], None]
