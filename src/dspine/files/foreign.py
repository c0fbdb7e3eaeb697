"""Drafter files of other programs: their tensors and keys beside the names that ours would have.

Nothing is loaded by guess; the table is for the person who writes the mapping.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher

from dspine.files.drafter_keys import to_metadata
from dspine.files.gguf_file import GgufHeader
from dspine.files.mapped import shown
from dspine.files.schema import (
    DFlash2Config,
    DrafterConfig,
    DSpineConfig,
    Pair,
    TensorSpec,
    TrainingRecord,
    tensor_specs,
)

Row = dict[str, object]

_LIKE = re.compile(r"spine|inj(?:ect)|inj_|transfer_?code|readout|code_?bridge", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_WORDS = re.compile(r"[a-z]+|\d+")
_MOST_LAYERS = 64
_MOST_ROWS = 400
_LEAST_LIKENESS = 0.55
_SAME: Mapping[str, str] = {
    "recv": "receiver",
    "prev": "predecessor",
    "pred": "predecessor",
    "msg": "message",
    "code": "codes",
    "bridge": "inj",
    "injection": "inj",
    "layer": "blk",
    "layers": "blk",
    "reader": "readout",
    "read": "readout",
    "writer": "write",
    "writes": "write",
    "readouts": "readout",
}
"""Words that mean the same in names of tensors."""
_SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 2,
    "vocab_size": 32,
    "target_hidden_size": 8,
    "block_size": 2,
    "taps": (1,),
    "mask_token_id": 0,
    "top_k": 1,
}
"""Any sizes: only names and the number of sides are compared."""


def is_like_dspine(names: Iterable[str]) -> bool:
    """Whether tensors are named as those of a DSpine drafter might be."""
    return any(_LIKE.search(name) for name in names)


def tensor_table(found: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """`unknown`: tensors that no drafter of ours has, with shape and the closest expected name;
    `missing`: expected names that are not there. `found` has shapes in PyTorch order, by name."""
    specs = _expected(found)
    best = max(
        ([(s.gguf_name, s) for s in specs], [(s.torch_name, s) for s in specs]),
        key=lambda names: sum(name in found for name, _ in names),
    )
    expected = dict(best)
    missing = {name: spec for name, spec in expected.items() if name not in found}
    rows: list[Row] = []
    for name, shape in found.items():
        if name in expected or name == "transfer_ready":
            continue
        alike = {n: s for n, s in missing.items() if len(s.shape) == len(shape)}
        rows.append(
            {"name": shown(name), "shape": list(shape), "closest": _closest(name, list(alike))}
        )
    return {"unknown": rows[:_MOST_ROWS], "missing": list(missing)[:_MOST_ROWS]}


def key_table(header: GgufHeader) -> dict[str, object]:
    """The same for the keys of a GGUF's own architecture, whose prefix does not count."""
    prefix = f"{header.architecture}."
    known = {key.removeprefix("dspine.") for key in _known_keys() if key.startswith("dspine.")}
    own = {k.removeprefix(prefix): v for k, v in header.metadata.items() if k.startswith(prefix)}
    missing = [key for key in sorted(known) if key not in own]
    rows: list[Row] = [
        {"name": shown(prefix + key), "value": shown(str(value)), "closest": _closest(key, missing)}
        for key, value in own.items()
        if key not in known
    ]
    return {"unknown": rows[:_MOST_ROWS], "missing": missing}


def _expected(found: Mapping[str, object]) -> tuple[TensorSpec, ...]:
    layers = [int(m.group()) for name in found if (m := _NUMBER.search(name)) is not None]
    count = min(max(layers, default=0) + 1, _MOST_LAYERS)
    sizes: dict[str, object] = {
        **_SIZES,
        "num_layers": count,
        "windows": (None,) * count,
        "causal": (True,) * count,
    }
    config: DrafterConfig
    if any("selector" in name or "_conv" in name for name in found):
        config = DFlash2Config(**sizes, conv_group_size=1, selector_rank=1)  # type: ignore[arg-type]
    else:
        config = DSpineConfig(**sizes, transfer_rank=1, message_size=1)  # type: ignore[arg-type]
    return tensor_specs(config)


def _known_keys() -> Iterable[str]:
    sizes: dict[str, object] = {
        **_SIZES,
        "num_layers": 1,
        "windows": (None,),
        "causal": (True,),
    }
    config = DSpineConfig(**sizes, transfer_rank=1, message_size=1)  # type: ignore[arg-type]
    return to_metadata(config, Pair("", "", 8, 2, 32, "", ""), TrainingRecord())


def _closest(name: str, expected: Sequence[str]) -> str:
    """The expected name that is most alike, of the same layer; empty when none is."""
    words, layer = _words(name), _NUMBER.findall(name)[:1]
    best, likeness = "", _LEAST_LIKENESS
    for other in expected:
        theirs = _NUMBER.findall(other)[:1]
        # In a name without a layer a number means something else, such as a version.
        if theirs and theirs != layer:
            continue
        score = SequenceMatcher(None, words, _words(other), autojunk=False).ratio()
        if score > likeness:
            best, likeness = other, score
    return best


def _words(name: str) -> str:
    return " ".join(_SAME.get(word, word) for word in _WORDS.findall(name[:200].lower()))
