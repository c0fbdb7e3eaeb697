"""The DSpine drafter: the backbone with adjacent injection."""

from __future__ import annotations

from collections.abc import Sequence

from dspine.drafters.backbone.context import ContextCache
from dspine.drafters.backbone.drafter import BackboneDrafter
from dspine.drafters.backbone.weights import WeightBuilder
from dspine.drafters.dspine.block import DSpineBlockGraph, DSpineTrace
from dspine.drafters.dspine.weights import injection_weights
from dspine.files.schema import DSpineConfig


class DSpineDrafter(BackboneDrafter[DSpineConfig, DSpineBlockGraph]):
    """See BackboneDrafter."""

    name = "dspine"
    config_type = DSpineConfig
    follows = True

    def draft_trace(self, seq: int, anchor: int, width: int) -> DSpineTrace:
        """A draft with hidden states and tables, for comparison with other implementations."""
        return self._block_graph(seq, anchor, width).trace(anchor)

    def _declare(self, builder: WeightBuilder) -> None:
        self._injection = injection_weights(builder, self.config)

    def _make_block(
        self, caches: Sequence[ContextCache], width: int, rows: int
    ) -> DSpineBlockGraph:
        return DSpineBlockGraph(
            self._backend,
            self.config,
            self._weights,
            self._injection,
            caches,
            width,
            rows,
        )
