"""DFlash and DFlash2 against llama.cpp's own implementation, on the same files and features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dspine.drafters.kinds import KINDS as KINDS_BY_CONFIG
from dspine.files.drafter_file import OWN_TABLES, DrafterFile, read_drafter
from dspine.files.dtypes import to_float32
from dspine.files.gguf_file import find_tensor
from dspine.files.schema import DFlash2Config
from dspine.llama.batch import Batch
from dspine.llama.context import Context
from dspine.llama.library import find_library
from dspine.llama.model import load_safely
from tests.support.llama_dflash import LlamaDFlash
from tests.support.tiny_models import tiny_llama
from tests.support.tiny_pair import as_others_write_it, with_tables, write_dflash_drafter

FIRST = 40
KINDS = pytest.mark.parametrize("kind", ["DFlash", "DFlash2"])


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    find_library()


def decoded(context: Context, tokens: list[int]) -> npt.NDArray[np.float32]:
    """The target's features of a text."""
    batch = Batch(len(tokens))
    for position, token in enumerate(tokens):
        batch.add(token, position, logits=False)
    context.decode(batch)
    return context.features(0, len(tokens))


@dataclass
class Agreement:
    """Shares of drafts: ours that are llama.cpp's, and ours that are those of its states with an
    exact head; and how many different tokens there were."""

    with_theirs: float
    with_exact: float
    different: int


def compare(path: Path, target: Path, blocks: int, widths: tuple[int, ...]) -> Agreement:
    """Draft the same blocks with both. Final states must be close; the mean difference is said to
    be at most 1 % of their size, or 5 % where rounded inputs meet 8-bit weights."""
    file = read_drafter(path)
    random = np.random.default_rng(5)
    drafted, theirs_same, exact_same, seen = 0, 0, 0, set[int]()
    head = exact_head(file, target)
    close = 0.05 if file.matrix_type == "q8_0" else 0.01
    with load_safely(target) as model:
        tokens = random.integers(0, model.vocab_size, FIRST + blocks).tolist()
        with (
            Context(model, n_ctx=FIRST + blocks, n_threads=1, taps=file.config.taps) as context,
            LlamaDFlash(path, context, n_ctx=FIRST + blocks + 32) as theirs,
            KINDS_BY_CONFIG[type(file.config)].load(
                file, model, n_ctx=FIRST + blocks, cache_type="f32"
            ) as ours,
        ):
            features = decoded(context, tokens)
            theirs.add_context(features[:FIRST])
            ours.add_context(0, 0, features[:FIRST])
            for place in range(FIRST, FIRST + blocks):
                width = widths[place % len(widths)]
                expected = theirs.draft(tokens[place], width)
                found = ours.draft_trace(0, tokens[place], width)
                error = np.abs(found.hidden - expected.hidden).mean()
                assert error < close * expected.hidden.std(), (place, width)
                exact = head(expected.hidden, tokens[place])
                drafted += width - 1
                theirs_same += agreeing(found.draft.tokens, expected.tokens)
                exact_same += agreeing(found.draft.tokens, exact)
                seen.update(expected.tokens)
                row = features[place : place + 1]
                theirs.add_context(row)
                ours.add_context(0, place, row)
    return Agreement(theirs_same / drafted, exact_same / drafted, len(seen))


def agreeing(some: Sequence[int], others: Sequence[int]) -> int:
    return sum(a == b for a, b in zip(some, others, strict=True))


def exact_head(
    file: DrafterFile, target: Path
) -> Callable[[npt.NDArray[np.float32], int], list[int]]:
    """From final states and anchor to drafts, without the rounding of a quantised product."""
    config, weights = file.config, file.arrays()
    stored = file.own_tables.get(OWN_TABLES[1]) if file.draft_vocab is None else None
    stored = (
        stored or find_tensor(target, "output.weight") or find_tensor(target, "token_embd.weight")
    )
    assert stored is not None
    table = stored.as_float32()
    ids = np.arange(len(table)) if file.draft_vocab is None else file.draft_vocab
    table = table[ids]

    def choose(hidden: npt.NDArray[np.float32], anchor: int) -> list[int]:
        logits = hidden @ table.T * config.logit_scale
        if (cap := config.logit_softcap) is not None:
            logits = cap * np.tanh(logits / cap)
        if not isinstance(config, DFlash2Config):
            return [int(ids[i]) for i in logits.argmax(1)]
        before, after, gate = (
            to_float32(weights[f"candidate_selector.{name}"])
            for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        )
        tokens, last = list[int](), anchor
        for state, row in zip(hidden, logits, strict=True):
            best = np.argpartition(-row, config.top_k)[: config.top_k]
            score = row[best] + after[ids[best]] @ (before[last] * (gate @ state))
            last = int(ids[best[score.argmax()]])
            tokens.append(last)
        return tokens

    return choose


@KINDS
def test_50_blocks_on_the_default_target(kind: str, default_target: Path, tmp_path: Path) -> None:
    """llama.cpp's product with a 4-bit head rounds the states, and near ties fall differently;
    ours scores the best candidates with the exact rows."""
    path = write_dflash_drafter(
        tmp_path / "d.gguf", default_target, kind, taps=(5, 15, 25), windows=(None, 64)
    )
    found = compare(path, default_target, 50, (6,))
    assert found.with_exact >= 0.99, found
    assert found.with_theirs >= 0.95, found
    # A random drafter sees most of all the embedding of the mask token.
    assert found.different > (1 if kind == "DFlash" else 10)


@KINDS
def test_200_blocks_on_the_default_target_without_rounding(
    kind: str, default_target: Path, tmp_path: Path
) -> None:
    """The same with the target's table as float32 numbers in the file, which both programs use."""
    path = write_dflash_drafter(
        tmp_path / "d.gguf", default_target, kind, taps=(5, 15, 25), windows=(None, 64)
    )
    table = find_tensor(default_target, OWN_TABLES[0])
    assert table is not None
    found = compare(with_tables(path, table.as_float32()), default_target, 200, (6,))
    assert found.with_theirs >= 0.99 and found.with_exact >= 0.99, found


@KINDS
@pytest.mark.parametrize(
    ("changes", "dtype", "tied"),
    [
        ({}, "f32", False),
        ({"windows": (12, 12), "causal": (True, True)}, "f32", True),
        ({"windows": (20, None), "taps": (2,), "num_kv_heads": 6}, "f16", True),
        ({"windows": (4, 4), "taps": (0, 1, 2), "head_dim": 32}, "q8_0", False),
        ({"draft_vocab_size": 96}, "f32", False),
        ({"embedding_scale": 0.5, "logit_scale": 0.5, "logit_softcap": 30.0}, "f32", False),
        (
            {"sink_layers": (1,), "value_scale": 4.0, "rotary_size": 8, "windows": (12, 12)},
            "f32",
            False,
        ),
    ],
    ids=["plain", "causal-windows", "one-tap", "narrow-q8", "reduced", "scaled", "sinks"],
)
def test_small_drafters_of_every_form(
    kind: str, changes: dict[str, Any], dtype: str, tied: bool, tmp_path: Path
) -> None:
    """The hidden size, 320, is no multiple of 256; widths are mixed."""
    target = tiny_llama(
        tmp_path / "t.gguf", seed=3, hidden_size=320, num_heads=5, num_kv_heads=5, tied=tied
    )
    path = write_dflash_drafter(tmp_path / "d.gguf", target, kind, dtype=dtype, **changes)
    # With AVX512-FP16 and f16 weights one draft of 150 differs: of few blocks a large share.
    found = compare(path, target, 100, (6, 2, 4))
    least = 0.9 if dtype == "q8_0" else 0.98
    assert found.with_exact >= least and found.with_theirs >= least, found
    assert found.different > (0 if tied and kind == "DFlash" else 2)


@KINDS
def test_a_file_of_others_with_its_own_tables(kind: str, tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "t.gguf", seed=3, hidden_size=320, num_heads=5, num_kv_heads=5)
    path = as_others_write_it(write_dflash_drafter(tmp_path / "d.gguf", target, kind))
    assert read_drafter(path).pair is None
    found = compare(path, target, 20, (6,))
    assert found.with_exact >= 0.98 and found.with_theirs >= 0.98, found
