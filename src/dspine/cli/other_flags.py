"""Flags of llama.cpp that dspine has no use for, and what there is instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_DRAFTERS_CACHE = (
    "the drafter's own cache is f16, as fewer bits there cost accepted drafts; -ctk and -ctv are "
    "those of the target"
)
_HOW_MANY = (
    "how many drafts are verified follows at each step from their scores and from measured times; "
    "--spec-draft-n-max fixes the number"
)
_DRAFTERS_PLACE = "the drafter computes on the processor, with the threads of -t"
_CARDS = (
    "layers of the target (-ngl) are spread over all cards that the library sees; choose cards "
    "with its own variables, such as CUDA_VISIBLE_DEVICES"
)
_IMAGES = "dspine reads text only; use llama.cpp for images"

_BY_ANSWER: Mapping[str, Sequence[str]] = {
    "what kind a drafter is stands in its file (-md), and --proposer chooses who drafts": (
        "--spec-type",
    ),
    _DRAFTERS_CACHE: (
        *("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"),
        *("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"),
    ),
    "the drafter's context follows -c": ("-cd", "--ctx-size-draft", "--spec-draft-ctx-size"),
    _HOW_MANY: (
        *("--draft-min", "--draft-n-min", "--spec-draft-n-min", "--spec-draft-conf-min"),
        *("--draft-p-min", "--spec-draft-p-min", "--draft-p-split", "--spec-draft-p-split"),
    ),
    _DRAFTERS_PLACE: (
        *("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl"),
        *("-devd", "--device-draft", "--spec-draft-device"),
        *("-td", "--threads-draft", "--spec-draft-threads"),
    ),
    _CARDS: (
        *("-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu"),
        *("-dev", "--device"),
    ),
    _IMAGES: ("-mm", "--mmproj", "-mmu", "--mmproj-url", "--image"),
}

ABSENT: Mapping[str, str] = {name: answer for answer, names in _BY_ANSWER.items() for name in names}
"""What there is instead of each flag. (`dspine plan` has a --device of its own.)"""


def instead_of(name: str) -> str | None:
    """The sentence for a flag that dspine does not have; None for any other."""
    answer = ABSENT.get(name)
    return None if answer is None else f"there is no {name}: {answer}"
