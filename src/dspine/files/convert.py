"""From a checkpoint folder to a drafter GGUF, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dspine.errors import FileError
from dspine.files.checkpoint import write_checkpoint
from dspine.files.drafter_file import write_drafter
from dspine.files.dtypes import Array
from dspine.files.gguf_file import StoredTensor, read_header
from dspine.files.gguf_writer import Progress
from dspine.files.pairing import check_fit, check_pair, describe_target, metadata_text
from dspine.files.schema import DSpineConfig, Pair
from dspine.files.source import Source, float_tensors, read_source


def convert_checkpoint(
    source: Path,
    output: Path,
    *,
    dtype: str | None = None,
    target: Path | None = None,
    thinking: bool | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Write a drafter in the other format; returns warnings for people.

    `source` is a checkpoint folder (a run's folder stands for its best checkpoint) or a drafter
    GGUF. An `output` whose name ends in .gguf becomes a GGUF, any other a folder in SpecForge's
    layout. `dtype` is f32, f16, bf16 or, for a GGUF, q8_0; None keeps the types of a quantised
    source and of a folder to be written, and is q8_0 for other GGUFs. `target` is the target's
    GGUF: needed when the source does not say which target it was trained for (folders of others),
    else checked against it, and its sketch is recorded where the source has none. `thinking`
    overrides the pair's flag. `progress` gets (bytes written, total). Raises FileError or
    PairError; nothing is written then.
    """
    read = read_source(source)
    pair, warnings = _pair(read, target)
    if thinking is None and read.pair is None and target is not None and _can_think(target):
        warnings.append(
            f"{read.path} does not say whether the drafter was trained on text with reasoning, and "
            f"its target can answer with and without: recorded is without, unless --thinking on "
            f"says otherwise"
        )
    if thinking is not None and thinking != pair.thinking:
        pair = replace(pair, thinking=thinking)
    if output.suffix.lower() != ".gguf":
        return warnings + _write_folder(read, pair, output, dtype, overwrite, progress)
    keeps = bool(read.quantised) and dtype is None
    if not read.record.acceptance_curve:
        warnings.append(
            f"{read.path} does not say how many drafts are accepted, so `dspine run` has to assume "
            f"it: `dspine train fit` with --held-out measures and records it, `dspine train eval` "
            f"shows it"
        )
    if target is None and not isinstance(read.config, DSpineConfig):
        warnings.append(
            f"{output} gets no tokenizer, which llama.cpp needs in it and dspine does not: name "
            f"the target with -m for a file that runs in both"
        )
    write_drafter(
        output,
        read.config,
        pair,
        read.record,
        read.tensors if keeps else _floats(read),
        dtype or "q8_0",
        read.draft_vocab,
        target=target,
        file_type=read.file_type if keeps else None,
        overwrite=overwrite,
        progress=progress,
    )
    return warnings


def _pair(read: Source, target: Path | None) -> tuple[Pair, list[str]]:
    """Which target the drafter is for, and warnings about a named one."""
    described = None if target is None else describe_target(target)
    pair = read.pair or described
    if pair is None:
        raise FileError(
            f"{read.path} does not say which target it was trained for: name the target's GGUF "
            f"file with -m"
        )
    warnings = [] if read.pair is None or described is None else check_pair(read.pair, described)
    if described is not None and pair.sketch is None and pair.fingerprint == described.fingerprint:
        pair = replace(pair, sketch=described.sketch)
    check_fit(str(read.path), read.config, pair)
    return pair, warnings


def _can_think(target: Path) -> bool:
    """Whether the target's chat template lets one choose."""
    template = metadata_text(read_header(target), "tokenizer.chat_template")
    return "enable_thinking" in template


def _floats(read: Source) -> dict[str, Array]:
    """The tensors of a source that is not quantised."""
    made: dict[str, Array] = {}
    for name, tensor in read.tensors.items():
        if isinstance(tensor, StoredTensor):
            raise FileError(
                f"{read.path} is quantised already ({', '.join(read.quantised)}): convert its f16, "
                f"bf16 or f32 original, or use `dspine quantize --allow-requantize`"
            )
        made[name] = tensor
    return made


def _write_folder(
    read: Source,
    pair: Pair,
    output: Path,
    dtype: str | None,
    overwrite: bool,
    progress: Progress | None,
) -> list[str]:
    if dtype == "q8_0":
        raise FileError(
            f"{output} would be a checkpoint folder, which holds f32, f16 or bf16: give one of "
            f"these with --dtype, or a name that ends in .gguf"
        )
    if output.exists() and output.resolve() == read.path.resolve():
        raise FileError(f"{output} is what is read: name another folder")
    write_checkpoint(
        output,
        read.config,
        pair,
        read.record,
        float_tensors(read, dtype),
        read.draft_vocab,
        overwrite=overwrite,
        progress=progress,
    )
    if not read.quantised:
        return []
    told = f"{read.path.name} is quantised ({', '.join(read.quantised)}): the folder holds its "
    return [told + f"values as {dtype or 'bf16'}, as exact as they were there"]
