"""llama.cpp's samplers as a chain: against NumPy step by step, and what must not abort."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.errors import ClosedError, LibraryError, UsageError
from dspine.llama.model import Model
from dspine.llama.sampler import SamplerChain
from dspine.llama.sampler_options import SAMPLERS, ChainOptions
from tests.support.toy_target import OracleSampler, softmax

VOCAB = 700


def noisy(seed: int, scale: float = 3.0) -> npt.NDArray[np.float32]:
    return (scale * np.random.default_rng(seed).standard_normal(VOCAB)).astype(np.float32)


def probabilities(
    chain: SamplerChain, logits: npt.NDArray[np.float32], coin: float = 1.0
) -> npt.NDArray[np.float64]:
    ids, values = chain.apply(logits, coin)
    assert len(set(ids.tolist())) == len(ids)
    chances = np.zeros(len(logits))
    chances[ids] = softmax(values)
    return chances


@settings(max_examples=150, deadline=None)
@given(
    options=st.builds(
        ChainOptions,
        samplers=st.one_of(
            st.just(SAMPLERS),
            st.permutations(SAMPLERS).map(tuple),
            st.permutations(SAMPLERS)
            .map(lambda names: (*names[:3], "temperature"))
            .filter(lambda names: "temperature" not in names[:3]),
        ),
        top_n_sigma=st.sampled_from([-1.0, 0.0, 1.0, 2.5]),
        temperature=st.sampled_from([0.0, 0.5, 0.7, 1.0, 1.3]),
        top_k=st.sampled_from([0, 1, 5, 10, 40, 300]),
        top_p=st.sampled_from([1.0, 0.95, 0.5, 0.0]),
        min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
        typical_p=st.sampled_from([1.0, 0.5]),
        repeat_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        presence_penalty=st.sampled_from([0.0, -0.7]),
        repeat_last_n=st.sampled_from([-1, 0, 5, 64]),
        dry_multiplier=st.sampled_from([0.0, 0.9]),
        dry_base=st.sampled_from([1.0, 1.6]),
        dry_allowed_length=st.sampled_from([1, 2, 4]),
        dry_penalty_last_n=st.sampled_from([-1, 0, 6, 64]),
        dry_sequence_breakers=st.just(()),
        xtc_probability=st.sampled_from([0.0, 0.5]),
        logit_bias=st.sampled_from([(), ((3, -math.inf), (5, 2.0), (5, 1.0))]),
    ),
    seed=st.integers(0, 10_000),
    words=st.sampled_from([2, 5, VOCAB]),
    coin=st.floats(0, 1, exclude_max=True),
    forbidden=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_every_step_is_what_its_description_says(
    options: ChainOptions, seed: int, words: int, coin: float, forbidden: float
) -> None:
    random, logits = np.random.default_rng(seed), noisy(seed)
    likely = np.argsort(-logits)[:10].tolist()
    logits[random.random(VOCAB) < forbidden] = -np.inf
    logits[likely[0]] = 12.0
    before = logits.copy()
    tokens = [*random.integers(0, words, 80).tolist(), *likely]
    tokens += tokens[70 : 70 + seed % 12]
    with SamplerChain(options, n_vocab=VOCAB, n_ctx=4096) as chain:
        chain.accept_all(tokens[:30])
        mark = chain.mark()
        for token in (7, 8, 9, 1, 1):
            chain.accept(token)
        chain.restore(mark)
        for token in tokens[30:]:
            chain.accept(token)
        found = probabilities(chain, logits, coin)
    assert (logits == before).all()
    wanted = OracleSampler(options, tokens).probabilities(logits, coin)
    # Where a limit is met within rounding either side is right.
    if not (set(np.flatnonzero(found)) ^ set(np.flatnonzero(wanted > 1e-30))):
        assert found == pytest.approx(wanted, abs=1e-5)
    else:
        assert np.abs(found - wanted).sum() < 1e-4, options


def test_a_chain_that_was_closed_or_never_used_is_refused_or_freed() -> None:
    chain = SamplerChain(ChainOptions(temperature=1.0, repeat_penalty=1.1), n_vocab=VOCAB, n_ctx=9)
    chain.close()
    chain.close()
    for use in (lambda: chain.apply(noisy(1)), lambda: chain.accept(1), lambda: chain.restore(-1)):
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_what_the_library_would_abort_on_or_read_out_of_bounds_is_an_error() -> None:
    options = ChainOptions(temperature=1.0, typical_p=0.5, top_k=0)
    with SamplerChain(options, n_vocab=VOCAB, n_ctx=9) as chain:
        with pytest.raises(UsageError, match="forbid every token"):
            chain.apply(np.full(VOCAB, -np.inf, np.float32))
        broken = noisy(1)
        broken[5] = np.nan
        with pytest.raises(LibraryError, match="not numbers"):
            chain.apply(broken)
        with pytest.raises(UsageError, match=r"\(3,\)"):
            chain.apply(np.zeros(3, np.float32))
        for token in (-1, VOCAB):
            with pytest.raises(UsageError, match="outside the vocabulary"):
                chain.accept(token)
        # Probabilities of zero have no logarithm; typical sampling must not see them.
        far = np.full(VOCAB, -1000.0, np.float32)
        far[:3] = (1.0, 0.0, 0.5)
        assert set(np.flatnonzero(probabilities(chain, far))) <= {0, 1, 2}
    with pytest.raises(UsageError, match=f"token {VOCAB}"):
        SamplerChain(ChainOptions(logit_bias=((VOCAB, 1.0),)), n_vocab=VOCAB, n_ctx=9)
    with pytest.raises(UsageError, match="needs the model"):
        SamplerChain(ChainOptions(dry_multiplier=1.0), n_vocab=VOCAB, n_ctx=9)


def dry_penalty(model: Model | None, tokens: list[int], token: int, **options: Any) -> float:
    """What DRY subtracts from the logit of `token` after `tokens`."""
    vocabulary = VOCAB if model is None else model.vocab_size
    made = ChainOptions(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, dry_multiplier=1.0, dry_base=2.0, **options
    )
    with SamplerChain(made, n_vocab=vocabulary, n_ctx=64, model=model) as chain:
        chain.accept_all(tokens)
        ids, values = chain.apply(np.zeros(vocabulary, np.float32))
        return -float(values[ids == token][0])


def test_dry_grows_with_the_repeat_and_ends_at_its_breakers(default_target: Path) -> None:
    text = [11, 12, 13, 14, 15, 99, 11, 12, 13, 14]
    none: dict[str, Any] = {"dry_sequence_breakers": ()}
    # multiplier * base ** (4 repeated tokens - 2 allowed)
    assert dry_penalty(None, text, 15, **none) == pytest.approx(4.0)
    assert dry_penalty(None, text, 16, **none) == 0.0
    assert dry_penalty(None, text, 15, dry_allowed_length=3, **none) == pytest.approx(2.0)
    assert dry_penalty(None, text, 15, dry_penalty_last_n=4, **none) == 0.0
    late = ("top_k", "temperature", "dry")
    assert dry_penalty(None, text, 15, samplers=late, **none) == pytest.approx(4.0)
    assert dry_penalty(None, text, 15, samplers=late[:2], **none) == 0.0
    with Model.load(default_target) as model:
        encode = model.tokenizer.encode
        tokens = encode(" one two three four five six one two three four")
        after = encode(" five")[0]
        assert dry_penalty(model, tokens, after) > 1.0
        tokens = encode(" one two three four five six one two three\n four")
        assert dry_penalty(model, tokens, after) == 0.0
