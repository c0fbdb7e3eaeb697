"""The DFlash2 drafter: the backbone with convolutions along the block and a candidate selector."""

from dspine.drafters.dflash2.drafter import DFlash2Drafter

__all__ = ["DFlash2Drafter"]
