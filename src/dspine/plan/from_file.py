"""The geometry of a target or a drafter from the headers of its file."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dspine.architectures import NOT_TARGETS
from dspine.errors import FileError
from dspine.files.drafter_file import read_drafter
from dspine.files.gguf_file import GgufHeader, read_header, split_files
from dspine.plan.geometry import Geometry, Layer, Weight
from dspine.plan.memory import DrafterGeometry

_WINDOW_PATTERNS: Mapping[str, int] = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "cohere2": 4,
    "olmo2": 4,
    "exaone4": 4,
    "smallthinker": 4,
}
"""Where the file does not list them: all but the last of so many layers have the window."""

_DEFAULT_WINDOWS: Mapping[str, int] = {"gemma2": 4096, "exaone4": 4096}
_INTERVALS = ("qwen35", "qwen35moe", "qwen3next")
"""Every n-th layer attends (`full_attention_interval`, 4 if it is missing)."""

_UNKNOWN = (
    "wkv.head_size",
    "kda.head_dim",
    "attention.kv_lora_rank",
    "attention.indexer.key_length",
)
"""Keys of architectures whose memory these rules do not describe."""


def read_geometry(path: Path) -> Geometry:
    """A target from its headers; split models by any part.

    FileError for what is no target, and for architectures whose caches have another layout.
    """
    if not path.exists():
        raise FileError(f"the model file {path} does not exist: check the path")
    if path.is_dir():
        raise FileError(f"{path} is a folder: name the .gguf file in it")
    headers = [read_header(part) for part in split_files(path)]
    header = next((h for h in headers if h.architecture), headers[0])
    what = NOT_TARGETS.get(header.architecture)
    if what is not None:
        raise FileError(f"{path} is {what}, not a target: name the language model with -m")
    return _Reader(path, header, headers).geometry()


def read_drafter_geometry(path: Path) -> DrafterGeometry:
    """A drafter from its file; FileError for anything else."""
    if not path.exists():
        raise FileError(f"the drafter file {path} does not exist: check the path")
    drafter = read_drafter(path)
    weights = tuple(
        Weight(name, tensor.type.name, tensor.ne) for name, tensor in drafter.tensors.items()
    )
    return DrafterGeometry(
        path.stem, drafter.config, weights, path.stat().st_size, _table_entries(path)
    )


def _table_entries(drafter: Path) -> int:
    """Entries of the n-gram table beside a drafter, by the size of its column of single bytes; 0
    where there is none.
    """
    path = drafter.with_name(f"{drafter.stem}.ngram.npz")
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.getinfo("confidences.npy").file_size
    except (OSError, KeyError, zipfile.BadZipFile):
        return 0


class _Reader:
    def __init__(self, path: Path, header: GgufHeader, parts: Sequence[GgufHeader]) -> None:
        self._path, self._header, self._parts = path, header, parts
        self._arch = header.architecture
        strange = next((key for key in _UNKNOWN if self._has(key)), None)
        if strange is not None:
            raise FileError(
                f"{path} is a {self._arch} model (it has {self._arch}.{strange}), whose memory "
                f"`dspine plan` cannot tell: load it and watch its size instead"
            )

    def geometry(self) -> Geometry:
        blocks, hidden = self._required("block_count"), self._required("embedding_length")
        count = blocks - self._number("nextn_predict_layers")
        weights = [
            weight
            for part in self._parts
            for info in part.tensors.values()
            if not ((weight := Weight(info.name, info.type.name, info.ne)).layer or 0) >= count
        ]
        embedding = next((w for w in weights if w.name == "token_embd.weight"), None)
        if embedding is None:
            raise FileError(
                f"{self._path} has no token_embd.weight: it is not a language model, name the "
                "target's own GGUF"
            )
        heads = self._per_layer("attention.head_count", blocks)
        head = self._number("attention.key_length") or hidden // max(1, *heads)
        queries = (w.ne[1] for w in weights if w.name.endswith("attn_q.weight"))
        query = next(queries, head * max(heads))
        merges = self._header.metadata.get("tokenizer.ggml.merges")
        return Geometry(
            name=self._path.name,
            architecture=self._arch,
            hidden=hidden,
            feed_forward=self._feed_forward(blocks),
            heads=max(heads),
            queries=query,
            vocabulary=embedding.ne[1],
            context_train=self._number("context_length"),
            layers=tuple(self._layers(count, blocks, hidden, heads)),
            weights=tuple(weights),
            recurrent_width=self._recurrent_width(hidden),
            block_count=blocks,
            merges=len(merges) if isinstance(merges, tuple) else 0,
        )

    def _layers(self, count: int, blocks: int, hidden: int, heads: Sequence[int]) -> list[Layer]:
        default = hidden // max(1, *heads)
        key = self._number("attention.key_length") or default
        value = self._number("attention.value_length") or default
        key_windowed = self._number("attention.key_length_swa") or key
        value_windowed = self._number("attention.value_length_swa") or value
        kv_heads = self._per_layer("attention.head_count_kv", blocks, default=heads)
        recurrent = self._recurrent(count, kv_heads)
        window = self._number("attention.sliding_window") or _DEFAULT_WINDOWS.get(self._arch, 0)
        windowed = self._windowed(count) if window else [False] * count
        own = count - self._number("attention.shared_kv_layers")
        state = self._state(hidden)
        found = []
        for i in range(count):
            if recurrent[i] and self._arch != "falcon-h1":
                found.append(Layer(state=state))
                continue
            n = kv_heads[i] if i < own else 0
            k, v = (key_windowed, value_windowed) if windowed[i] else (key, value)
            found.append(
                Layer(n * k, n * v, window if windowed[i] else 0, state if recurrent[i] else 0)
            )
        return found

    def _windowed(self, count: int) -> list[bool]:
        pattern = self._get("attention.sliding_window_pattern")
        if isinstance(pattern, np.ndarray):
            flags = [bool(x) for x in pattern.tolist()]
            return (flags + [False] * count)[:count]
        every = pattern if isinstance(pattern, int) and pattern > 0 else 0
        every = every or _WINDOW_PATTERNS.get(self._arch, 0)
        return [every > 1 and i % every < every - 1 for i in range(count)]

    def _recurrent(self, count: int, kv_heads: Sequence[int]) -> list[bool]:
        if not self._has("ssm.conv_kernel") and not self._has("shortconv.l_cache"):
            return [False] * count
        listed = self._get("attention.recurrent_layers")
        if isinstance(listed, np.ndarray) and len(listed) >= count:
            return [bool(x) for x in listed.tolist()[:count]]
        if self._arch in _INTERVALS:
            every = self._number("full_attention_interval") or 4
            return [(i + 1) % every != 0 for i in range(count)]
        if self._arch in ("mamba", "mamba2", "falcon-h1"):
            return [True] * count
        return [kv_heads[i] == 0 for i in range(count)]

    def _state(self, hidden: int) -> int:
        """Numbers of one copy, as `n_embd_r` and `n_embd_s` in llama.cpp's llama-hparams.cpp."""
        if (cache := self._number("shortconv.l_cache")) > 0:
            return hidden * (cache - 1)
        size, inner = self._number("ssm.state_size"), self._number("ssm.inner_size")
        kernel = self._number("ssm.conv_kernel")
        convolved = inner + 2 * self._number("ssm.group_count") * size
        return max(0, kernel - 1) * convolved + size * inner

    def _recurrent_width(self, hidden: int) -> int:
        size, inner = self._number("ssm.state_size"), self._number("ssm.inner_size")
        if not inner:
            return 0
        return 3 * (inner + 2 * self._number("ssm.group_count") * size) + inner + hidden

    def _feed_forward(self, blocks: int) -> int:
        used = self._number("expert_used_count")
        if used:
            one = self._number("expert_feed_forward_length") or self._number("feed_forward_length")
            return used * one + self._number("expert_shared_feed_forward_length")
        return max(self._per_layer("feed_forward_length", blocks, default=[0] * blocks))

    def _per_layer(self, key: str, count: int, default: Sequence[int] | None = None) -> list[int]:
        """A number for each layer, from a list or from one number for all."""
        value = self._get(key)
        if isinstance(value, np.ndarray) and len(value):
            listed = [int(x) for x in value.tolist()]
            return (listed + [listed[-1]] * count)[:count]
        if isinstance(value, int) and not isinstance(value, bool):
            return [value] * count
        return list(default) if default is not None else [1] * count

    def _required(self, key: str) -> int:
        value = self._number(key)
        if value < 1:
            raise FileError(
                f"{self._path} has no usable {self._arch}.{key}: it is not a target, name the "
                "target's own GGUF"
            )
        return value

    def _number(self, key: str) -> int:
        value = self._get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def _has(self, key: str) -> bool:
        return f"{self._arch}.{key}" in self._header.metadata

    def _get(self, key: str) -> object:
        return self._header.metadata.get(f"{self._arch}.{key}")
