"""A GGUF written again with other keys and tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dspine.files.gguf_file import GgufFile
from dspine.files.gguf_writer import TensorToWrite, write_gguf
from dspine.files.typed_keys import writable

Change = Callable[[dict[str, Any], dict[str, TensorToWrite]], object]


def _raw(gguf: GgufFile, name: str) -> list[memoryview]:
    return [gguf.tensor(name).raw.data]


def rewritten(source: Path, change: Change) -> Path:
    """The file again with other keys and tensors."""
    gguf = GgufFile(source)
    metadata: dict[str, Any] = {k: writable(v) for k, v in gguf.header.metadata.items()}
    metadata.pop("general.alignment", None)
    tensors = {
        name: TensorToWrite(name, info.type, info.ne, partial(_raw, gguf, name))
        for name, info in gguf.header.tensors.items()
    }
    change(metadata, tensors)
    out = source.with_name("changed.gguf")
    write_gguf(out, metadata, list(tensors.values()), overwrite=True)
    return out


def foreign(metadata: dict[str, Any], tensors: dict[str, TensorToWrite]) -> None:
    """As llama.cpp's converter writes it: none of our keys."""
    for key in [k for k in metadata if k.startswith("dspine.")]:
        del metadata[key]
