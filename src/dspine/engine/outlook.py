"""What dspine would do with a target, told from its file alone; `dspine doctor` measures it."""

from __future__ import annotations

from collections.abc import Mapping

from dspine.engine.rollback import SNAPSHOTS_ONLY, choose_rollback
from dspine.kernels.selftest import TYPES as KERNEL_TYPES
from dspine.llama.taps import PUBLISHING_ARCHITECTURES

_VECTORS = frozenset({"F32"})
_TAKEN = frozenset(name.upper() for name in KERNEL_TYPES)


def target_outlook(
    architecture: str, *, is_recurrent: bool, layers: int, bytes_by_type: Mapping[str, int]
) -> dict[str, object]:
    """Rollback, taps and kernels of a target as `dspine run` chooses them without options.

    `bytes_by_type` has the bytes of its tensors by the type's name in capitals.
    """
    matrices = {t: n for t, n in bytes_by_type.items() if t not in _VECTORS}
    taken = {t: n for t, n in matrices.items() if t in _TAKEN}
    share = sum(taken.values()) / max(1, sum(matrices.values()))
    others = sorted(set(matrices) - set(taken))
    kernels = f"{share:.0%} of the matrices' bytes"
    if others:
        kernels += f"; {', '.join(others)} by ggml, where several rows cost more"
    direct = architecture in PUBLISHING_ARCHITECTURES
    return {
        "runs": True,
        "rollback": choose_rollback("auto", is_recurrent=is_recurrent, architecture=architecture),
        "rollback_choices": _choices(architecture, is_recurrent),
        "taps": (
            f"layers 0 to {layers - 2}, "
            + (
                "read directly where the library exports that, else through its callback"
                if direct
                else "through the library's callback, which costs a call per graph node"
            )
        ),
        "cpu_kernels": kernels,
        "flags": "-m FILE; with a drafter -md DRAFTER",
    }


def _choices(architecture: str, is_recurrent: bool) -> list[str]:
    """Values of --rollback that can work."""
    if architecture in SNAPSHOTS_ONLY:
        return ["snapshots"]
    return ["checkpoint", "snapshots"] if is_recurrent else ["trim", "checkpoint"]
