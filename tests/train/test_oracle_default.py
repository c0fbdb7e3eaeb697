"""The shipped drafter in ggml against the torch oracle, on features of the default target.

500 blocks on real text: held-out prompts, each with the target's own greedy continuation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dspine.drafters.dspine import DSpineDrafter
from dspine.engine.llama_target import LlamaTarget
from dspine.engine.prompt import encode_prompt, token_text
from dspine.files.drafter_file import DrafterFile, read_drafter, write_drafter
from dspine.files.dtypes import to_float32
from dspine.files.schema import DSpineConfig
from dspine.llama.context import Context
from dspine.llama.model import Model, load_safely
from dspine.text.chat_template import TEMPLATE_KEY, ChatTemplate
from dspine.train.chain import draft_chain, top_candidates
from dspine.train.module import DSpineModule
from dspine.train.objective import DraftHead
from dspine.train.target import Target
from tests.support.default_pair import TASKS, fitting_threads, held_out
from tests.support.training import run_blocks

TEXTS = 4
"""Prompts of each task."""
BLOCKS = 42
"""Of each text: 12 texts give 504."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Text:
    """Prompt and continuation. Blocks are anchored at `first`, `first + 1`, ..."""

    tokens: Ids
    first: int
    features: npt.NDArray[np.float32]
    """(n, taps * H)."""

    def labels(self, slots: int) -> Ids:
        """(BLOCKS, slots): what a verify would accept after each anchor."""
        starts = np.arange(self.first + 1, self.first + 1 + BLOCKS)
        return np.asarray(self.tokens[starts[:, None] + np.arange(slots)])


@dataclass(frozen=True)
class Drafts:
    """What one implementation drafts for every block of every text."""

    hidden: npt.NDArray[np.float32]
    """(blocks, slots, H)."""
    chains: Ids
    """(blocks, slots)."""

    def accepted(self, labels: Ids) -> Ids:
        """(blocks,): drafts up to the first that the target would not confirm."""
        return np.asarray((self.chains == labels).cumprod(axis=1).sum(axis=1))


@pytest.fixture(scope="module")
def file(default_drafter: Path) -> DrafterFile:
    return read_drafter(default_drafter)


@pytest.fixture(scope="module")
def target(default_target: Path) -> Iterator[Model]:
    with load_safely(default_target) as model:
        yield model


@pytest.fixture(scope="module")
def threads(target: Model) -> int:
    with Context(target, n_ctx=64) as context:
        count = fitting_threads(context)
    torch.set_num_threads(count)
    return count


@pytest.fixture(scope="module")
def texts(target: Model, file: DrafterFile, threads: int) -> list[Text]:
    """Captured like inference does: the target's taps, read after a decode."""
    tokenizer, slots = target.tokenizer, file.config.block_size - 1
    template = ChatTemplate(
        target.metadata(TEMPLATE_KEY) or "",
        bos=token_text(tokenizer, tokenizer.bos),
        eos=token_text(tokenizer, tokenizer.eos),
    )
    made = []
    with Context(
        target,
        n_ctx=1024,
        n_threads=threads,
        flash_attention=False,
        taps=file.config.taps,
        max_outputs=1,
    ) as context:
        decoder = LlamaTarget(context)
        for item in (item for task in TASKS for item in held_out(task, TEXTS)):
            tokens = encode_prompt(item.prompt, tokenizer, template)
            first = len(tokens) - 1
            decoder.clear()
            decoder.decode(tokens[:first], 0, "none")
            features = [decoder.features(0, first)]
            for position in range(first, first + BLOCKS + slots - 1):
                decoder.decode(tokens[position:], position, "all")
                features.append(decoder.features(0, 1))
                tokens.append(decoder.argmax(0))
            made.append(Text(np.array(tokens), first, np.concatenate(features)))
    return made


@pytest.fixture(scope="module")
def labels(texts: list[Text], file: DrafterFile) -> Ids:
    return np.concatenate([text.labels(file.config.block_size - 1) for text in texts])


@pytest.fixture(scope="module")
def oracle(file: DrafterFile, texts: list[Text], default_target: Path) -> Drafts:
    """The torch module with the shipped weights, dequantised."""
    tensors, config = Target.read(default_target), file.config
    assert isinstance(config, DSpineConfig)
    module = DSpineModule(config).eval()
    state = {name: torch.from_numpy(to_float32(a).copy()) for name, a in file.arrays().items()}
    module.load_state_dict({**state, "transfer_ready": torch.tensor(True)}, strict=True)
    vocab = None if file.draft_vocab is None else torch.from_numpy(file.draft_vocab).long()
    head = DraftHead.build(tensors.head, vocab)
    hidden, chains = [], []
    with torch.inference_mode():
        for text in texts:
            places = range(text.first, text.first + BLOCKS)
            anchors = torch.from_numpy(text.tokens[places])
            sequence = (
                torch.from_numpy(text.features),
                [(int(text.tokens[place]), place) for place in places],
            )
            output = run_blocks(module, tensors.embedding, [sequence])
            _, rows = top_candidates(output.hidden, head.weight, config.top_k)
            chain = draft_chain(module, output, anchors, head.weight, rows, head.tokens(rows))
            hidden.append(output.hidden.numpy())
            chains.append(chain.numpy())
    return Drafts(np.concatenate(hidden), np.concatenate(chains))


def draft_all(drafter: DSpineDrafter, texts: list[Text]) -> Drafts:
    """Block after block, the context growing by the row of each anchor that is passed."""
    hidden, chains = [], []
    for text in texts:
        drafter.truncate(0, 0)
        drafter.add_context(0, 0, text.features[: text.first])
        for place in range(text.first, text.first + BLOCKS):
            trace = drafter.draft_trace(0, int(text.tokens[place]), drafter.block_size)
            hidden.append(trace.hidden)
            chains.append(trace.draft.tokens)
            drafter.add_context(0, place, text.features[place : place + 1])
    return Drafts(np.array(hidden), np.array(chains))


@pytest.fixture(scope="module")
def exact(
    file: DrafterFile,
    target: Model,
    texts: list[Text],
    threads: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Drafts:
    """The ggml drafter with the shipped weights as F32."""
    path = tmp_path_factory.mktemp("f32") / "drafter.gguf"
    assert file.pair is not None
    write_drafter(path, file.config, file.pair, file.record, file.arrays(), "f32", file.draft_vocab)
    with DSpineDrafter.load(
        path, target, n_ctx=1024, n_threads=threads, cache_type="f32"
    ) as drafter:
        return draft_all(drafter, texts)


@pytest.fixture(scope="module")
def shipped(default_drafter: Path, target: Model, texts: list[Text], threads: int) -> Drafts:
    """The ggml drafter as it runs."""
    with DSpineDrafter.load(default_drafter, target, n_ctx=1024, n_threads=threads) as drafter:
        return draft_all(drafter, texts)


def test_hidden_states_and_chains_are_the_oracles(
    oracle: Drafts, exact: Drafts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(oracle.chains) >= 500
    norms = np.linalg.norm(oracle.hidden, axis=-1) * np.linalg.norm(exact.hidden, axis=-1)
    least = ((oracle.hidden * exact.hidden).sum(axis=-1) / norms).min()
    same = (oracle.chains == exact.chains).all(axis=1)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{same.sum()} of {len(same)} chains are the oracle's, least cosine of a hidden "
            f"state {least:.6f}"
        )
    assert least > 0.999
    assert same.mean() >= 0.99


def test_q8_0_is_accepted_as_often_as_f32(
    file: DrafterFile,
    exact: Drafts,
    shipped: Drafts,
    labels: Ids,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert file.matrix_type == "q8_0"
    f32, q8 = (float(1 + drafts.accepted(labels).mean()) for drafts in (exact, shipped))
    with capsys.disabled():
        sys.stdout.write(
            f"\nacceptance length over {len(labels)} blocks: f32 {f32:.3f}, q8_0 {q8:.3f}"
        )
    assert f32 > 1.2
    assert q8 == pytest.approx(f32, rel=0.03)
