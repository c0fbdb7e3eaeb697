"""Helpers of the repository itself: set-up and the checks of `make check`; not installed."""
