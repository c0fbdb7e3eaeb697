"""The DFlash drafter."""

from __future__ import annotations

from collections.abc import Sequence

from dspine.drafters.backbone.context import ContextCache
from dspine.drafters.backbone.drafter import BackboneDrafter
from dspine.drafters.backbone.weights import WeightBuilder
from dspine.drafters.dflash.block import DFlashBlockGraph
from dspine.files.schema import DFlashConfig


class DFlashDrafter(BackboneDrafter[DFlashConfig, DFlashBlockGraph]):
    """See BackboneDrafter."""

    name = "dflash"
    config_type = DFlashConfig

    def _declare(self, builder: WeightBuilder) -> None:
        """Nothing is added."""

    def _make_block(
        self, caches: Sequence[ContextCache], width: int, rows: int
    ) -> DFlashBlockGraph:
        return DFlashBlockGraph(self._backend, self.config, self._weights, caches, width, rows)
