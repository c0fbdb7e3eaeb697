"""What dspine would do with a drafter file: run it, convert it first, or refuse it and why."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dspine.files.schema import DrafterConfig, Pair, TrainingRecord

Verdict = dict[str, object]

_NO_ROWS = frozenset({"Q5_1"})
"""Types without a CPU product for several rows at once in ggml."""


def of_drafter(
    path: Path,
    config: DrafterConfig,
    pair: Pair | None,
    record: TrainingRecord,
    types: Iterable[str],
    *,
    folder: bool,
) -> Verdict:
    """`runs`, `flags` (how) and `warnings` of a drafter that could be read."""
    name = pair.name if pair is not None else "its target"
    if folder:
        target = "" if pair is not None else " -m TARGET.gguf"
        how = f"dspine convert{target} {path} {path.name or 'drafter'}.gguf"
    else:
        how = f"-m TARGET.gguf -md {path}"
    warnings: list[str] = []
    if pair is None:
        warnings.append(
            "it does not say which target it is for: only sizes can be compared with the target"
        )
    elif not pair.vocab_hash or not pair.fingerprint:
        warnings.append("its record of the target is incomplete: a wrong target may go unnoticed")
    elif pair.sketch is None:
        warnings.append(
            "it has no sketch of its target: other quantisations and merged adapters go unnoticed; "
            "convert it to another name with -m and the target it was trained for"
        )
    if not record.acceptance_curve:
        warnings.append("it has no acceptance curve: 0.4 is taken for every slot")
    slow = sorted(set(types) & _NO_ROWS)
    if slow:
        warnings.append(f"{', '.join(slow)} matrices are slow on CPUs: quantise its original anew")
    if any(w is None for w in config.windows):
        warnings.append("layers without a window keep context K/V of the whole context in memory")
    return {
        "runs": not folder,
        "why": f"convert it first, then it drafts for {name}" if folder else f"drafts for {name}",
        "flags": how,
        "warnings": warnings,
    }


def refused(reason: object) -> Verdict:
    """The verdict on a file that cannot be used, with the sentence that loading it would give."""
    return {"runs": False, "why": str(reason)}
