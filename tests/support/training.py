"""Tiny torch drafters, steps and feature shards for the training tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dspine.files.dtypes import bf16_from_float32
from dspine.files.pairing import describe_target
from dspine.files.schema import DSpineConfig, tensor_specs
from dspine.train.attend import SequenceView
from dspine.train.backbone import block_embedding
from dspine.train.module import DSpineModule, DSpineOutput
from dspine.train.shards import ShardWriter
from tests.support.tiny_drafter import TinyPair


def torch_module(pair: TinyPair) -> DSpineModule:
    """The torch drafter with the weights of a TinyPair."""
    module = DSpineModule(pair.config)
    state = {
        s.torch_name: torch.from_numpy(pair.tensors[s.gguf_name]) for s in tensor_specs(pair.config)
    }
    module.load_state_dict({**state, "transfer_ready": torch.tensor(True)}, strict=True)
    return module


def run_blocks(
    module: DSpineModule,
    embedding: torch.Tensor,
    sequences: list[tuple[torch.Tensor, list[tuple[int, int]]]],
    width: int | None = None,
    **extra: Any,
) -> DSpineOutput:
    """One pass. Each sequence: features (n, T * H) from position 0, and (anchor, position)s."""
    views, rows, blocks = [], 0, 0
    for context, pairs in sequences:
        views.append(SequenceView(rows, rows + len(context), blocks, blocks + len(pairs)))
        rows, blocks = rows + len(context), blocks + len(pairs)
    features = torch.cat([f for f, _ in sequences])
    positions = torch.cat([torch.arange(len(f)) for f, _ in sequences])
    anchors = torch.tensor([token for _, pairs in sequences for token, _ in pairs])
    places = torch.tensor([place for _, pairs in sequences for _, place in pairs])
    c = module.config
    output: DSpineOutput = module(
        block_embedding(embedding, anchors, c.mask_token_id, width or c.block_size),
        module.code(anchors),
        places,
        module.context(features, positions),
        positions,
        views,
        **extra,
    )
    return output


def pattern_shards(
    folder: Path,
    target: Path,
    *,
    taps: tuple[int, ...],
    sequences: int,
    seed: int,
    period: int = 12,
    length: int = 48,
) -> None:
    """Shards of one repeated token pattern; the feature of a token is a fixed random vector.

    Position in the pattern therefore follows from the last feature, and so do all later tokens.
    """
    pair = describe_target(target)
    fixed = np.random.default_rng(7)
    pattern = fixed.permutation(np.arange(20, 120))[:period]
    vectors = fixed.standard_normal((pair.vocab_size, len(taps) * pair.hidden_size))
    random = np.random.default_rng(seed)
    writer = ShardWriter(folder, taps=taps, fingerprint=pair.fingerprint)
    for i in range(sequences):
        tokens = np.tile(pattern, length // period + 2)[int(random.integers(period)) :][:length]
        add_sequence(writer, f"{seed}-{i}", tokens, vectors[tokens], prompt=4)
    writer.flush()


def add_sequence(
    writer: ShardWriter,
    name: str,
    tokens: npt.NDArray[np.int64],
    features: npt.NDArray[np.float64],
    *,
    prompt: int,
    temperature: float = 0.0,
    source: str = "pattern",
) -> None:
    """One sequence whose teacher gives 0.9 to the next token and 0.1 to the one after in id."""
    n = len(tokens)
    mask = np.ones(n, dtype=np.uint8)
    mask[:prompt] = 0
    ids = np.zeros((n, 64), dtype=np.int32)
    probs = np.zeros((n, 64), dtype=np.float16)
    ids[:-1, 0], probs[:-1, 0] = tokens[1:], 0.9
    ids[:-1, 1], probs[:-1, 1] = tokens[1:] + 1, 0.1
    writer.add(
        sequence_id=name,
        source=source,
        temperature=temperature,
        tokens=tokens.astype(np.int32),
        loss_mask=mask,
        features=bf16_from_float32(features.astype(np.float32)),
        teacher_ids=ids,
        teacher_probs=probs,
    )


def small_config(**changes: Any) -> DSpineConfig:
    """One layer with round sizes, for hand-computed cases."""
    base: dict[str, Any] = {
        "hidden_size": 4,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 2,
        "vocab_size": 10,
        "target_hidden_size": 4,
        "block_size": 4,
        "taps": (1,),
        "mask_token_id": 0,
        "windows": (None,),
        "causal": (True,),
        "transfer_rank": 2,
        "message_size": 1,
        "top_k": 2,
    }
    return DSpineConfig(**(base | changes))
