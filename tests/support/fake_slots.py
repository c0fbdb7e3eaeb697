"""An engine with several slots, each on a scripted target of its own."""

from __future__ import annotations

from typing import Any

from dspine.engine.engine import Engine
from dspine.engine.width import FixedWidth
from tests.support.fake_engine import make_engine
from tests.support.fake_target import FakeTarget, FakeTargets


def make_slots(*targets: FakeTarget, drafts: int = 3, **parts: Any) -> Engine:
    """A slot for each target; proposals come from repeats of the text."""
    return make_engine(
        targets[0],
        drafts=drafts,
        together=FakeTargets(targets),
        make_policy=lambda: FixedWidth({"dspine": drafts, "ngram": drafts}),
        **parts,
    )
