"""Makes a local language model answer faster without changing what it says.

    import dspine

    with dspine.load() as engine:
        for event in engine.generate("Why is the sky blue?", max_tokens=100):
            ...

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspine.engine.compare import Comparison as Comparison
    from dspine.engine.compare import Divergence as Divergence
    from dspine.engine.engine import Engine as Engine
    from dspine.engine.engine import Result as Result
    from dspine.engine.events import Finish as Finish
    from dspine.engine.events import Prefill as Prefill
    from dspine.engine.events import Step as Step
    from dspine.engine.events import TokenLogprob as TokenLogprob
    from dspine.engine.load import load as load
    from dspine.engine.sampling import SamplingOptions as SamplingOptions
    from dspine.engine.scheduler import Scheduler as Scheduler
    from dspine.engine.session import Session as Session
    from dspine.engine.slots import SlotFacts as SlotFacts
    from dspine.engine.stats import ProposerStats as ProposerStats
    from dspine.engine.stats import Stats as Stats
    from dspine.errors import DspineError as DspineError
    from dspine.text.grammar import GrammarOptions as GrammarOptions

_HOMES = {
    "Comparison": "dspine.engine.compare",
    "Divergence": "dspine.engine.compare",
    "DspineError": "dspine.errors",
    "Engine": "dspine.engine.engine",
    "Finish": "dspine.engine.events",
    "GrammarOptions": "dspine.text.grammar",
    "Prefill": "dspine.engine.events",
    "ProposerStats": "dspine.engine.stats",
    "Result": "dspine.engine.engine",
    "Scheduler": "dspine.engine.scheduler",
    "SlotFacts": "dspine.engine.slots",
    "Session": "dspine.engine.session",
    "SamplingOptions": "dspine.engine.sampling",
    "Stats": "dspine.engine.stats",
    "Step": "dspine.engine.events",
    "TokenLogprob": "dspine.engine.events",
    "load": "dspine.engine.load",
}

__all__ = [
    "Comparison",
    "Divergence",
    "DspineError",
    "Engine",
    "Finish",
    "GrammarOptions",
    "Prefill",
    "ProposerStats",
    "Result",
    "SamplingOptions",
    "Scheduler",
    "Session",
    "SlotFacts",
    "Stats",
    "Step",
    "TokenLogprob",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("dspine")
    if name not in _HOMES:
        raise AttributeError(f"module 'dspine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
