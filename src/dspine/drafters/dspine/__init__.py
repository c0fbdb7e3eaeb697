"""The DSpine drafter as ggml graphs: weights, context K/V, block graph, chain, drafter."""

from dspine.drafters.dspine.block import DSpineTrace
from dspine.drafters.dspine.drafter import DSpineDrafter

__all__ = ["DSpineDrafter", "DSpineTrace"]
