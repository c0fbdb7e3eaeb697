"""Ctrl-C while an answer is made."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def cancel_on_interrupt() -> Iterator[threading.Event]:
    """The first Ctrl-C ends the answer after the step that runs, the second one at once."""
    cancel = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def request(_number: int, _frame: FrameType | None) -> None:
        cancel.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, request)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)
