"""The DFlash2 drafter: the backbone with convolutions and a selector."""

from __future__ import annotations

from collections.abc import Sequence

from dspine.drafters.backbone.context import ContextCache
from dspine.drafters.backbone.drafter import BackboneDrafter
from dspine.drafters.backbone.weights import WeightBuilder
from dspine.drafters.dflash2.block import DFlash2BlockGraph
from dspine.drafters.dflash2.weights import dflash2_weights
from dspine.files.schema import DFlash2Config


class DFlash2Drafter(BackboneDrafter[DFlash2Config, DFlash2BlockGraph]):
    """See BackboneDrafter."""

    name = "dflash2"
    config_type = DFlash2Config
    _serves_several = False
    """A convolution would read the last slots of the sequence before."""

    def _declare(self, builder: WeightBuilder) -> None:
        self._own = dflash2_weights(builder, self.config)

    def _make_block(
        self, caches: Sequence[ContextCache], width: int, rows: int
    ) -> DFlash2BlockGraph:
        return DFlash2BlockGraph(
            self._backend, self.config, self._weights, self._own, caches, width, rows
        )
