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
from dspine.llama.checks import require_count
from dspine.llama.library import native_functions
from dspine.llama.model import Model
from dspine.llama.native import library_function
from dspine.llama.sampler_options import ChainOptions

Logits = npt.NDArray[np.float32]

HISTORY = frozenset({"penalties", "dry"})
"""Steps that look at the tokens before."""

_ROW = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
_BLOCK = 64
_LOWEST = float(np.finfo(np.float32).min)
_NEGLIGIBLE = 80.0
"""Logits this far below the best have no probability in float32."""


class Candidates(NamedTuple):
    """Tokens that may follow: their ids (n,), distinct, and the logits (n,) whose softmax is the
    distribution.
    """

    ids: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float64]


class SamplerChain:
    """The bias, and then the steps of the options in their order.

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
        windows: list[int] = []
        self._history_steps: list[int] = []
        steps = [(name, self._make_step(name, model, n_ctx, windows)) for name in options.steps]
        # Before anything is left out, penalties and DRY need to see those tokens only that
        # occurred; see `_with_bias_and_history`.
        first = next((i for i, (name, _) in enumerate(steps) if name not in HISTORY), len(steps))
        self._early = [step for _, step in steps[:first]]
        self._late = steps[first:]
        self._bounded = _bounded([name for name, _ in self._late])
        self._window = max(windows, default=0)
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
                f"token id {token} is outside the vocabulary of {self._n_vocab} tokens: tokenize "
                "the text with this target"
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
                f"the row has shape {logits.shape}, the chain is for {self._n_vocab} tokens: give "
                "the logits of its target"
            )
        changed = self._with_bias_and_history(logits)
        peak = float(changed.max())
        if not math.isfinite(peak):
            if peak == -math.inf:
                raise UsageError(
                    "the logit bias and the constraint together forbid every token: relax one"
                )
            raise LibraryError(
                "the target's logits contain values that are not numbers: copy or download its "
                "file again"
            )
        self._fill(self._contenders(changed), changed)
        for name, step in self._late:
            if name == "typ_p":
                # It takes the logarithm of probabilities, so none may be zero.
                logits = self._remaining()["logit"]
                self._keep(logits >= logits.max() - _NEGLIGIBLE)
            elif name == "xtc" and coin >= self.options.xtc_probability:
                continue
            self._run(step)
            if name == "top_n_sigma":
                self._keep(self._remaining()["logit"] > -np.inf)
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
        if not self._early or not self._history:
            return changed
        recent = np.fromiter(set(self._history[-self._window :]), np.int64)
        self._fill(recent, changed)
        for step in self._early:
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
        k, blocks = self.options.top_k if self._bounded else 0, self._n_vocab // _BLOCK
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

    def _keep(self, wanted: npt.NDArray[np.bool_]) -> None:
        """Leave out the remaining rows that are not wanted."""
        if not wanted.all():
            rows = self._remaining()
            kept = rows[wanted]
            rows[: len(kept)] = kept
            self._array.size = len(kept)

    def _run(self, step: int) -> None:
        self._calls.apply(step, ctypes.byref(self._array))

    def _reset(self, tokens: Sequence[int]) -> None:
        self._check_open()
        for step in self._history_steps:
            self._calls.reset(step)
        hidden = max(0, len(tokens) - self._window)
        self._history = list(tokens[:hidden])
        for token in tokens[hidden:]:
            self.accept(token)

    def _make_step(self, name: str, model: Model | None, n_ctx: int, windows: list[int]) -> int:
        o = self.options
        match name:
            case "penalties":
                windows.append(_window(o.repeat_last_n, n_ctx))
                values = (o.repeat_penalty, o.frequency_penalty, o.presence_penalty)
                step = self._make("penalties", self._n_vocab, windows[-1], *values)
            case "dry":
                windows.append(_window(o.dry_penalty_last_n, n_ctx))
                step = self._make_dry(model, windows[-1])
            case "top_n_sigma":
                step = self._make("top_n_sigma", o.top_n_sigma)
            case "top_k":
                step = self._make("top_k", o.top_k)
            case "typ_p":
                step = self._make("typical", o.typical_p, 0)
            case "top_p":
                step = self._make("top_p", o.top_p, 0)
            case "min_p":
                step = self._make("min_p", o.min_p, 0)
            case "xtc":
                # Its probability is 1 here: whether it acts is decided outside, by the coin.
                step = self._make("xtc", 1.0, o.xtc_threshold, 0, 0)
            case _:
                step = self._make("temp_ext", o.temperature, 0.0, 1.0)
        if name in HISTORY:
            self._history_steps.append(step)
        return step

    def _make(self, name: str, *arguments: Any) -> int:
        sampler = self._calls.make[name](*arguments)
        if not sampler:
            raise LibraryError(
                f"the library could not make its sampler {name}: leave that step out of --samplers"
            )
        self._owned.append(sampler)
        return int(sampler)

    def _make_dry(self, model: Model | None, window: int) -> int:
        options = self.options
        breakers = [text.encode() for text in options.dry_sequence_breakers]
        if breakers and model is None:
            raise UsageError("DRY with sequence breakers needs the model whose tokens they end")
        return self._make(
            "dry",
            None if model is None else model.tokenizer.vocabulary,
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
        "top_n_sigma": [real],
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


def _bounded(steps: Sequence[str]) -> bool:
    """Whether top-k comes before any step but a temperature, which keeps the order of logits."""
    return next((name for name in steps if name != "temperature"), "") == "top_k"


def _window(last_n: int, n_ctx: int) -> int:
    return n_ctx if last_n < 0 else min(last_n, n_ctx)
