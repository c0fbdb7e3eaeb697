"""The CPU kernels that make verifying many rows cheap: built once, tested, then plugged in.

Anything wrong with them means ggml's own kernels, never a failure.
"""

from dspine.kernels.status import Status, enable, prepare

__all__ = ["Status", "enable", "prepare"]
