"""How learning rate, loss weights and teacher replacement move through a run.

`progress` is the fraction of the run that is done, 0 ... 1, whether measured in steps or time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self


def learning_rate(progress: float, *, peak: float, warmup: float, floor: float) -> float:
    """Linear warm-up over the first `warmup` of the run, then cosine down to `floor * peak`."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return peak * progress / warmup
    done = (progress - warmup) / (1.0 - warmup)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done)))


@dataclass(frozen=True, slots=True)
class LossSchedule:
    """The published schedules, plus an optional move of the CE weight."""

    ce_weight: float = 0.1
    """Weight of cross-entropy; 1 - ce_weight goes to L1. Reached at `mix_until`."""
    ce_weight_start: float = 1.0
    mix_until: float = 0.5
    alignment_weight: float = 0.5
    alignment_warmup_steps: int = 146
    replacement_probability: float = 0.5
    replacement_hold_ratio: float = 1 / 6
    replacement_end_ratio: float = 1 / 3

    @classmethod
    def of(cls, kind: str) -> Self:
        """The published one: DFlash and DFlash2 learn labels alone."""
        return cls() if kind == "dspine" else cls(ce_weight=1.0)

    def ce_share(self, progress: float) -> float:
        """Weight of cross-entropy: linear from `ce_weight_start` to `ce_weight`, then constant."""
        if self.mix_until <= 0 or progress >= self.mix_until:
            return self.ce_weight
        done = max(progress, 0.0) / self.mix_until
        return self.ce_weight_start + done * (self.ce_weight - self.ce_weight_start)

    def beta(self, step: int) -> float:
        """Weight of alignment: 0 at step 0, linear to `alignment_weight` over the warm-up steps."""
        if self.alignment_warmup_steps <= 0:
            return self.alignment_weight
        return self.alignment_weight * min(1.0, step / self.alignment_warmup_steps)

    def replacement(self, progress: float) -> float:
        """Chance that a block gets true predecessors: held, then linear to 0 at the end ratio."""
        hold, end = self.replacement_hold_ratio, self.replacement_end_ratio
        if progress <= hold:
            return self.replacement_probability
        if progress >= end:
            return 0.0
        return self.replacement_probability * (end - progress) / (end - hold)
