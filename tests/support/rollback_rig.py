"""Verifies, rollbacks and fresh runs on tiny targets of every kind of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.engine.llama_target import LlamaTarget
from dspine.engine.rollback import Rollback, RollbackMode, make_rollback
from dspine.llama.context import Context
from dspine.llama.model import Model
from tests.support.tiny_memories import tiny_gemma2, tiny_lfm2, tiny_mamba
from tests.support.tiny_models import tiny_llama, tiny_qwen35

TAPS = (0, 1)
N_BATCH = 64
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Kind:
    """A target and a mode that works on it."""

    architecture: str
    mode: RollbackMode
    make: Callable[..., Path]
    prompt: int = 12
    """Tokens of the prompt; more than a windowed cache of 256 cells holds for `gemma2`."""
    bound: float = 2e-4
    """How far a logit or a feature may lie from a fresh run in batches of another size."""

    def __str__(self) -> str:
        return f"{self.architecture}-{self.mode}"


KINDS = (
    Kind("llama", "trim", tiny_llama),
    # The library's GELU looks up a table of 16-bit numbers: steps of 1e-3.
    Kind("gemma2", "trim", tiny_gemma2, prompt=300, bound=1e-2),
    Kind("gemma2", "checkpoint", tiny_gemma2, prompt=300, bound=1e-2),
    Kind("qwen35", "snapshots", tiny_qwen35),
    Kind("qwen35", "checkpoint", tiny_qwen35),
    Kind("lfm2", "snapshots", tiny_lfm2),
    Kind("lfm2", "checkpoint", tiny_lfm2),
    Kind("lfm2-window", "snapshots", partial(tiny_lfm2, window=24), prompt=300),
    Kind("lfm2-window", "checkpoint", partial(tiny_lfm2, window=24), prompt=300),
    Kind("mamba", "checkpoint", tiny_mamba),
)


def open_context(model: Model, mode: RollbackMode, **changes: Any) -> Context:
    """A context as the engine makes it, with 32-bit caches so that rounding stays small."""
    options: dict[str, Any] = {
        "n_ctx": 512,
        "n_batch": N_BATCH,
        "n_threads": 1,
        "taps": TAPS,
        "cache_type_k": "f32",
        "cache_type_v": "f32",
        "snapshots": 15 if mode == "snapshots" else 0,
    }
    return Context(model, **options | changes)


def text(count: int, seed: int, vocab_size: int = 300) -> list[int]:
    """Random tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, vocab_size, count)]


class Rig:
    """One sequence of a context with its rollback, and the tokens that are confirmed."""

    def __init__(self, context: Context, mode: RollbackMode, sequence: int = 0) -> None:
        self.target = LlamaTarget(context, sequence)
        self.rollback: Rollback = make_rollback(mode, self.target)
        self.tokens: list[int] = []
        self.first_row = 0
        """Of the last verify: the row of the anchor; waiting tokens are before it."""

    @property
    def waiting(self) -> int:
        """Confirmed tokens before the anchor that are not in memory."""
        return len(self.tokens) - 1 - self.rollback.held

    def prefill(self, prompt: Sequence[int]) -> None:
        """All but the last token, in batches."""
        self.target.clear()
        self.tokens = list(prompt)
        end = len(prompt) - 1
        for first in range(0, end, N_BATCH):
            self.target.decode(prompt[first : min(first + N_BATCH, end)], first, "none")
        self.rollback.start(end)

    def verify(self, drafts: Sequence[int], keep: int) -> tuple[Logits, Logits]:
        """Verify `drafts`, keep the first `keep` of them; logits and features of what stays.

        The caller names the next anchor by `tokens.append`.
        """
        held, position = self.rollback.held, len(self.tokens) - 1
        self.first_row = position - held
        self.rollback.before_verify(len(drafts))
        batch = [*self.tokens[held:], *drafts]
        self.target.decode(batch, held, "all")
        rows = range(self.first_row, self.first_row + keep + 1)
        logits = np.stack([self.target.logits(row) for row in rows])
        features = self.target.features(self.first_row, keep + 1)
        self.tokens.extend(drafts[:keep])
        self.rollback.settle(held + len(batch), position + keep + 1)
        return logits, features


class Fresh:
    """The same tokens in an untouched context: what logits and features must be."""

    def __init__(self, model: Model, tokens: Sequence[int]) -> None:
        with open_context(model, "trim") as context:
            target = LlamaTarget(context)
            logits, features = [], []
            for first in range(0, len(tokens), N_BATCH):
                chunk = tokens[first : first + N_BATCH]
                target.decode(chunk, first, "all")
                logits += [target.logits(row).copy() for row in range(len(chunk))]
                features.append(target.features(0, len(chunk)))
        self.logits = np.stack(logits)
        self.features = np.concatenate(features)

    def check(self, position: int, found: tuple[Logits, Logits], bound: float) -> None:
        """Rows from `position` on; `bound` on logits and on features alike."""
        logits, features = found
        end = position + len(logits)
        expected = self.logits[position:end]
        assert np.abs(logits - expected).max() < bound
        assert (logits.argmax(1) == expected.argmax(1)).all()
        assert np.abs(features - self.features[position:end]).max() < bound
