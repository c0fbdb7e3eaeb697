"""What a step reads of a decode, in one native call each; only where the CPU kernels run.

Right after a decode the processor's caches hold weights, so a call costs what its code does, not
its work. Without the kernels the same is read row by row in Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dspine.ggml.kernels import quick_function

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class BestTokens:
    """The most likely tokens of consecutive rows, as long as they are the drafts there."""

    def __init__(
        self, library: ctypes.CDLL, logits_row: Callable[..., object], most: int, vocab: int
    ) -> None:
        """`library` has the CPU kernels; `logits_row` is llama.cpp's function for a row's logits.
        Up to `most` rows.
        """
        self._call = quick_function(
            library, "dspine_results_follow", [_POINTER, _POINTER, _INT, _INT, _LONG, _POINTER]
        )
        self._logits_row = _address_of(logits_row)
        self._vocab = vocab
        self._tokens = np.zeros(most + 1, np.int32)
        self._view = self._tokens.data
        self._address: int = self._tokens.ctypes.data

    def follow(self, context: int, first: int, drafts: Sequence[int]) -> list[int]:
        """From row `first` of the last decode on; nothing where a logit is no number."""
        view = self._view
        for row, draft in enumerate(drafts):
            view[row] = draft
        found = self._call(
            context, self._logits_row, first, len(drafts), self._vocab, self._address
        )
        return [view[row] for row in range(found)]


def tap_copy(
    library: ctypes.CDLL,
    context: int,
    get_tap: Callable[..., object],
    layers: Sequence[int],
    row_bytes: int,
) -> Callable[[int, int, int], int]:
    """A function that copies rows of all taps: `(first, count, address)` for rows first ...
    first + count - 1 to `address`, row after row. It gives the number of the first tap that has
    no rows, `len(layers)` where all have some.

    `library` as before; `get_tap` is llama.cpp's function for the rows of a layer.
    """
    call = quick_function(
        library, "dspine_results_copy_taps", [*[_POINTER] * 3, _INT, _LONG, _INT, _INT, _POINTER]
    )
    ids = (ctypes.c_uint32 * len(layers))(*layers)
    return partial(call, context, _address_of(get_tap), ids, len(layers), row_bytes)


def _address_of(function: Callable[..., object]) -> int:
    """Where a function of a library begins."""
    address = ctypes.cast(function, _POINTER).value  # type: ignore[arg-type]  # a ctypes function
    assert address is not None
    return address
