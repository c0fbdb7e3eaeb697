"""The tensor types of ggml: names, numbers, block sizes and bytes, usable without the library."""

from __future__ import annotations

from dataclasses import dataclass

from dspine.errors import UsageError


@dataclass(frozen=True, slots=True)
class TensorType:
    """One element type: `block` elements are stored together in `size` bytes."""

    number: int
    name: str
    block: int
    size: int

    @property
    def is_quantised(self) -> bool:
        """Whether elements only exist as parts of a block."""
        return self.block > 1

    def row_bytes(self, length: int) -> int:
        """Bytes of one row of `length` elements; UsageError when blocks do not fit evenly."""
        if length % self.block:
            raise UsageError(
                f"a row of {length} elements cannot be {self.name}: it stores blocks of "
                f"{self.block}; use f16, bf16 or a type with smaller blocks"
            )
        return length // self.block * self.size


# Numbers and sizes are ggml's file format, so they never change for a given name.
_ALL = (
    TensorType(0, "f32", 1, 4),
    TensorType(1, "f16", 1, 2),
    TensorType(2, "q4_0", 32, 18),
    TensorType(3, "q4_1", 32, 20),
    TensorType(6, "q5_0", 32, 22),
    TensorType(7, "q5_1", 32, 24),
    TensorType(8, "q8_0", 32, 34),
    TensorType(10, "q2_k", 256, 84),
    TensorType(11, "q3_k", 256, 110),
    TensorType(12, "q4_k", 256, 144),
    TensorType(13, "q5_k", 256, 176),
    TensorType(14, "q6_k", 256, 210),
    TensorType(16, "iq2_xxs", 256, 66),
    TensorType(17, "iq2_xs", 256, 74),
    TensorType(18, "iq3_xxs", 256, 98),
    TensorType(19, "iq1_s", 256, 50),
    TensorType(20, "iq4_nl", 32, 18),
    TensorType(21, "iq3_s", 256, 110),
    TensorType(22, "iq2_s", 256, 82),
    TensorType(23, "iq4_xs", 256, 136),
    TensorType(24, "i8", 1, 1),
    TensorType(25, "i16", 1, 2),
    TensorType(26, "i32", 1, 4),
    TensorType(27, "i64", 1, 8),
    TensorType(28, "f64", 1, 8),
    TensorType(29, "iq1_m", 256, 56),
    TensorType(30, "bf16", 1, 2),
    TensorType(34, "tq1_0", 256, 54),
    TensorType(35, "tq2_0", 256, 66),
    TensorType(39, "mxfp4", 32, 17),
    TensorType(40, "nvfp4", 64, 36),
    TensorType(41, "q1_0", 128, 18),
    TensorType(42, "q2_0", 64, 18),
)
_BY_NAME = {t.name: t for t in _ALL}
_BY_NUMBER = {t.number: t for t in _ALL}


def all_types() -> tuple[TensorType, ...]:
    """Every type this version of dspine knows, by number."""
    return _ALL


def type_by_name(name: str) -> TensorType:
    """The type called `name` (any case: "Q8_0" and "q8_0" are the same)."""
    found = _BY_NAME.get(name.lower())
    if found is None:
        raise UsageError(f"{name!r} is not a tensor type; known: {', '.join(_BY_NAME)}")
    return found


def type_by_number(number: int) -> TensorType:
    """The type with ggml's number `number`, as GGUF files store it."""
    found = _BY_NUMBER.get(number)
    if found is None:
        raise UsageError(f"tensor type number {number} is unknown: the file is newer than dspine")
    return found


def row_bytes(type_name: str, length: int) -> int:
    """Bytes of a row of `length` elements of `type_name`."""
    return type_by_name(type_name).row_bytes(length)


_CHOOSING = "q4_0"
_LARGER = ("q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_1")
"""Types that take more memory, or with ggml's kernels more time, than `_CHOOSING`."""


def choosing_type(type_name: str, row: int) -> str:
    """How a CPU keeps a copy of the target's head that only chooses candidates; the target has
    rows of `row` values in `type_name`.

    The exact rows score what it chooses, so it may be coarse: as q4_0 a head of q8_0 is read in
    half the time, and the default pair accepted as many drafts.
    """
    fits = row % type_by_name(_CHOOSING).block == 0
    return _CHOOSING if fits and type_name in _LARGER else type_name
