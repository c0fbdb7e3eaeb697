"""What an engine is made of, and what it needs of the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from dspine.drafters.base import Drafter
from dspine.engine.ngram_table import NgramTable
from dspine.engine.promise import Promise
from dspine.engine.prompt import TokenizerLike
from dspine.engine.rollback import RollbackMode
from dspine.engine.sampling import TokenSampler
from dspine.engine.target import Target, Together
from dspine.engine.width import WidthPlan, WidthPolicy
from dspine.llama.sampler_options import ChainOptions
from dspine.measured import Calibration
from dspine.text.chat_template import ChatTemplate

ProposerName = Literal["auto", "dspine", "ngram", "none"]


class EngineTokenizer(TokenizerLike, Protocol):
    """What the engine needs of the target's tokenizer."""

    def is_end(self, token: int) -> bool:
        """Whether an answer ends with it."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What is told about the target to those who ask."""

    context_train: int
    """Positions that it was trained for."""
    hidden_size: int
    num_parameters: int
    size_bytes: int
    """Of all its tensors."""


@dataclass(slots=True)
class EngineParts:
    """What an engine is made of; `dspine.engine.assemble` makes them from files, tests from fakes.

    `drafter` is None when there is none or when it does not pay here; `disabled_reason` says
    why, if one was asked for. `policy` knows the widths. `rollback` None is the mode that suits
    the memory. `close` frees everything.
    """

    model_path: Path
    target: Target
    tokenizer: EngineTokenizer
    policy: WidthPolicy
    proposer: ProposerName
    facts: TargetFacts | None = None
    template: ChatTemplate | None = None
    is_recurrent: bool = False
    rollback: RollbackMode | None = None
    rollback_reason: str = ""
    drafter: Drafter | None = None
    drafter_path: Path | None = None
    trained_on_thoughts: bool | None = None
    """Whether the drafter was, as its file says; None where it does not or nothing drafts."""
    max_positions: int = 0
    promise: Promise = field(default_factory=Promise)
    """What the drafter's file says of its first drafts, judged over all sequences."""
    ngram_min_match: int = 2
    ngram_table: NgramTable | None = None
    plan: WidthPlan | None = None
    calibration: Calibration | None = None
    disabled_reason: str | None = None
    notices: tuple[str, ...] = ()
    made_with: Mapping[str, Any] = field(default_factory=dict)
    """What a saved memory must agree in; see `dspine.engine.session_file`."""
    make_sampler: Callable[[ChainOptions, Sequence[int]], TokenSampler] | None = None
    """A sampler that has accepted these tokens; None where only arg-max is possible."""
    together: Together | None = None
    """The sequences of `target`'s context, whose first is `target`; None where it has only one."""
    make_policy: Callable[[], WidthPolicy] | None = None
    """A policy for one more sequence; needed where there are several."""
    rows_ms: Callable[[int], float] | None = None
    """Milliseconds of a decode of so many rows, where that was measured."""
    close: Callable[[], None] = field(default=lambda: None)

    @property
    def n_slots(self) -> int:
        """How many sequences there are."""
        return 1 if self.together is None else len(self.together.targets)
