"""Ctrl-C and other keys while an answer is made."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO


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


@contextmanager
def unechoed(stream: TextIO) -> Iterator[None]:
    """Inside of it the terminal does not show what is typed; it is read later all the same."""
    # The console of Windows shows keys only when they are read.
    if sys.platform == "win32" or not stream.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(stream)
    changed = termios.tcgetattr(stream)
    changed[3] &= ~termios.ECHO
    ends_process = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def end(number: int, _frame: FrameType | None) -> None:
        # The terminal outlives the process. Its output may be held: nothing waits for it here.
        termios.tcsetattr(stream, termios.TCSANOW, before)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    try:
        if ends_process:
            signal.signal(signal.SIGTERM, end)
        termios.tcsetattr(stream, termios.TCSADRAIN, changed)
        yield
    finally:
        termios.tcsetattr(stream, termios.TCSADRAIN, before)
        if ends_process:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def cancel_quietly() -> Iterator[threading.Event]:
    """`cancel_on_interrupt` for an answer that appears where somebody types."""
    # In this order the first Ctrl-C breaks off neither change of the terminal.
    with cancel_on_interrupt() as cancel, unechoed(sys.stdin):
        yield cancel
