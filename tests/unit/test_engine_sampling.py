"""Sampling: exact whatever is drafted, the same text for the same seed, nothing left behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.drafters.base import Draft, Draw, Drawn
from dspine.engine.choose import Chooser, Constraint
from dspine.engine.emit import Emitter
from dspine.engine.loop import Run, Stepper, generate
from dspine.engine.noise import Noise, Purpose
from dspine.engine.plain import PlainStepper
from dspine.engine.proposers import DrafterProposer
from dspine.engine.rollback import TrimRollback
from dspine.engine.sampling import SamplingChooser, SamplingOptions
from dspine.engine.sequence import TokenSequence
from dspine.engine.speculate import SpeculativeStepper
from dspine.engine.width import FixedWidth
from dspine.errors import UsageError
from dspine.llama.sampler import Candidates
from dspine.text.forced import NOT_FORCED, Forced
from tests.support.engine_runs import collect
from tests.support.fake_drafter import FakeDrafter
from tests.support.toy_target import (
    OracleSampler,
    ToyDrafter,
    ToyTarget,
    chi_square,
    is_plausible,
    softmax,
)

PURE: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Nothing but the temperature."""
VOCAB = 6


def random_logits(salt: int, memory: int = 2) -> Callable[[Sequence[int]], npt.NDArray[np.float32]]:
    """Logits that look random and depend on the last `memory` tokens."""

    @cache
    def of(seen: tuple[int, ...]) -> npt.NDArray[np.float32]:
        chance = np.random.default_rng([salt, *seen])
        return (1.5 * chance.standard_normal(VOCAB)).astype(np.float32)

    return lambda tokens: of(tuple(tokens[-memory:]))


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
        proposer = DrafterProposer(policy, drafter, target, max_positions=10_000)
        stepper = SpeculativeStepper(run, proposer, policy, TrimRollback(target))
    return collect(list(generate(run, stepper))).tokens


# -- exactness: every outcome of all random decisions, with its probability ----------------------


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

    def draft(self, seq: int, anchor: int, width: int, draw: Draw | None = None) -> Draft:
        before = [self.context[place] for place in range(self.covered(seq))]
        tokens, drawn = [*before, anchor], list[Drawn]()
        for _ in range(width - 1):
            q = self.q(tokens)
            ids, chances = np.array(list(q), np.int32), np.array(list(q.values()))
            tokens.append(int(ids[self.tree.decide(list(chances))]))
            drawn.append(Drawn(tokens[-1], ids, chances))
        return Draft(tuple(tokens[len(before) + 1 :]), (0.5,) * len(drawn), tuple(drawn))


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


# -- the same with the real random numbers --------------------------------------------------------


def scores_of(tokens: Sequence[int]) -> tuple[Sequence[int], Sequence[float]]:
    """A drafter that is roughly right about 4 of 6 tokens."""
    return drafter_row(*tokens[-2:])


@cache
def drafter_row(*seen: int) -> tuple[Sequence[int], Sequence[float]]:
    chance = np.random.default_rng([7, *seen])
    logits = random_logits(3)(seen)
    ids = chance.permutation(VOCAB)[:4]
    return ids.tolist(), (logits[ids] + 0.7 * chance.standard_normal(4)).tolist()


@pytest.mark.parametrize("verification", ["match", "rejection"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_transitions_of_a_long_answer_have_the_targets_distribution(
    verification: Any, temperature: float
) -> None:
    options = SamplingOptions(
        temperature=temperature,
        seed=11,
        verification=verification,
        **PURE,
    )
    logits = random_logits(3)
    known = {
        pair: OracleSampler(options).probabilities(logits(pair))
        for pair in product(range(VOCAB), repeat=2)
    }
    target = ToyTarget(logits, VOCAB, n_ctx=5010)
    chooser = SamplingChooser(target, OracleSampler(options), options, 2)
    tokens = [1, 2, *answer(target, [1, 2], chooser, 5000, ToyDrafter(scores_of))]
    counts = {pair: np.zeros(VOCAB) for pair in known}
    for one, two, three in zip(tokens, tokens[1:], tokens[2:], strict=False):
        counts[one, two][three] += 1
    tests = [chi_square(counts[pair], chances) for pair, chances in known.items()]
    assert is_plausible(sum(test[0] for test in tests), sum(test[1] for test in tests))
    assert len(target.decoded) < 4000, "no draft was accepted"


@settings(max_examples=60, deadline=None)
@given(
    salt=st.integers(0, 1000),
    seed=st.integers(0, 2**64 - 1),
    drafts=st.integers(1, 5),
    quality=st.floats(0, 3),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    penalty=st.sampled_from([1.0, 1.3]),
    frequency=st.sampled_from([0.0, 1.5]),
)
def test_match_gives_the_plain_answer_of_the_seed_whatever_is_drafted(
    salt: int,
    seed: int,
    drafts: int,
    quality: float,
    temperature: float,
    penalty: float,
    frequency: float,
) -> None:
    options = SamplingOptions(
        temperature=temperature,
        seed=seed,
        repeat_penalty=penalty,
        frequency_penalty=frequency,
        repeat_last_n=5,
        xtc_probability=0.4,
        xtc_threshold=0.2,
        top_k=4,
    )
    logits = random_logits(salt)

    def scores(tokens: Sequence[int]) -> tuple[Sequence[int], Sequence[float]]:
        chance = np.random.default_rng([salt, drafts, *tokens[-3:]])
        ids = chance.permutation(VOCAB)[:3]
        return ids.tolist(), (quality * logits(tokens)[ids] + chance.standard_normal(3)).tolist()

    def start(drafter: FakeDrafter | None) -> list[int]:
        target = ToyTarget(logits, VOCAB)
        sampler = OracleSampler(options, [1, 2, 3])
        chooser = SamplingChooser(target, sampler, options, 3)
        return answer(target, [1, 2, 3], chooser, 30, drafter, drafts)

    plain = start(None)
    assert start(ToyDrafter(scores)) == plain
    assert start(None) == plain


def test_the_same_seed_gives_the_same_text_with_rejection_too() -> None:
    def start(seed: int) -> list[int]:
        options = SamplingOptions(temperature=1.0, seed=seed, verification="rejection", **PURE)
        target = ToyTarget(random_logits(3), VOCAB)
        chooser = SamplingChooser(target, OracleSampler(options), options, 2)
        return answer(target, [1, 2], chooser, 40, ToyDrafter(scores_of))

    assert start(5) == start(5)
    assert start(5) != start(6)


def test_a_shared_seed_makes_more_drafts_right_than_the_best_ones_are() -> None:
    def steps(coupled: bool) -> int:
        options = SamplingOptions(temperature=1.0, seed=5, **PURE)
        target = ToyTarget(random_logits(3), VOCAB, n_ctx=1100)
        chooser = SamplingChooser(target, OracleSampler(options), options, 2)
        if not coupled:
            chooser.draw = lambda: None  # type: ignore[method-assign]
        assert len(answer(target, [1, 2], chooser, 1000, ToyDrafter(scores_of))) == 1000
        return len(target.decoded)

    assert steps(coupled=True) < 0.9 * steps(coupled=False)


def test_an_undone_step_leaves_no_trace_in_the_chooser() -> None:
    options = SamplingOptions(temperature=1.0, seed=3, frequency_penalty=2.0, **PURE)
    target = ToyTarget(random_logits(1), VOCAB)
    sampler = OracleSampler(options, [1, 2])
    chooser = SamplingChooser(target, sampler, options, 2, constraint=Forbid(2))
    target.decode([1, 2, 3], 0, "all")

    def step() -> list[int]:
        tokens = list[int]()
        for row in (0, 1, 2):
            tokens.append(chooser.choose(row))
            chooser.accept(tokens[-1])
        return tokens

    mark = chooser.mark()
    first = step()
    chooser.restore(mark)
    assert sampler.history == [1, 2]
    assert step() == first


def test_listeners_hear_the_row_as_the_target_gave_it() -> None:
    heard: list[tuple[float, int]] = []

    class Listener:
        def chosen(self, logits: npt.NDArray[np.float32], token: int) -> None:
            heard.append((float(logits[2]), token))

        def mark(self) -> object:
            return len(heard)

        def restore(self, mark: object) -> None:
            assert isinstance(mark, int)
            del heard[mark:]

    options = SamplingOptions(temperature=1.0, seed=3)
    target = ToyTarget(random_logits(1), VOCAB)
    chooser = SamplingChooser(
        target, OracleSampler(options), options, 1, constraint=Forbid(2), listener=Listener()
    )
    target.decode([2], 0, "all")
    token = chooser.choose(0)
    assert token != 2
    assert heard == [(float(random_logits(1)([2])[2]), token)]


# -- options and random numbers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("temperature", -0.1, "temperature is -0.1"),
        ("temperature", float("nan"), "temperature is nan"),
        ("top_k", -1, "top_k is -1"),
        ("top_p", 1.5, "between 0 and 1"),
        ("min_p", -1, "between 0 and 1"),
        ("repeat_penalty", 0, "above 0"),
        ("frequency_penalty", float("inf"), "frequency_penalty is inf"),
        ("repeat_last_n", -2, "repeat_last_n is -2"),
        ("dry_base", 0.5, "at least 1"),
        ("dry_sequence_breakers", ("",), "1 to 40"),
        ("xtc_threshold", 2, "between 0 and 1"),
        ("logit_bias", ((3, float("nan")),), "token 3"),
        ("logit_bias", ((-3, 1.0),), "-3"),
        ("seed", -1, "seed is -1"),
        ("verification", "typical", "auto, match or rejection"),
    ],
)
def test_values_that_cannot_be_are_refused(option: str, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SamplingOptions(**{option: value})


def test_only_what_changes_the_best_token_needs_a_chain() -> None:
    assert SamplingOptions().is_greedy
    assert SamplingOptions(top_k=1, seed=4).is_greedy
    assert not SamplingOptions(temperature=1.0).is_greedy
    assert not SamplingOptions(repeat_penalty=1.1).is_greedy
    assert not SamplingOptions(logit_bias=((1, 2.0),)).is_greedy
    assert SamplingOptions(repeat_penalty=1.1, repeat_last_n=0).is_greedy
    assert SamplingOptions(seed=None).rejects and not SamplingOptions(seed=1).rejects


def test_noise_is_a_function_of_its_place() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    noise, again = Noise(42), Noise(42)
    rows = noise.gumbel_rows(Purpose.SAMPLE, 10, np.tile(tokens, (3, 1)))
    assert (rows[2] == again.gumbel(Purpose.SAMPLE, 12, tokens)).all()
    some = np.array([[5, 900]], np.int32)
    assert (noise.gumbel_rows(Purpose.SAMPLE, 10, some)[0] == rows[0, [5, 900]]).all()
    for other in (rows[1], noise.gumbel(Purpose.DRAFT, 10, tokens), Noise(43).gumbel(
        Purpose.SAMPLE, 10, tokens)):  # fmt: skip
        assert abs(np.corrcoef(rows[0], other)[0, 1]) < 0.12
    # Gumbel: mean is Euler's constant, variance pi^2 / 6.
    many = noise.gumbel(Purpose.SAMPLE, 1, np.arange(100_000, dtype=np.int32))
    assert many.mean() == pytest.approx(0.5772, abs=0.015)
    assert many.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    uniform = np.array([noise.uniform(Purpose.ACCEPT, place) for place in range(5000)])
    assert uniform.min() > 0 and uniform.max() < 1
    counts, _ = np.histogram(uniform, 20, (0, 1))
    assert is_plausible(*chi_square(counts.astype(float), np.full(20, 0.05)))


def test_the_largest_of_logits_plus_noise_is_a_draw_from_their_softmax() -> None:
    logits = np.array([0.3, -1.0, 2.0, 0.0, 1.0])
    noise, ids = Noise(random.Random(1).getrandbits(64)), np.arange(5, dtype=np.int32)
    counts = np.zeros(5)
    for place in range(20_000):
        counts[(logits + noise.gumbel(Purpose.SAMPLE, place, ids)).argmax()] += 1
    assert is_plausible(*chi_square(counts, softmax(logits)))
