"""Judging drafts, exactly: every outcome of all random decisions with its probability."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from dspine.drafters.base import Draft, Draw, Drawn
from dspine.engine.choose import Constraint
from dspine.engine.noise import Noise, Purpose
from dspine.engine.sampling import SamplingChooser, SamplingOptions
from dspine.llama.sampler import Candidates
from tests.support.fake_drafter import FakeDrafter
from tests.support.toy_answers import PURE, Forbid, answer
from tests.support.toy_target import OracleSampler, ToyTarget, softmax


class Tree:
    """Leads a program through every combination of its random decisions, one a run.

    `decide` is given the chances of the outcomes and returns the one of this run.
    """

    def __init__(self) -> None:
        self.path: list[int] = []
        self.at = 0
        self.widths: list[int] = []
        self.chance = 1.0

    def begin(self) -> None:
        self.at, self.widths, self.chance = 0, [], 1.0

    def decide(self, chances: Sequence[float]) -> int:
        if self.at == len(self.path):
            self.path.append(0)
        index = self.path[self.at]
        self.at += 1
        self.widths.append(len(chances))
        self.chance *= chances[index]
        return index

    def next(self) -> bool:
        """Go to the next combination; False after the last."""
        while self.path:
            self.path[-1] += 1
            if self.path[-1] < self.widths[len(self.path) - 1]:
                return True
            self.path.pop()
        return False


class DecidedNoise(Noise):
    """Uniform numbers on a grid which the ratios of the test lie on, so that nothing is lost."""

    def __init__(self, tree: Tree, grid: int) -> None:
        super().__init__(0)
        self.tree, self.grid = tree, grid

    def uniform(self, purpose: Purpose, position: int) -> float:
        if purpose != Purpose.ACCEPT:
            return 0.5
        return (self.tree.decide([1 / self.grid] * self.grid) + 0.5) / self.grid


class DecidedChooser(SamplingChooser):
    """Draws are decisions of the tree; how drafts are judged is the product's own code."""

    tree: Tree

    def _pick(self, candidates: Candidates, purpose: Purpose) -> int:
        chances = softmax(candidates.logits)
        possible = np.flatnonzero(chances > 0)
        return int(candidates.ids[possible[self.tree.decide(list(chances[possible]))]])


class DecidedDrafter(FakeDrafter):
    """Drafts are decisions of the tree, from the distributions that it reports."""

    def __init__(self, tree: Tree, q: Callable[[Sequence[int]], dict[int, float]]) -> None:
        super().__init__(lambda _tokens, count: [0] * count)
        self.tree, self.q = tree, q

    def draft(
        self,
        seq: int,
        anchor: int,
        width: int,
        draw: Draw | None = None,
        lead: tuple[int, ...] = (),
    ) -> Draft:
        before = [self.context[place] for place in range(self.covered(seq))]
        tokens, drawn = [*before, anchor], list[Drawn]()
        for _ in range(width - 1):
            q = self.q(tokens)
            ids, chances = np.array(list(q), np.int32), np.array(list(q.values()))
            tokens.append(int(ids[self.tree.decide(list(chances))]))
            drawn.append(Drawn(tokens[-1], ids, chances))
        return Draft(tuple(tokens[len(before) + 1 :]), (0.5,) * len(drawn), tuple(drawn))


P_ROWS = ((0.25, 0.75, 0.0), (0.5, 0.25, 0.25), (0.25, 0.25, 0.5))
Q_ROWS = ({0: 0.5, 1: 0.5}, {2: 0.5, 1: 0.5}, {0: 0.25, 1: 0.25, 2: 0.5})


def p_of(tokens: Sequence[int]) -> tuple[float, ...]:
    return P_ROWS[(tokens[-1] + 2 * tokens[-2]) % 3]


def q_of(tokens: Sequence[int]) -> dict[int, float]:
    return Q_ROWS[(2 * tokens[-1] + tokens[-2]) % 3]


def log_p(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
    with np.errstate(divide="ignore"):
        logits: npt.NDArray[np.float32] = np.log(np.array(p_of(tokens), np.float32))
    return logits


def outcomes(drafts: int, grid: int, constrained: bool, count: int) -> dict[tuple[int, ...], float]:
    """Probability of every answer of `count` tokens with rejection of drawn drafts."""
    tree, found = Tree(), dict[tuple[int, ...], float]()
    options = SamplingOptions(temperature=1.0, verification="rejection", **PURE)
    prompt = [0, 1]
    while True:
        tree.begin()
        target = ToyTarget(log_p, 3)
        constraint: Constraint | None = Forbid(prompt[-1]) if constrained else None
        sampler = OracleSampler(options, prompt)
        chooser = DecidedChooser(target, sampler, options, 2, constraint=constraint)
        chooser.tree = tree
        chooser._noise = DecidedNoise(tree, grid)
        tokens = answer(target, prompt, chooser, count, DecidedDrafter(tree, q_of), drafts)
        found[tuple(tokens)] = found.get(tuple(tokens), 0.0) + tree.chance
        if not tree.next():
            return found


def exact(count: int, constrained: bool) -> dict[tuple[int, ...], float]:
    """The same by the chain rule, from the target alone."""
    found = dict[tuple[int, ...], float]()
    for answer_tokens in product(range(3), repeat=count):
        tokens, chance = [0, 1], 1.0
        for token in answer_tokens:
            p = np.array(p_of(tokens))
            if constrained:
                p[tokens[-1]] = 0.0
            chance *= p[token] / p.sum()
            tokens.append(token)
        if chance:
            found[answer_tokens] = chance
    return found


@pytest.mark.parametrize(
    ("drafts", "grid", "constrained"),
    # Ratios p/q are multiples of 1/2; where a constraint renormalises p, of 1/6.
    [(1, 2, False), (2, 2, False), (2, 6, True)],
)
def test_rejection_gives_exactly_the_targets_distribution(
    drafts: int, grid: int, constrained: bool
) -> None:
    found, wanted = outcomes(drafts, grid, constrained, 3), exact(3, constrained)
    assert sum(found.values()) == pytest.approx(1.0)
    assert set(found) == set(wanted)
    for tokens, chance in wanted.items():
        assert found[tokens] == pytest.approx(chance, abs=1e-6)
