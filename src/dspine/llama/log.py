"""Keeps llama.cpp's log out of the terminal and its last lines ready to quote in an error."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

_DEBUG, _INFO, _WARNING, _ERROR, _CONTINUED = 1, 2, 3, 4, 5  # enum ggml_log_level
_KEPT_LINES = 80
_QUOTE_LENGTH = 300


class LogCapture:
    """The last lines that the library logged, oldest first."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, int, str]] = deque(maxlen=_KEPT_LINES)
        self.count = 0
        """Lines so far: a point in the log; pass it to `reason` for what came after."""
        self._callback: Any = None

    def install(self, api: Any) -> None:
        """Become the log of the library; `api` is the low-level module of llama-cpp-python."""
        if self._callback is None:
            self._callback = api.llama_log_callback(self._receive)
        api.llama_log_set(self._callback, ctypes.c_void_p(0))

    def lines(self, since: int = 0) -> list[str]:
        """The kept lines after `since`, without debug lines."""
        return [text for number, level, text in self._lines if number >= since and level != _DEBUG]

    def reason(self, since: int) -> str:
        """The library's own words for a failure after `since`: its first error, else warning."""
        found = [(level, text) for number, level, text in self._lines if number >= since]
        for wanted in (_ERROR, _WARNING):
            for level, text in found:
                cleaned = _without_function_name(text)
                if level == wanted and cleaned:
                    return cleaned[:_QUOTE_LENGTH]
        return "the library gave no reason"

    def add(self, level: int, text: str) -> None:
        """One message of the library; level 5 continues the line before."""
        if level == _CONTINUED and self._lines:
            number, level, before = self._lines.pop()
            self._lines.append((number, level, before + text.rstrip("\n")))
        else:
            self._lines.append((self.count, level, text.rstrip("\n")))
            self.count += 1

    def _receive(self, level: int, text: bytes | None, _user: object) -> None:
        self.add(level, (text or b"").decode("utf-8", "replace"))


def _without_function_name(line: str) -> str:
    """Drop the `function_name: ` prefixes that llama.cpp puts before its messages."""
    text = line.strip()
    while True:
        head, colon, rest = text.partition(": ")
        if not colon or not head.replace("_", "").replace("~", "").isalnum() or head.isdigit():
            return text
        if head != head.lower() or " " in head:
            return text
        text = rest.strip()


capture = LogCapture()
