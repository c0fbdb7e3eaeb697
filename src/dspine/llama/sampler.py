"""llama.cpp's own samplers as one chain: logits of a row in, the tokens that may follow out.

The last step, the draw, is the caller's: it wants the distribution. Everything random comes from
outside, so the state of a chain is the tokens it accepted and nothing else.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dspine.errors import ClosedError, LibraryError, UsageError
from dspine.llama.checks import require_count, require_number
from dspine.llama.library import native_functions
from dspine.llama.model import Model
from dspine.llama.native import library_function

Logits = npt.NDArray[np.float32]

DRY_BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's default ends of a repetition."""

_ROW = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
_LONGEST_BREAKER = 40
_BLOCK = 64
_LOWEST = float(np.finfo(np.float32).min)
_NEGLIGIBLE = 80.0
"""Logits this far below the best have no probability in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainOptions:
    """What a chain does, by llama-server's names and with llama.cpp's defaults but one:
    `temperature` is 0, which means the most likely token.

    top_k 0, top_p 1, min_p 0, typical_p 1, repeat_penalty 1, dry_multiplier 0, xtc_probability 0
    and an xtc_threshold above 0.5 switch that step off. A last_n counts tokens of prompt and
    answer, -1 all that fit into the context. Raises UsageError for values that cannot be.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and what is added to its logit; -inf forbids the token."""

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, least=0.0)
        require_count("top_k", self.top_k, 0)
        for name in ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"):
            require_number(name, getattr(self, name), least=0.0, most=1.0)
        require_number("repeat_penalty", self.repeat_penalty, least=0.0)
        if self.repeat_penalty == 0:
            raise UsageError("repeat_penalty is 0: it must be above 0, and 1 switches it off")
        require_number("presence_penalty", self.presence_penalty)
        require_number("frequency_penalty", self.frequency_penalty)
        require_number("dry_multiplier", self.dry_multiplier, least=0.0)
        require_number("dry_base", self.dry_base, least=1.0)
        require_count("repeat_last_n", self.repeat_last_n, -1)
        require_count("dry_penalty_last_n", self.dry_penalty_last_n, -1)
        require_count("dry_allowed_length", self.dry_allowed_length, 1)
        for breaker in self.dry_sequence_breakers:
            _check_breaker(breaker)
        for token, bias in self.logit_bias:
            require_count("the token id of a logit bias", token, 0)
            if math.isnan(bias) or bias == math.inf:
                raise UsageError(
                    f"the logit bias of token {token} is {bias}: give a number, or -inf to "
                    f"forbid the token"
                )

    @property
    def penalises(self) -> bool:
        """Whether the tokens before change what may follow, DRY apart."""
        return self.repeat_last_n != 0 and (
            self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        )

    @property
    def dries(self) -> bool:
        """Whether DRY is on."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def excludes(self) -> bool:
        """Whether XTC is on."""
        return self.xtc_probability > 0 and self.xtc_threshold <= 0.5

    @property
    def is_greedy(self) -> bool:
        """Whether the chain always leaves the token with the highest logit."""
        return (
            self.temperature == 0
            and self.typical_p == 1
            and not (self.penalises or self.dries or self.excludes or self.logit_bias)
        )


class Candidates(NamedTuple):
    """Tokens that may follow: their ids (n,), distinct, and the logits (n,) whose softmax is the
    distribution.
    """

    ids: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float64]


class SamplerChain:
    """Bias, penalties, DRY, top-k, typical, top-p, min-p, XTC, temperature: llama.cpp's order.

    One request's; close it, or use it in `with`. `n_ctx` is what a last_n of -1 stands for.
    `model` is needed for DRY only, whose breakers are texts.
    """

    def __init__(
        self, options: ChainOptions, *, n_vocab: int, n_ctx: int, model: Model | None = None
    ) -> None:
        require_count("n_vocab", n_vocab)
        require_count("n_ctx", n_ctx)
        for token, _ in options.logit_bias:
            if token >= n_vocab:
                raise UsageError(
                    f"the logit bias names token {token}: the vocabulary has {n_vocab} tokens"
                )
        self.options = options
        self._n_vocab = n_vocab
        self._calls = _functions()
        self._owned: list[int] = []
        self._closer = weakref.finalize(self, _release, self._calls.free, self._owned)
        windows = []
        self._history_steps: list[int] = []
        if options.penalises:
            windows.append(_window(options.repeat_last_n, n_ctx))
            self._history_steps.append(
                self._make(
                    "penalties",
                    n_vocab,
                    windows[-1],
                    options.repeat_penalty,
                    options.frequency_penalty,
                    options.presence_penalty,
                )
            )
        if options.dries:
            windows.append(_window(options.dry_penalty_last_n, n_ctx))
            self._history_steps.append(self._make_dry(model, windows[-1]))
        self._window = max(windows, default=0)
        self._top_k = self._step("top_k", options.top_k > 0, options.top_k)
        self._typical = self._step("typical", options.typical_p < 1, options.typical_p, 0)
        self._top_p = self._step("top_p", options.top_p < 1, options.top_p, 0)
        self._min_p = self._step("min_p", options.min_p > 0, options.min_p, 0)
        # Its probability is 1 here: whether it acts is decided outside, by the coin.
        self._xtc = self._step("xtc", options.excludes, 1.0, options.xtc_threshold, 0, 0)
        self._temperature = self._step(
            "temp_ext", options.temperature != 1, options.temperature, 0.0, 1.0
        )
        self._bias_ids = np.array([token for token, _ in options.logit_bias], np.int64)
        self._bias = np.array([bias for _, bias in options.logit_bias], np.float32)
        self._history: list[int] = []
        self._rows = np.zeros(n_vocab, _ROW)
        self._base = self._rows.ctypes.data
        self._array = _Array()

    # -- state -----------------------------------------------------------------------------------

    def accept(self, token: int) -> None:
        """`token` is now the newest of prompt and answer."""
        self._check_open()
        if not 0 <= token < self._n_vocab:
            raise UsageError(
                f"token id {token} is outside the vocabulary of {self._n_vocab} tokens"
            )
        self._history.append(token)
        for step in self._history_steps:
            self._calls.accept(step, token)

    def accept_all(self, tokens: Iterable[int]) -> None:
        """The same for a whole text, of which only what penalties can see is handed on."""
        known = [*self._history, *tokens]
        self._history = []
        self._reset(known)

    def mark(self) -> int:
        """State to return to with `restore`."""
        return len(self._history)

    def restore(self, mark: int) -> None:
        """Forget the tokens accepted since `mark`."""
        if mark < len(self._history):
            self._reset(self._history[:mark])

    # -- the chain -------------------------------------------------------------------------------

    def apply(self, logits: Logits, coin: float = 1.0) -> Candidates:
        """What may follow after a row with these logits (vocab,), which are left as they are.

        `coin` is a number in [0, 1): XTC acts where it is below the chosen probability. A logit
        of -inf forbids a token; UsageError if that and the bias leave none, LibraryError for
        logits that are no numbers.
        """
        self._check_open()
        if logits.shape != (self._n_vocab,):
            raise UsageError(
                f"the row has shape {logits.shape}, the chain is for {self._n_vocab} tokens"
            )
        changed = self._with_bias_and_history(logits)
        peak = float(changed.max())
        if not math.isfinite(peak):
            if peak == -math.inf:
                raise UsageError(
                    "the logit bias and the constraint together forbid every token: relax one"
                )
            raise LibraryError("the target's logits contain values that are not numbers")
        self._fill(self._contenders(changed), changed)
        self._run(self._top_k)
        if self._typical:
            self._drop_negligible()
            self._run(self._typical)
        self._run(self._top_p)
        self._run(self._min_p)
        if self._xtc and coin < self.options.xtc_probability:
            self._run(self._xtc)
        self._run(self._temperature)
        rows = self._remaining()
        return Candidates(rows["id"].copy(), rows["logit"].astype(np.float64))

    def close(self) -> None:
        """Free the samplers; later use raises ClosedError."""
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _with_bias_and_history(self, logits: Logits) -> Logits:
        """Bias, penalties and DRY change a token's logit by itself, so only those tokens that
        they can touch are given to them: the others are most of the vocabulary.
        """
        changed = logits
        if self._bias.size:
            changed = logits.copy()
            np.add.at(changed, self._bias_ids, self._bias)
        if not self._history_steps or not self._history:
            return changed
        recent = np.fromiter(set(self._history[-self._window :]), np.int64)
        self._fill(recent, changed)
        for step in self._history_steps:
            self._run(step)
        if changed is logits:
            changed = logits.copy()
        changed[recent] = self._remaining()["logit"]
        return changed

    def _contenders(self, logits: Logits) -> npt.NDArray[np.int64] | None:
        """Ids that top-k can leave and are not forbidden; None: all.

        The k-th of the largest logits of blocks is at most the k-th largest logit, so it bounds
        from below what top-k takes, in two passes and without sorting the vocabulary.
        """
        bound = -math.inf
        k, blocks = self.options.top_k, self._n_vocab // _BLOCK
        if 0 < k <= blocks:
            best = logits[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
            bound = float(np.partition(best, blocks - k)[blocks - k])
        elif float(logits.min()) != -math.inf:
            return None
        return np.flatnonzero(logits >= max(bound, _LOWEST))

    def _fill(self, ids: npt.NDArray[np.int64] | None, logits: Logits) -> None:
        count = self._n_vocab if ids is None else len(ids)
        rows = self._rows[:count]
        rows["id"] = np.arange(count) if ids is None else ids
        rows["logit"] = logits if ids is None else logits[ids]
        array = self._array
        array.data, array.size, array.selected, array.sorted = self._base, count, -1, False

    def _remaining(self) -> npt.NDArray[Any]:
        """The rows that are left. A sampler may move the beginning forward."""
        first = (int(self._array.data) - self._base) // _ROW.itemsize
        return self._rows[first : first + int(self._array.size)]

    def _drop_negligible(self) -> None:
        """Typical sampling takes the logarithm of probabilities, so none may be zero."""
        rows = self._remaining()
        keep = rows["logit"] >= rows["logit"].max() - _NEGLIGIBLE
        if not keep.all():
            kept = rows[keep]
            rows[: len(kept)] = kept
            self._array.size = len(kept)

    def _run(self, step: int) -> None:
        if step:
            self._calls.apply(step, ctypes.byref(self._array))

    def _reset(self, tokens: Sequence[int]) -> None:
        self._check_open()
        for step in self._history_steps:
            self._calls.reset(step)
        hidden = max(0, len(tokens) - self._window)
        self._history = list(tokens[:hidden])
        for token in tokens[hidden:]:
            self.accept(token)

    def _step(self, name: str, wanted: bool, *arguments: float) -> int:
        return self._make(name, *arguments) if wanted else 0

    def _make(self, name: str, *arguments: Any) -> int:
        sampler = self._calls.make[name](*arguments)
        if not sampler:
            raise LibraryError(f"the library could not make its sampler {name}")
        self._owned.append(sampler)
        return int(sampler)

    def _make_dry(self, model: Model | None, window: int) -> int:
        options = self.options
        breakers = [text.encode() for text in options.dry_sequence_breakers]
        if breakers and model is None:
            raise UsageError("DRY with sequence breakers needs the model whose tokens they end")
        vocabulary = None
        if model is not None:
            model._open()
            vocabulary = model.tokenizer._vocab
        return self._make(
            "dry",
            vocabulary,
            options.dry_multiplier,
            options.dry_base,
            options.dry_allowed_length,
            window,
            (ctypes.c_char_p * len(breakers))(*breakers),
            len(breakers),
        )

    def _check_open(self) -> None:
        if not self._closer.alive:
            raise ClosedError("this sampler chain is closed: make a new one")


class _Array(ctypes.Structure):
    """llama_token_data_array with its pointer as a number."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


@dataclass(frozen=True, slots=True)
class _Functions:
    apply: Callable[..., None]
    accept: Callable[[int, int], None]
    reset: Callable[[int], None]
    free: Callable[[int], None]
    make: dict[str, Callable[..., int | None]]


@functools.cache
def _functions() -> _Functions:
    native = native_functions()
    pointer, number, real, size = (
        ctypes.c_void_p,
        ctypes.c_int32,
        ctypes.c_float,
        ctypes.c_size_t,
    )
    texts, unsigned = ctypes.POINTER(ctypes.c_char_p), ctypes.c_uint32
    signatures: dict[str, list[Any]] = {
        "penalties": [number, number, real, real, real],
        "dry": [pointer, real, real, number, number, texts, size],
        "top_k": [number],
        "typical": [real, size],
        "top_p": [real, size],
        "min_p": [real, size],
        "xtc": [real, real, size, unsigned],
        "temp_ext": [real, real, real],
    }
    return _Functions(
        apply=library_function(
            native, "llama_sampler_apply", [pointer, ctypes.POINTER(_Array)], None
        ),
        accept=library_function(native, "llama_sampler_accept", [pointer, number], None),
        reset=library_function(native, "llama_sampler_reset", [pointer], None),
        free=library_function(native, "llama_sampler_free", [pointer], None),
        make={
            name: library_function(native, f"llama_sampler_init_{name}", arguments, pointer)
            for name, arguments in signatures.items()
        },
    )


def _release(free: Callable[[int], None], samplers: list[int]) -> None:
    while samplers:
        free(samplers.pop())


def _window(last_n: int, n_ctx: int) -> int:
    return n_ctx if last_n < 0 else min(last_n, n_ctx)


def _check_breaker(text: str) -> None:
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise UsageError(
            "a DRY sequence breaker has an unpaired surrogate: give valid Unicode"
        ) from None
    if not 1 <= size <= _LONGEST_BREAKER or "\0" in text:
        raise UsageError(
            f"the DRY sequence breaker {text!r} has {size} bytes: give 1 to {_LONGEST_BREAKER}, "
            f"none of them zero"
        )
