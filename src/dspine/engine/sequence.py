"""The tokens of one request: the prompt, what was emitted, and where the anchor sits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dspine.errors import UsageError


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens two sequences share."""
    limit = min(len(one), len(other))
    if list(one[:limit]) == list(other[:limit]):
        return limit
    return next(i for i in range(limit) if one[i] != other[i])


class TokenSequence:
    """Prompt and emitted tokens. The newest one, the anchor, is not in the target's memory yet.

    Between two steps the target's memory holds exactly the positions before the anchor.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise UsageError("the prompt is empty: give at least one token of text")
        self.tokens: list[int] = list(prompt)
        self.prompt_length = len(self.tokens)

    @property
    def anchor(self) -> int:
        """The newest confirmed token."""
        return self.tokens[-1]

    @property
    def anchor_position(self) -> int:
        """Its position, which is also how many positions the memory holds."""
        return len(self.tokens) - 1

    @property
    def emitted(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    def extend(self, tokens: Iterable[int]) -> None:
        """Add confirmed tokens; the last one becomes the anchor."""
        self.tokens.extend(tokens)

    def truncate(self, length: int) -> None:
        """Forget tokens from index `length` on (an interrupted step)."""
        del self.tokens[length:]
