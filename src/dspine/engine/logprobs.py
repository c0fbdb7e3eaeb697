"""Log-probabilities of the emitted tokens, noted where they are chosen."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dspine.engine.events import TokenLogprob
from dspine.errors import UsageError


class LogprobRecorder:
    """A `ChoiceListener` that notes the log-probability of every choice and the `count` best."""

    def __init__(self, count: int, vocab_size: int) -> None:
        if not 0 <= count <= vocab_size:
            raise UsageError(
                f"logprobs is {count}: ask for 0 to {vocab_size} tokens a place, this target's "
                f"vocabulary"
            )
        self._count = count
        self._noted: list[TokenLogprob] = []

    def chosen(self, logits: npt.NDArray[np.float32], token: int) -> None:
        best = float(logits.max())
        total = float(np.exp(logits - np.float32(best)).sum(dtype=np.float64))
        norm = best + float(np.log(total))
        top = tuple((index, float(logits[index]) - norm) for index in self._best(logits))
        self._noted.append(TokenLogprob(token, float(logits[token]) - norm, top))

    def take(self) -> tuple[TokenLogprob, ...]:
        """What was noted since the last call."""
        noted, self._noted = tuple(self._noted), []
        return noted

    def mark(self) -> int:
        """State to return to with `restore`; good until the next `take`."""
        return len(self._noted)

    def restore(self, mark: object) -> None:
        """Forget the choices since `mark`."""
        assert isinstance(mark, int)
        del self._noted[mark:]

    def _best(self, logits: npt.NDArray[np.float32]) -> list[int]:
        if not self._count:
            return []
        # All that tie with the last of them, so that the lowest ids win whatever their order.
        least = np.partition(logits, len(logits) - self._count)[len(logits) - self._count]
        ids = np.flatnonzero(logits >= least)
        order = np.argsort(-logits[ids], kind="stable")[: self._count]
        return [int(index) for index in ids[order]]
