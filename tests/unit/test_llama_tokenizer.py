"""Pieces of tokens, read by several threads at once, against a vocabulary that the test writes."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

from dspine.llama.native import Native
from dspine.llama.tokenizer import Tokenizer


class Vocabulary:
    """Token n is n % 7 + 1 times its letter; the first reader of all waits for another one."""

    def __init__(self) -> None:
        self.begun, self.another = threading.Event(), threading.Event()
        self.readers = 0

    @staticmethod
    def text(token: int) -> bytes:
        return bytes([97 + token % 26]) * (token % 7 + 1)

    def piece(
        self, _vocab: int, token: int, address: int, room: int, _strip: int, _special: bool
    ) -> int:
        text = self.text(token)
        if len(text) > room:
            return -len(text)
        ctypes.memmove(address, text, len(text))
        self.readers += 1
        if self.readers == 1:
            self.begun.set()
            self.another.wait(0.2)
        else:
            self.another.set()
        return len(text)

    def tokenizer(self) -> Tokenizer:
        api = SimpleNamespace(
            llama_vocab_n_tokens=lambda _: 100,
            llama_vocab_bos=lambda _: -1,
            llama_vocab_eos=lambda _: 99,
        )
        native: Any = SimpleNamespace(
            api=api, piece=self.piece, is_end=lambda _, token: token == 99
        )
        return Tokenizer(cast(Native, native), 1, lambda: None)


def test_a_token_that_another_thread_reads_meanwhile_keeps_its_own_bytes() -> None:
    vocabulary = Vocabulary()
    tokenizer = vocabulary.tokenizer()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(tokenizer.piece, 1)
        assert vocabulary.begun.wait(10)
        assert tokenizer.piece(2) == vocabulary.text(2)
        assert first.result() == vocabulary.text(1)
    assert tokenizer.piece(1) == vocabulary.text(1)


def test_a_piece_that_needs_more_room_gets_it() -> None:
    vocabulary = Vocabulary()
    vocabulary.another.set()
    tokenizer = vocabulary.tokenizer()
    tokenizer._make_room(1)
    assert [tokenizer.piece(token) for token in (0, 6, 3)] == [b"a", b"g" * 7, b"d" * 4]
    assert tokenizer.is_end(99) and not tokenizer.is_end(6)
