"""A number that is known, or known to lie between two others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bounds:
    """At least and at most; the same where the number is known."""

    least: float
    most: float

    @classmethod
    def known(cls, value: float) -> Bounds:
        """Of a known number."""
        return cls(value, value)

    @property
    def is_known(self) -> bool:
        """Whether it is one number."""
        return self.least == self.most
