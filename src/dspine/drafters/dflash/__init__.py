"""The DFlash drafter: the backbone alone; each slot's best token is its draft."""

from dspine.drafters.dflash.drafter import DFlashDrafter

__all__ = ["DFlashDrafter"]
