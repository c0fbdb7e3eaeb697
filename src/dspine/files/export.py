"""A drafter as the folder that SGLang or vLLM loads, and the command that starts it there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dspine.errors import FileError
from dspine.files.convert import convert_checkpoint
from dspine.files.gguf_writer import Progress
from dspine.files.schema import DrafterConfig
from dspine.files.source import read_source

_HYBRID = ("qwen35", "qwen35moe", "qwen3next", "qwen4exp", "lfm2", "lfm2moe", "nemotron_h")
"""Architectures with recurrent layers, for which SGLang asks for another cache strategy."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What to do with the folder: the command, and what about it is known and what is assumed."""

    command: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Method:
    name: str
    """Value of `--speculative-algorithm` (SGLang) or of `method` (vLLM)."""
    basis: str
    """Where that name is known from."""


_METHODS: Mapping[tuple[str, str], _Method] = {
    ("sglang", "DSpine"): _Method(
        "DSPINE",
        "SGLang 0.5.22 is the version of the published DSpine measurements; the name DSPINE is "
        "assumed from DFLASH and DSPARK, and releases up to 0.5.23 do not list it: see "
        "`python -m sglang.launch_server --help` of yours",
    ),
    ("sglang", "DFlash"): _Method("DFLASH", "SGLang 0.5.23 has this algorithm"),
    ("sglang", "DFlash2"): _Method(
        "DFLASH", "SGLang 0.5.23 runs DFlash2 under this name and sees the kind in config.json"
    ),
    ("vllm", "DSpine"): _Method(
        "dspine",
        "the authors announced vLLM support in November 2026; vLLM 0.33.0 does not have it, and "
        "the name dspine is assumed: see the release notes of yours",
    ),
    ("vllm", "DFlash"): _Method("dflash", "vLLM 0.33.0 has this method"),
    ("vllm", "DFlash2"): _Method(
        "dflash", "vLLM 0.33.0 runs DFlash2 under this name and sees the kind in config.json"
    ),
}


def export_drafter(
    source: Path,
    folder: Path,
    engine: str,
    *,
    dtype: str | None = None,
    target: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Write `folder` for an engine, sglang or vllm, from any drafter that dspine reads.

    `dtype` is bf16 (None), f16 or f32. `target` is the target's GGUF, needed for folders that do
    not say which one they are for.
    Raises FileError or PairError; nothing is written then.
    """
    if folder.suffix.lower() == ".gguf":
        raise FileError(f"{folder} would be a folder, not a GGUF: give a name without .gguf")
    read = read_source(source)
    config = read.config
    method = _METHODS[engine, config.kind]
    warnings = convert_checkpoint(
        source,
        folder,
        dtype=dtype or "bf16",
        target=target,
        overwrite=overwrite,
        progress=progress,
    )
    warnings += _warnings(config, engine)
    pair = read_source(folder).pair
    name, architecture = ("", "") if pair is None else (pair.name, pair.architecture)
    needed = (
        f"TARGET stands for {name} in Hugging Face's layout (a folder or hub name): these engines "
        f"do not load its GGUF with a drafter of this kind"
    )
    counted = (
        f"{config.block_size} tokens a block, the anchor included, make "
        f"{config.block_size - 1} drafts"
    )
    checked = (
        "tensor names, keys of config.json and dtypes are those of SpecForge's published drafters; "
        "the engine itself did not load the folder here"
    )
    command = _command(engine, method.name, folder, config.block_size, architecture)
    return Exported(command, (needed, counted, method.basis, checked), tuple(warnings))


def _warnings(config: DrafterConfig, engine: str) -> list[str]:
    """What of the drafter that engine does not take over."""
    found = []
    if config.draft_vocab_size is not None:
        found.append(
            f"this drafter chooses among {config.draft_vocab_size} tokens here; {engine} knows "
            f"nothing of that and lets it choose among all {config.vocab_size}, for which it was "
            f"not trained"
        )
    if config.target_hidden_size != config.hidden_size:
        found.append(
            f"the drafter's hidden size {config.hidden_size} is not the target's "
            f"{config.target_hidden_size}: {engine} takes them for equal and cannot load it"
        )
    if engine == "vllm" and None in config.windows and any(config.windows):
        found.append(
            "some of the drafter's layers have a window and some have none, which vllm 0.33.0 runs "
            "in its V2 model runner alone: see its documentation for how to choose that"
        )
    return found


def _command(engine: str, method: str, folder: Path, block_size: int, architecture: str) -> str:
    """The command line that starts the engine; TARGET stands for the target."""
    if engine == "vllm":
        config = {
            "method": method,
            "model": str(folder),
            "num_speculative_tokens": block_size - 1,
        }
        return f"vllm serve TARGET --speculative-config {shlex.quote(json.dumps(config))}"
    quoted = shlex.quote(str(folder))
    command = (
        f"python -m sglang.launch_server --model-path TARGET "
        f"--speculative-algorithm {method} --speculative-draft-model-path {quoted} "
        f"--speculative-num-draft-tokens {block_size}"
    )
    if architecture in _HYBRID:
        command += " --mamba-scheduler-strategy extra_buffer"
    return command
