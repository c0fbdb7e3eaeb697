"""A library as the engine describes it, without one being there."""

from __future__ import annotations

from pathlib import Path

from dspine.llama.library import Library


def described_library(folder: Path, *, version: str = "0", commit: str | None = None) -> Library:
    """One in `folder` with all symbols; nothing is opened."""
    return Library(
        path=folder,
        file=folder / "libllama.so",
        version=version,
        llama_version="0",
        commit=commit,
        ggml_version="0",
        system_info="",
        features=(),
        devices=(),
        has_tap_symbols=True,
        has_tensor_symbol=True,
    )
