"""Random numbers by place: a function of seed, purpose, position and token, without any state.

Two decodings that come to the same place by other ways meet the same numbers there.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF

_U_GOLDEN = np.uint64(_GOLDEN)
_U_MIX_1, _U_MIX_2 = np.uint64(_MIX_1), np.uint64(_MIX_2)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)
_SHIFT_12 = np.uint64(12)


class Purpose(IntEnum):
    """Numbers for one purpose are independent of those for another."""

    SAMPLE = 1
    """The target's own draw."""
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4
    EXCLUDE = 5
    """The coin of XTC."""


class Noise:
    """All random numbers of one request.

    The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014): purpose and position choose the start of a sequence, the token the place
    in it.
    """

    def __init__(self, seed: int) -> None:
        self._seed = _mix(seed & _MASK)

    def uniform(self, purpose: Purpose, position: int) -> float:
        """A number in (0, 1)."""
        return (float(_mix(self._start(purpose, position) + _GOLDEN) >> 12) + 0.5) * 2.0**-52

    def gumbel(
        self, purpose: Purpose, position: int, tokens: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float64]:
        """Standard Gumbel noise for each token (n,): adding it to logits and taking the arg-max
        draws from their softmax.
        """
        return _gumbel(np.uint64(self._start(purpose, position)), tokens)

    def gumbel_rows(
        self, purpose: Purpose, position: int, tokens: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.float64]:
        """The same for tokens (rows, n) of `position`, `position + 1`, ..."""
        starts = [self._start(purpose, position + row) for row in range(len(tokens))]
        return _gumbel(np.array(starts, np.uint64)[:, None], tokens)

    def _start(self, purpose: Purpose, position: int) -> int:
        return _mix(_mix(self._seed + purpose * _GOLDEN) + position * _GOLDEN)


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _gumbel(
    start: np.uint64 | npt.NDArray[np.uint64], tokens: npt.NDArray[np.int32]
) -> npt.NDArray[np.float64]:
    with np.errstate(over="ignore"):
        x = (tokens.astype(np.uint64) + np.uint64(1)) * _U_GOLDEN
        x += start
        x ^= x >> _SHIFT_30
        x *= _U_MIX_1
        x ^= x >> _SHIFT_27
        x *= _U_MIX_2
        x ^= x >> _SHIFT_31
    x >>= _SHIFT_12
    # 52 bits and a half: never 0 and never 1.
    u = (x.astype(np.float64) + 0.5) * 2.0**-52
    noise: npt.NDArray[np.float64] = -np.log(-np.log(u))
    return noise
