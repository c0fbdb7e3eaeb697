"""Which tokens may come next: a grammar followed along the emitted tokens of one answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from dspine.errors import LibraryError, UsageError
from dspine.text.forced import BEFORE, NOT_FORCED, Forced, ForcedDrafts
from dspine.text.grammar import GrammarOptions, one_line

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 16
"""Compiled grammars that stay ready."""

SPECIAL = b"\xff"
"""Begins the name of a token that is no text: it never is valid UTF-8."""


class GrammarTokenizer(Protocol):
    """The part of a tokenizer that grammars need."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of a token, empty for control tokens unless `special`."""

    def is_end(self, token: int) -> bool:
        """Whether an answer ends with it."""


class Grammars:
    """Compiles grammars for the vocabulary of one target.

    The table of its tokens is made for the first grammar (about a second for 50,000 tokens on
    one core) and serves all later ones.
    """

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends: frozenset[int] = frozenset()
        self._table: LLTokenizer | None = None
        self._compiled: dict[GrammarOptions, LLMatcher] = {}
        self._forced = ForcedDrafts(tokenizer)

    def matcher(self, options: GrammarOptions) -> GrammarMatcher:
        """A matcher at the beginning of an answer.

        Raises UsageError, with the library's reason, for what cannot be compiled or satisfied.
        """
        matcher = self._compiled.pop(options, None) or self._compile(options)
        self._compiled[options] = matcher
        while len(self._compiled) > KEPT:
            del self._compiled[next(iter(self._compiled))]
        return GrammarMatcher(
            options, matcher, self._ends, self._tokenizer.vocab_size, self._forced
        )

    def _compile(self, options: GrammarOptions) -> LLMatcher:
        from llguidance import LLMatcher

        if self._table is None:
            self._table = self._make_table()
        matcher = LLMatcher(self._table, options.to_lark(), log_level=0)
        if matcher.is_error():
            raise options.refused(matcher.get_error())
        return matcher

    def _make_table(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        tokenizer = self._tokenizer
        pieces: list[bytes] = []
        ends: list[int] = []
        for token in range(tokenizer.vocab_size):
            piece = tokenizer.piece(token)
            is_end = tokenizer.is_end(token)
            if is_end:
                ends.append(token)
            if is_end or not piece:
                name = tokenizer.piece(token, special=True) or b"<token %d>" % token
                piece = SPECIAL + name
            pieces.append(piece)
        if not ends:
            raise UsageError(
                "this target has no end token, so an answer with a grammar could not end: use a "
                "target whose tokenizer names one"
            )
        self._ends = frozenset(ends)
        return LLTokenizer(_Vocabulary(pieces, ends[0]), eos_token=ends)  # type: ignore[arg-type]


class GrammarMatcher:
    """The state of a grammar after the tokens emitted so far.

    A token is allowed if its bytes can go on, an end token if the text may end here; where
    nothing can go on, end tokens are all that is allowed. Only emitted tokens advance it.
    """

    def __init__(
        self,
        options: GrammarOptions,
        matcher: LLMatcher,
        ends: frozenset[int],
        vocab_size: int,
        forced: ForcedDrafts,
    ) -> None:
        self._options = options
        self._fresh = matcher
        self._matcher = matcher.deep_copy()
        self._ends = ends
        self._vocab_size = vocab_size
        self._forced = forced
        self._tokens: list[int] = []
        # The library reads and writes whole 32-bit words.
        self._words = np.zeros((vocab_size + 31) // 32, np.int32)
        self._forbidden: npt.NDArray[np.bool_] | None = None

    def mask(self, logits: npt.NDArray[np.float32]) -> None:
        """Set `logits` (vocab,) of tokens that may not come next to -inf, in place.

        Raises UsageError when the grammar exceeds the library's limits, or when no token of the
        vocabulary can go on.
        """
        if self._forbidden is None:
            self._forbidden = self._compute()
        logits[self._forbidden] = -np.inf

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many of `drafts`, from the first on, may come next in a row. Nothing advances.

        For one token this is what `mask` would leave, at a fraction of the cost.
        """
        if self._ended:
            return 0
        text = list(drafts)
        end = next((index for index, token in enumerate(text) if token in self._ends), None)
        if end is not None:
            del text[end:]
        count = 0
        if text and not self._matcher.is_stopped():
            count = self._matcher.validate_tokens(text)
        if end is None or count < len(text):
            return count
        ahead = self._matcher.deep_copy()
        return count + (ahead.consume_tokens(text) and ahead.is_accepting())

    def forced(self) -> Forced:
        """Drafts for the text that must come next, whatever the target would rather say; none
        where it has a choice at once. Nothing advances.
        """
        if self._ended or self._matcher.is_stopped():
            return NOT_FORCED
        # Of a copy: what is forced is then held by the library as if it had come.
        text = self._matcher.deep_copy().compute_ff_bytes()
        if not text:
            return NOT_FORCED
        return self._forced.guess(text, self._tokens[-BEFORE:], self.allowed)

    def accept(self, token: int) -> None:
        """Advance by one emitted token; it must be an allowed one."""
        self._forbidden = None
        # End tokens are not given to the library, which counts them in some states only.
        if not (self._ended or token in self._ends or self._matcher.consume_token(token)):
            raise self._failed()
        self._tokens.append(token)
        self._forced.saw(token)

    def mark(self) -> int:
        """State to return to with `restore`."""
        return len(self._tokens)

    def restore(self, mark: object) -> None:
        """Forget the tokens accepted since `mark`.

        Starts from a fresh copy instead of stepping back: an interrupt may have come after the
        library took a token and before it was noted here.
        """
        assert isinstance(mark, int)
        tokens = self._tokens[:mark]
        matcher = self._fresh.deep_copy()
        if not matcher.consume_tokens([token for token in tokens if token not in self._ends]):
            raise self._failed()
        self._matcher, self._tokens, self._forbidden = matcher, tokens, None

    @property
    def _ended(self) -> bool:
        return bool(self._tokens) and self._tokens[-1] in self._ends

    def _compute(self) -> npt.NDArray[np.bool_]:
        if self._ended or self._matcher.is_stopped():
            forbidden = np.ones(self._vocab_size, np.bool_)
            if not self._ended:
                forbidden[list(self._ends)] = False
            return forbidden
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if self._matcher.is_error():
            raise self._failed()
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little", count=self._vocab_size)
        return np.logical_not(bits)

    def _failed(self) -> UsageError:
        name, count = self._options.name, len(self._tokens)
        reason = one_line(self._matcher.get_error())
        if reason == "NoExtensionBias":
            return UsageError(
                f"after {count} tokens the target has no token that goes on with the {name}: "
                f"allow other characters there"
            )
        return UsageError(f"the {name} failed after {count} tokens: {reason}; make it simpler")


class _Vocabulary:
    """The form in which the library takes a vocabulary from Python."""

    is_tokenizer_wrapper = True

    def __init__(self, tokens: list[bytes], end: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.bos_token_id: int | None = None
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes) -> list[int]:
        """Asked for only to force a tokenization, which our grammars switch off."""
        raise LibraryError(
            f"llguidance asked to tokenize {text!r}, which dspine's grammars switch off: install "
            f"the llguidance that dspine asks for (pip install --upgrade dspine)"
        )
