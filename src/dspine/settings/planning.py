"""The options of `dspine plan` beside those that it shares with the loading commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dspine.settings.setting import Setting, Variant

_PLAN = ("plan",)

SHARED: Mapping[str, Variant | None] = {
    "model": None,
    "model_draft": None,
    "n_gpu_layers": Variant(
        "Target layers on the graphics card, with --vram; -1 is all of them.", "all", default=-1
    ),
    "ctx_size": Variant(
        "Context in tokens to show the memory of; 0 is the largest that fits.",
        "the largest that fits",
    ),
    "cache_type_k": None,
    "cache_type_v": None,
    "swa_full": None,
    "batch_size": None,
    "flash_attn": Variant("Flash attention; auto counts as on."),
    "spec_draft_n_max": Variant(
        "Tokens drafted for each step, at most each drafter's block; 0 is the default.",
        "the whole block",
    ),
    "rollback": Variant(
        "How rejected drafts leave the target's memory; auto shows checkpoint and snapshots for "
        "targets with recurrent layers."
    ),
    "json": None,
    "cache_dir": None,
}
"""Settings of the loading commands that `plan` has as well, and what it says of them."""


def shared(setting: Setting) -> Setting:
    """A setting of the loading commands, for `plan` too if that shares it."""
    if setting.name not in SHARED:
        return setting
    variant = SHARED[setting.name]
    variants = setting.variants if variant is None else {**setting.variants, "plan": variant}
    return replace(setting, commands=(*setting.commands, "plan"), variants=variants)


PLANNING_SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="preset",
        flags=("--preset",),
        kind="text",
        default=None,
        group="Model",
        help="A published target instead of a file, such as qwen3.8-27b; `list` names them.",
        commands=_PLAN,
        in_environment=False,
        placeholder="NAME",
    ),
    Setting(
        name="quant",
        flags=("--quant",),
        kind="text",
        default="q4_k_m",
        group="Model",
        help="Number format of a --preset's weights: a mix of llama.cpp's quantiser.",
        commands=_PLAN,
        in_environment=False,
        placeholder="MIX",
    ),
    Setting(
        name="preset_draft",
        flags=("--preset-draft",),
        kind="text",
        default=None,
        default_text="those published for the --preset",
        group="Model",
        help="A published drafter instead of a file.",
        commands=_PLAN,
        in_environment=False,
        placeholder="NAME",
    ),
    Setting(
        name="quant_draft",
        flags=("--quant-draft",),
        kind="text",
        default="q4_k_m",
        group="Model",
        help="Number format of a published drafter's weights.",
        commands=_PLAN,
        in_environment=False,
        placeholder="MIX",
    ),
    Setting(
        name="vram",
        flags=("--vram",),
        kind="text",
        default=None,
        default_text="no graphics card",
        group="Budget",
        help="Memory of the graphics card: 24G and 24GiB are 24 times 1024 MiB, 24GB is 24,000 "
        "million bytes.",
        commands=_PLAN,
        placeholder="SIZE",
    ),
    Setting(
        name="ram",
        flags=("--ram",),
        kind="text",
        default=None,
        default_text="what is free here; with --vram without limit",
        group="Budget",
        help="Main memory that may be used.",
        commands=_PLAN,
        placeholder="SIZE",
    ),
    Setting(
        name="reserve",
        flags=("--reserve",),
        kind="text",
        default=None,
        default_text="13.3 % of the card",
        group="Budget",
        help="Part of the graphics card that is kept free for its driver and other programs.",
        commands=_PLAN,
        placeholder="SIZE",
    ),
    Setting(
        name="parallel",
        flags=("-np", "--parallel"),
        kind="int",
        default=1,
        least=1,
        group="Budget",
        help="Slots: sequences that are answered at the same time, each with the whole context.",
        commands=(*_PLAN, "serve"),
        variants={
            "serve": Variant(
                "Slots: requests that are answered at once. They share -c evenly, as in "
                "llama-server; without -c each has the context that one alone would have.",
                group="Server",
            )
        },
        placeholder="N",
    ),
    Setting(
        name="draft_device",
        flags=("--draft-device",),
        kind="choice",
        default="auto",
        choices=("auto", "cpu", "gpu"),
        group="Budget",
        help="Where the drafter lies; auto: on the card if all target layers are there.",
        commands=_PLAN,
    ),
    Setting(
        name="device",
        flags=("--device",),
        kind="text",
        default=None,
        group="Speed",
        help="Predict speed on a device with known costs: rtx-3090, here (what was measured on "
        "this machine for the pair), or a calibration file.",
        commands=_PLAN,
        in_environment=False,
        placeholder="NAME",
    ),
    Setting(
        name="acceptance",
        flags=("--acceptance",),
        kind="path",
        default=None,
        group="Speed",
        help="Accepted drafts by task, as JSON: of `dspine eval`, or tokens a step or chances by "
        'slot, such as {"code": 7.66, "chat": [0.8, 0.6]}.',
        commands=_PLAN,
        in_environment=False,
        placeholder="FILE",
    ),
    Setting(
        name="context_depth",
        flags=("--context-depth",),
        kind="int",
        default=0,
        least=0,
        default_text="that of the measurement",
        group="Speed",
        help="Context length to predict the speed at, for measured devices.",
        commands=_PLAN,
        in_environment=False,
        placeholder="N",
    ),
)
