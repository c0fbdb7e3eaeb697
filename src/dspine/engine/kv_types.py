"""Does a number format of the target's cache leave its choices as they are? A quick look first."""

from __future__ import annotations

import hashlib
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from dspine.engine.kept import file_identity
from dspine.engine.llama_target import LlamaTarget
from dspine.errors import UsageError
from dspine.llama.context import Context
from dspine.llama.model import Model

EXACT = frozenset({"f32", "f16", "bf16"})
"""Formats that need no look."""

LEAST = 0.8
"""Share of equal choices below which a drafter, made for the exact cache, is no longer asked."""

ROWS = 32
"""Tokens decoded at once for the look: logits of every row are needed."""

FORMAT = 1

TEXT = """\
The harbour was quiet when Marta opened the shop. She counted 24 loaves, wrote the number into
the book, and asked her brother whether the boat from the island had arrived. "Not before ten,"
he said, "the wind has turned." So they waited, and talked about the winter of 1998.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

To check the result, add the numbers 3, 5 and 10: their sum is 18, and divided by 3 it is 6.
"""
"""What is looked at: prose, code and numbers, about 150 tokens."""


def agreement(
    model: Model, cache_type_k: str, cache_type_v: str, *, n_threads: int | None = None
) -> float:
    """Share of the positions of TEXT where the target's choice is that with an f16 cache.

    Flash attention is on for both, as quantised values need it. Takes two passes over the text.
    """
    tokens = model.tokenizer.encode(TEXT, add_special=True)
    tokens = tokens[: max(1, model.context_train)]
    choices: list[list[int]] = []
    for types in (("f16", "f16"), (cache_type_k, cache_type_v)):
        with Context(
            model,
            n_ctx=len(tokens),
            n_batch=ROWS,
            n_threads=n_threads,
            flash_attention=True,
            cache_type_k=types[0],
            cache_type_v=types[1],
            max_outputs=ROWS,
        ) as context:
            target = LlamaTarget(context)
            found: list[int] = []
            for start in range(0, len(tokens), target.max_rows):
                chunk = tokens[start : start + target.max_rows]
                target.decode(chunk, start, "all")
                found += [target.argmax(row) for row in range(len(chunk))]
            choices.append(found)
    one, other = choices
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(tokens)


def check_cache_types(
    model: Model, cache_type_k: str, cache_type_v: str, *, n_threads: int, folder: Path
) -> float | None:
    """Agreement of a quantised cache with f16, looked up or measured and kept in `folder`.

    None where nothing needs to be looked at. Raises UsageError where it is below LEAST: the
    target then reads its context so differently that drafts made for it are mostly wrong.
    """
    if {cache_type_k, cache_type_v} <= EXACT:
        return None
    key: dict[str, Any] = {
        "format": FORMAT,
        "target": file_identity(model.path),
        "library": file_identity(model.library.file),
        "kernels": model.library.kernels.text,
        "cache_types": [cache_type_k, cache_type_v],
        "text": hashlib.sha256(TEXT.encode()).hexdigest()[:16],
    }
    share = _kept(folder, key)
    if share is None:
        share = agreement(model, cache_type_k, cache_type_v, n_threads=n_threads)
        _keep(folder, key, share)
    if share < LEAST:
        raise UsageError(
            f"with the cache types {cache_type_k} and {cache_type_v} (-ctk, -ctv) this target "
            f"makes only {share:.0%} of the choices that it makes with f16, so drafts would be "
            f"wrong too often: use q8_0 or f16, or no drafter (--proposer ngram or none)"
        )
    return share


def _file(folder: Path, key: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return folder / "cache-types" / f"{name}.json"


def _kept(folder: Path, key: dict[str, Any]) -> float | None:
    try:
        document = json.loads(_file(folder, key).read_text(encoding="utf-8"))
        share = document["agreement"]
        if document["key"] == key and isinstance(share, float) and 0 <= share <= 1:
            return share
    except (OSError, ValueError, KeyError, TypeError):
        pass  # nothing usable is there: look
    return None


def _keep(folder: Path, key: dict[str, Any], share: float) -> None:
    file = _file(folder, key)
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as out:
            json.dump({"key": key, "agreement": share}, out)
        Path(out.name).replace(file)
