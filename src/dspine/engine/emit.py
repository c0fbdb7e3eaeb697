"""The output side of a request: end tokens, limits, stop strings and text, one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dspine.engine.events import FinishReason
from dspine.errors import UsageError
from dspine.text.detokenise import Detokeniser, DetokeniserState
from dspine.text.stop import StopFinder

EmitterMark = tuple[int | None, DetokeniserState, str, str]


class Emitter:
    """Plain and speculative decoding push every confirmed token through here, in order."""

    def __init__(
        self,
        piece: Callable[[int], bytes],
        is_end: Callable[[int], bool],
        *,
        max_tokens: int | None,
        stop: Iterable[str] = (),
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}: it must be at least 1")
        self._is_end = is_end
        self.remaining = max_tokens
        """Tokens that may still be emitted, None without a limit."""
        self._detokeniser = Detokeniser(piece)
        self._stop = StopFinder(stop)
        self._may_stop = not self._stop.is_empty
        self._text = ""
        self._pending: list[int] = []
        """Tokens whose text nobody needed so far."""

    def push(self, token: int) -> FinishReason | None:
        """Emit one token; the reason when the answer is complete with it, else None.

        The end token itself shows no text. After a reason nothing may be pushed any more.
        """
        remaining = self.remaining
        if remaining is not None:
            remaining -= 1
            self.remaining = remaining
        if self._is_end(token):
            self._flush()
            return "stop"
        if self._may_stop:
            text, stopped = self._stop.push(self._detokeniser.push(token))
            self._text += text
            if stopped:
                return "stop"
        else:
            self._pending.append(token)
        if remaining is not None and remaining <= 0:
            self._flush()
            return "length"
        return None

    def take_text(self) -> str:
        """Text that became certain since the last call."""
        if self._pending:
            self._read()
        text, self._text = self._text, ""
        return text

    def finish_text(self) -> str:
        """Like `take_text`, with everything held back: the answer ends here."""
        self._flush()
        return self.take_text()

    def mark(self) -> EmitterMark:
        """State to return to with `restore`."""
        if self._pending:
            self._read()
        stop = self._stop.mark() if self._may_stop else ""
        return self.remaining, self._detokeniser.held, stop, self._text

    def restore(self, mark: EmitterMark) -> None:
        """Undo everything pushed since `mark`."""
        self._pending.clear()
        self.remaining, self._detokeniser.held, stop, self._text = mark
        self._stop.restore(stop)

    def _read(self) -> None:
        """Turn what is pending into text."""
        self._text += self._detokeniser.push_all(self._pending)
        self._pending.clear()

    def _flush(self) -> None:
        self._read()
        text, stopped = self._stop.push(self._detokeniser.flush())
        self._text += text
        if not stopped:
            self._text += self._stop.flush()
