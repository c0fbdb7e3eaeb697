"""Whether drawn tokens have the distribution that a chain of samplers gives after all before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.support.toy_target import Probabilities

History = tuple[int, ...]


@dataclass(frozen=True)
class Fit:
    """Chi-square over all groups: the larger the statistic, the worse, and infinite where a token
    came that cannot come. `groups` were large enough to count.
    """

    statistic: float
    freedom: int
    groups: int


@dataclass
class _Group:
    """What was drawn after texts of one kind, and what was to be expected."""

    seen: Probabilities
    expected: Probabilities
    spread: Probabilities


def fit(
    tokens: Sequence[int],
    first: int,
    chances_of: Callable[[History], Probabilities],
    *,
    memory: int,
    alike: int,
    least: int = 50,
) -> Fit:
    """Tokens from index `first` on against `chances_of` the `memory` tokens before each one.

    Those with the same `alike` tokens before them make one group; groups of fewer than `least`
    are left out. Within a group the chances may differ from place to place: the sum of (seen -
    chance) is a martingale with the covariance sum of diag(p) - p p', so that the quadratic form
    with its inverse is chi-square distributed (with equal p it is Pearson's).
    """
    counts = _counted(tokens, first, memory, len(chances_of(tuple(tokens[:first]))))
    groups: dict[History, _Group] = {}
    impossible = 0
    for history, seen in counts.items():
        p, times = chances_of(history), seen.sum()
        impossible += int(seen[p == 0].sum())
        size = len(p)
        group = groups.setdefault(
            history[-alike:], _Group(np.zeros(size), np.zeros(size), np.zeros((size, size)))
        )
        group.seen += seen
        group.expected += times * p
        group.spread += times * (np.diag(p) - np.outer(p, p))
    statistics = [_chi_square(group) for group in groups.values() if group.seen.sum() >= least]
    return Fit(
        math.inf if impossible else sum(statistic for statistic, _ in statistics),
        sum(freedom for _, freedom in statistics),
        len(statistics),
    )


def surplus(
    tokens: Sequence[int],
    first: int,
    chances_of: Callable[[History], Probabilities],
    suspects_of: Callable[[History], npt.NDArray[np.bool_]],
    *,
    memory: int,
) -> float:
    """How many more tokens than expected are among the suspects of their place, in standard
    deviations: one number against one kind of error, and so more sensitive to it than `fit`.
    """
    more = spread = 0.0
    counts = _counted(tokens, first, memory, len(chances_of(tuple(tokens[:first]))))
    for history, seen in counts.items():
        suspects, times = suspects_of(history), seen.sum()
        chance = float(chances_of(history)[suspects].sum())
        more += seen[suspects].sum() - times * chance
        spread += times * chance * (1 - chance)
    return more / math.sqrt(spread)


def _counted(
    tokens: Sequence[int], first: int, memory: int, vocab: int
) -> dict[History, Probabilities]:
    """How often each token came after each text of `memory` tokens."""
    counts: dict[History, Probabilities] = {}
    for place in range(first, len(tokens)):
        history = tuple(tokens[max(0, place - memory) : place])
        counts.setdefault(history, np.zeros(vocab))[tokens[place]] += 1
    return counts


def _chi_square(group: _Group) -> tuple[float, int]:
    """Statistic and degrees of freedom; rare tokens count together."""
    order = np.argsort(group.expected)
    rare = int((np.cumsum(group.expected[order]) < 5).sum()) + 1
    rows = [np.isin(np.arange(len(order)), order[:rare])]
    rows += [np.arange(len(order)) == token for token in order[rare:]]
    merged = np.array(rows, float)
    off = merged @ (group.seen - group.expected)
    spread = merged @ group.spread @ merged.T
    values, vectors = np.linalg.eigh(spread)
    real = values > 1e-6 * group.seen.sum()
    along = (off @ vectors)[real]
    return float((along**2 / values[real]).sum()), int(real.sum())
