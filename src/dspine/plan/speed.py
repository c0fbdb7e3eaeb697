"""Tokens a second on a device, from what a step costs and how many tokens it gives."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dspine.plan.acceptance import Acceptance
from dspine.plan.devices import DeviceModel


@dataclass(frozen=True, slots=True)
class Prediction:
    """One task at one width. Where something is not known, `least` and `most` bound it."""

    task: str
    width: int
    tokens: tuple[float, float]
    step_ms: tuple[float, float]
    speed: tuple[float, float]
    """Tokens a second, at least and at most."""
    gain: tuple[float, float]
    """Against plain decoding."""

    @property
    def is_known(self) -> bool:
        return self.speed[0] == self.speed[1]


@dataclass(frozen=True, slots=True)
class TaskSpeeds:
    """All widths of a task that can be told, width 1 being plain decoding."""

    task: str
    widths: tuple[Prediction, ...]

    @property
    def best(self) -> Prediction:
        """The known width of most tokens a second; the narrower one on a tie."""
        return max((p for p in self.widths if p.is_known), key=lambda p: (p.speed[0], -p.width))

    @property
    def undecided(self) -> tuple[int, ...]:
        """Widths that are not known and may be faster than the best one."""
        fastest = self.best.speed[0]
        return tuple(p.width for p in self.widths if not p.is_known and p.speed[1] > fastest)

    def at(self, width: int) -> Prediction | None:
        return next((p for p in self.widths if p.width == width), None)


def predict(
    device: DeviceModel, tasks: Iterable[Acceptance], depth: int = 0, most: int | None = None
) -> list[TaskSpeeds]:
    """The speed of every task at every width up to what device and acceptance tell (and `most`)."""
    plain = 1000.0 / device.plain_ms(depth)
    found = []
    for task in tasks:
        widest = min(device.widest, task.widest, most or device.widest)
        found.append(
            TaskSpeeds(
                task.task,
                tuple(_one(device, task, width, depth, plain) for width in range(1, widest + 1)),
            )
        )
    return found


def _one(device: DeviceModel, task: Acceptance, width: int, depth: int, plain: float) -> Prediction:
    tokens, step = task.tokens(width), device.step(width, depth)
    speed = (tokens.least / step.most * 1000.0, tokens.most / step.least * 1000.0)
    return Prediction(
        task.task,
        width,
        (tokens.least, tokens.most),
        (step.least, step.most),
        speed,
        (speed[0] / plain, speed[1] / plain),
    )
