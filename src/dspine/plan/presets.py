"""Published models whose sizes are known, each with the source of its numbers."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from dspine.errors import UsageError
from dspine.files.schema import DFlash2Config, DrafterConfig, DSpineConfig
from dspine.plan.shapes import Sizes

TARGETS: Mapping[str, Sizes] = {
    sizes.name: sizes
    for sizes in (
        Sizes(
            name="qwen3.8-27b",
            architecture="qwen35",
            layers=64,
            hidden=5120,
            feed_forward=17408,
            heads=24,
            kv_heads=4,
            head_size=256,
            vocabulary=248320,
            context=262144,
            attention_interval=4,
            state_size=128,
            state_key_heads=16,
            state_value_heads=48,
            convolution=4,
            source="config.json of Qwen3.5-27B and Qwen3.6-27B, whose sizes Qwen3.8-27B has; "
            "llama.cpp logs a state of 149.6 MiB for it, which these numbers give",
        ),
        Sizes(
            name="qwen3-8b",
            architecture="qwen3",
            layers=36,
            hidden=4096,
            feed_forward=12288,
            heads=32,
            kv_heads=8,
            head_size=128,
            vocabulary=151936,
            context=40960,
            source="config.json of Qwen/Qwen3-8B",
        ),
        Sizes(
            name="qwen3.5-0.8b",
            architecture="qwen35",
            layers=24,
            hidden=1024,
            feed_forward=3584,
            heads=8,
            kv_heads=2,
            head_size=256,
            vocabulary=248320,
            context=262144,
            tied=True,
            attention_interval=4,
            state_size=128,
            state_key_heads=16,
            state_value_heads=16,
            convolution=4,
            source="config.json of Qwen/Qwen3.5-0.8B",
        ),
        Sizes(
            name="qwen2.5-1.5b",
            architecture="qwen2",
            layers=28,
            hidden=1536,
            feed_forward=8960,
            heads=12,
            kv_heads=2,
            head_size=128,
            vocabulary=151936,
            context=32768,
            tied=True,
            source="config.json of Qwen/Qwen2.5-1.5B-Instruct",
        ),
        Sizes(
            name="qwen2.5-0.5b",
            architecture="qwen2",
            layers=24,
            hidden=896,
            feed_forward=4864,
            heads=14,
            kv_heads=2,
            head_size=64,
            vocabulary=151936,
            context=32768,
            tied=True,
            source="config.json of Qwen/Qwen2.5-0.5B-Instruct",
        ),
        Sizes(
            name="smollm2-135m",
            architecture="llama",
            layers=30,
            hidden=576,
            feed_forward=1536,
            heads=9,
            kv_heads=3,
            head_size=64,
            vocabulary=49152,
            context=8192,
            tied=True,
            source="the GGUF of the default target",
        ),
    )
}

_BACKBONE_27B: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_layers": 5,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
    "target_hidden_size": 5120,
    "mask_token_id": 248070,
    "max_positions": 262144,
}


def _dspine_27b() -> DSpineConfig:
    return DSpineConfig(
        **_BACKBONE_27B,
        block_size=16,
        taps=(1, 16, 31, 46, 61),
        windows=(8192,) * 5,
        causal=(True,) * 5,
        transfer_rank=1024,
        message_size=512,
    )


def _dflash2_27b() -> DFlash2Config:
    return DFlash2Config(
        **_BACKBONE_27B,
        block_size=8,
        taps=(5, 19, 33, 47, 61),
        windows=(2048,) * 5,
        causal=(False,) * 5,
    )


def _dspine_8b() -> DSpineConfig:
    return DSpineConfig(
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        target_hidden_size=4096,
        mask_token_id=151669,
        max_positions=40960,
        block_size=16,
        taps=(1, 9, 17, 25, 33),
        windows=(None,) * 5,
        causal=(True,) * 5,
        transfer_rank=1024,
        message_size=512,
    )


DRAFTERS: Mapping[str, tuple[DrafterConfig, str, str]] = {
    "qwen3.8-27b-dflash2": (
        _dflash2_27b(),
        "qwen3.8-27b",
        "config.json of z-lab's Qwen3.8-27B-DFlash2, as public test fixtures quote it",
    ),
    "qwen3.8-27b-dspine": (
        _dspine_27b(),
        "qwen3.8-27b",
        (
            "tencent/Qwen3.8-27B-DSpine-b16: block 16, window 8192 and 2.03 billion parameters are "
            "published; the other sizes are those of the DFlash2 drafter's backbone, which give "
            "them"
        ),
    ),
    "qwen3-8b-dspine": (
        _dspine_8b(),
        "qwen3-8b",
        "SpecForge's configs/qwen3-8b-dspine.json",
    ),
}
"""(configuration, name of its target, source)."""


def target_preset(name: str) -> Sizes:
    """The sizes called `name`; UsageError with the names there are."""
    found = TARGETS.get(name.lower())
    if found is None:
        raise _unknown("--preset", name, TARGETS)
    return found


def drafter_preset(name: str) -> DrafterConfig:
    """The drafter called `name`; UsageError with the names there are."""
    found = DRAFTERS.get(name.lower())
    if found is None:
        raise _unknown("--preset-draft", name, DRAFTERS)
    return found[0]


def drafters_of(target: str) -> tuple[str, ...]:
    """Names of the drafter presets made for a target preset, narrow blocks first."""
    return tuple(name for name, (_, pair, _) in DRAFTERS.items() if pair == target.lower())


def published_for(architecture: str, hidden: int, layers: int, vocabulary: int) -> tuple[str, ...]:
    """Drafter presets for targets of these sizes, each with its source; fine-tunes and versions
    share sizes, so that whose drafter it is remains to be looked at.
    """
    wanted = (architecture, hidden, layers, vocabulary)
    return tuple(
        f"{name} ({source})"
        for name, (_, pair, source) in DRAFTERS.items()
        for sizes in (TARGETS[pair],)
        if wanted == (sizes.architecture, sizes.hidden, sizes.layers, sizes.vocabulary)
    )


def _unknown(flag: str, name: str, known: Mapping[str, object]) -> UsageError:
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return UsageError(
        f"{flag} is {name!r}, which is not known{hint}: choose one of {', '.join(known)}"
    )
