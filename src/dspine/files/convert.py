"""From a checkpoint folder to a drafter GGUF."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dspine.errors import FileError
from dspine.files.checkpoint import read_checkpoint
from dspine.files.drafter_file import write_drafter
from dspine.files.gguf_writer import Progress
from dspine.files.pairing import check_fit, check_pair, describe_target
from dspine.files.run_folder import choose_checkpoint


def convert_checkpoint(
    folder: Path,
    output: Path,
    *,
    dtype: str = "q8_0",
    target: Path | None = None,
    thinking: bool | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Write the drafter of a checkpoint folder as GGUF; returns warnings for people.

    A training run's folder stands for its best checkpoint, else its newest.
    `target` is the target's GGUF: needed when the folder does not say which target it was
    trained for (only ours do), else checked against it. `thinking` overrides the pair's flag.
    `progress` gets (bytes written, total). Raises FileError or PairError; nothing is written then.
    """
    folder = choose_checkpoint(folder)
    checkpoint = read_checkpoint(folder)
    warnings: list[str] = []
    described = None if target is None else describe_target(target)
    pair = checkpoint.pair or described
    if pair is None:
        raise FileError(
            f"{folder} does not say which target it was trained for: name the target's GGUF file "
            f"with -m"
        )
    if checkpoint.pair is not None and described is not None:
        warnings = check_pair(checkpoint.pair, described)
    if not checkpoint.record.acceptance_curve:
        warnings.append(
            f"{folder} does not say how many drafts are accepted, so `dspine run` has to assume "
            f"it: `dspine train fit` with --held-out measures and records it, `dspine train eval` "
            f"shows it"
        )
    check_fit(str(folder), checkpoint.config, pair)
    if thinking is not None and thinking != pair.thinking:
        pair = replace(pair, thinking=thinking)
    write_drafter(
        output,
        checkpoint.config,
        pair,
        checkpoint.record,
        checkpoint.tensors,
        dtype,
        checkpoint.draft_vocab,
        overwrite=overwrite,
        progress=progress,
    )
    return warnings
