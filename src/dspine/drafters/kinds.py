"""Which class runs which kind of drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from dspine.drafters.backbone.drafter import BackboneDrafter
from dspine.drafters.dflash import DFlashDrafter
from dspine.drafters.dflash2 import DFlash2Drafter
from dspine.drafters.dspine import DSpineDrafter
from dspine.files.drafter_file import DrafterFile
from dspine.files.schema import DFlash2Config, DFlashConfig, DrafterConfig, DSpineConfig
from dspine.llama.model import Model

AnyDrafter: TypeAlias = BackboneDrafter[Any, Any]
KINDS: Mapping[type[DrafterConfig], type[AnyDrafter]] = {
    DSpineConfig: DSpineDrafter,
    DFlashConfig: DFlashDrafter,
    DFlash2Config: DFlash2Drafter,
}


def open_drafter(file: DrafterFile, target: Model, *, n_ctx: int, n_threads: int = 1) -> AnyDrafter:
    """The drafter of a file that was read, for a loaded target; see BackboneDrafter.load."""
    return KINDS[type(file.config)].load(file, target, n_ctx=n_ctx, n_threads=n_threads)
