"""Text to token ids and back, by the target's own vocabulary."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from dspine.errors import UsageError
from dspine.llama.native import Native


class Tokenizer:
    """Belongs to a Model and lives as long as it. Several threads may use it."""

    def __init__(self, native: Native, vocab: int, require_open: Callable[[], object]) -> None:
        self._api = native.api
        self._is_end, self._piece = native.is_end, native.piece
        self._vocab = vocab
        self._require_open = require_open
        self.vocab_size: int = self._api.llama_vocab_n_tokens(vocab)
        self.bos: int = self._api.llama_vocab_bos(vocab)
        """Beginning-of-text token, -1 when the vocabulary has none."""
        self.eos: int = self._api.llama_vocab_eos(vocab)
        """End token, -1 when the vocabulary has none."""
        self._make_room(64)
        self._reading = threading.Lock()
        """Held while a token's bytes lie in the room that all share."""
        self._pieces: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})
        self._ends: dict[int, bool] = {}

    @property
    def vocabulary(self) -> int:
        """Address of the native vocabulary; ClosedError once the model is closed."""
        self._require_open()
        return self._vocab

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Token ids of `text`.

        `add_special` adds the begin and end tokens where the model asks for them;
        `parse_special` reads texts such as `<|im_end|>` as the control tokens they name, so leave
        it off for text of users. Raises UsageError for text that is not valid Unicode.
        """
        self._require_open()
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text has an unpaired surrogate at character {error.start}: send valid Unicode"
            ) from error
        room = len(data) + 8
        while True:
            tokens = (ctypes.c_int32 * room)()
            count = self._api.llama_tokenize(
                self._vocab, data, len(data), tokens, room, add_special, parse_special
            )
            if count >= 0:
                return tokens[:count]
            if -count <= room:
                raise UsageError(
                    f"a text of {len(data)} bytes is too long to be tokenized at once: give it in "
                    "pieces"
                )
            room = -count

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that `token` stands for; control tokens are empty unless `special`.

        A token may hold part of a UTF-8 character only. Raises UsageError for an unknown id.
        """
        known = self._pieces[special].get(token)
        return self._meet(token, special) if known is None else known

    def decode(self, tokens: list[int], *, special: bool = False) -> str:
        """Text of a whole token list; incomplete characters become U+FFFD."""
        return b"".join(self.piece(t, special=special) for t in tokens).decode("utf-8", "replace")

    def is_end(self, token: int) -> bool:
        """Whether generation ends at `token` (end of text, of turn, and the like)."""
        if token not in self._ends:
            self._meet(token)
        return self._ends[token]

    def token_texts(self) -> list[str]:
        """Every token's text as the vocabulary stores it (not decoded), in id order."""
        self._require_open()
        read = self._api.llama_vocab_get_text
        return [
            (read(self._vocab, token) or b"").decode("utf-8", "surrogateescape")
            for token in range(self.vocab_size)
        ]

    def _meet(self, token: int, special: bool = False) -> bytes:
        """Remember all of a token that comes for the first time: an answer asks for both."""
        self._require_open()
        self._check(token)
        self._ends[token] = self._is_end(self._vocab, token)
        with self._reading:
            while True:
                length = self._piece(self._vocab, token, self._address, self._room, 0, special)
                if length >= 0:
                    piece = self._pieces[special][token] = bytes(self._bytes[:length])
                    return piece
                self._make_room(-length)

    def _make_room(self, size: int) -> None:
        """Where the bytes of a token are put."""
        buffer = ctypes.create_string_buffer(size)
        self._bytes = memoryview(buffer).cast("B")
        self._address, self._room = ctypes.addressof(buffer), size

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise UsageError(
                f"token id {token} is outside the vocabulary of {self.vocab_size} tokens: "
                "tokenize the text with this target"
            )
