"""One answer of a toy target, for tests of what is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.engine.choose import Chooser
from dspine.engine.emit import Emitter
from dspine.engine.loop import Run, Stepper, generate
from dspine.engine.plain import PlainStepper
from dspine.engine.proposers import DrafterProposer
from dspine.engine.rollback import TrimRollback
from dspine.engine.sequence import TokenSequence
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.width import FixedWidth
from dspine.text.forced import NOT_FORCED, Forced
from tests.support.engine_runs import collect
from tests.support.fake_drafter import FakeDrafter
from tests.support.toy_target import ToyTarget

PURE: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Nothing but the temperature."""


class Forbid:
    """A constraint: no token twice in a row."""

    def __init__(self, last: int) -> None:
        self.last = last

    def mask(self, logits: npt.NDArray[np.float32]) -> None:
        logits[self.last] = -np.inf

    def accept(self, token: int) -> None:
        self.last = token

    def allowed(self, drafts: Sequence[int]) -> int:
        last = self.last
        for count, token in enumerate(drafts):
            if token == last:
                return count
            last = token
        return len(drafts)

    def forced(self) -> Forced:
        return NOT_FORCED

    def mark(self) -> object:
        return self.last

    def restore(self, mark: object) -> None:
        assert isinstance(mark, int)
        self.last = mark


def answer(
    target: ToyTarget,
    prompt: Sequence[int],
    chooser: Chooser,
    max_tokens: int,
    drafter: FakeDrafter | None = None,
    drafts: int = 3,
) -> list[int]:
    """Tokens of one answer, plain without a drafter."""
    emitter = Emitter(lambda _: b"x", lambda _: False, max_tokens=max_tokens)
    run = Run(target, TokenSequence(prompt), emitter, chooser)
    stepper: Stepper = PlainStepper(run)
    if drafter is not None:
        policy = FixedWidth({"dspine": drafts})
        proposer = DrafterProposer(policy, drafter, target, max_positions=target.n_ctx)
        stepper = SpeculativeStepper(run, proposer, policy, TrimRollback(target))
    return collect(list(generate(run, stepper))).tokens
