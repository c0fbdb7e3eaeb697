"""A target ready to decode: its cache, its logits, its taps."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from dspine.errors import CapacityError, ClosedError, LibraryError, UsageError
from dspine.ggml import kernels
from dspine.llama.batch import Batch
from dspine.llama.cache_size import free_state_bytes
from dspine.llama.checks import require_count
from dspine.llama.context_options import ContextOptions
from dspine.llama.handle import Handle
from dspine.llama.log import capture
from dspine.llama.memory import Memory
from dspine.llama.model import Model
from dspine.llama.results import BestTokens
from dspine.llama.state import State
from dspine.llama.taps import (
    PUBLISHING_ARCHITECTURES,
    CallbackTaps,
    LastingView,
    LayerInputTaps,
    RowBuffer,
    Rows,
    TapReader,
    float_view,
)

_NO_SLOT, _ABORTED = 1, 2


class Context:
    """Decodes batches of a Model; not thread-safe, one user at a time.

    `n_ctx` is the number of positions of each sequence (with `shared_cache`: of all sequences
    together). `taps` are layer ids whose output rows `features` returns. `embeddings` makes
    `hidden` available and computes logits for every row. `max_outputs` bounds the rows with
    logits in one batch (default `n_batch`) and with it the memory for them. `snapshots` copies
    of recurrent state let as many of the last rows be removed again; the attribute is what the
    library keeps, 0 where it cannot. `swa_full` keeps positions that left a sliding window.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int = 512,
        n_threads: int | None = None,
        flash_attention: bool = False,
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        n_sequences: int = 1,
        taps: tuple[int, ...] = (),
        embeddings: bool = False,
        shared_cache: bool = False,
        max_outputs: int | None = None,
        snapshots: int = 0,
        swa_full: bool = False,
        taps_by_callback: bool = False,
    ) -> None:
        options = ContextOptions(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_threads=n_threads,
            flash_attention=flash_attention,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            n_sequences=n_sequences,
            taps=tuple(taps),
            embeddings=embeddings,
            shared_cache=shared_cache,
            max_outputs=max_outputs,
            snapshots=snapshots,
            swa_full=swa_full,
            taps_by_callback=taps_by_callback,
        )
        options.check(model)
        self.model = model
        self.n_ctx = n_ctx
        self.n_sequences = n_sequences
        self.flash_attention = flash_attention
        self.taps = options.taps
        self.embeddings = embeddings
        self.n_threads = options.threads
        self.max_outputs = options.outputs
        self._native = model.handle.native
        self._vocab_size = model.vocab_size
        self._tapped_size = len(taps) * model.hidden_size
        self._output_size = model.output_size
        self._wanted = b""  # one byte per row of the last decode, 1 where it has logits
        self._logits_views: defaultdict[int, LastingView] = defaultdict(
            lambda: LastingView(self._vocab_size)
        )
        # Before the context: its parameters name the function that is called.
        taps_of_nodes = self._taps_of_nodes(options)
        self._make(options, taps_of_nodes)
        try:
            self.n_batch: int = min(options.rows, self._native.api.llama_n_batch(self._pointer()))
            self._tap_reader = taps_of_nodes or self._taps_of_layers(options)
            self.needs_equal_rows: bool = taps_of_nodes is not None and n_sequences > 1
            """Whether all sequences of a batch must have as many rows."""
            self._best = self._best_tokens()
            self.snapshots: int = self._kept_snapshots()
            self.state = self._make_state()
            self.memory = self._make_memory(options)
        except BaseException:
            self.close()
            raise

    def _taps_of_nodes(self, options: ContextOptions) -> CallbackTaps | None:
        """For targets that do not publish the inputs of their layers."""
        if not options.taps or not (
            options.taps_by_callback
            or self._native.set_tap is None
            or self.model.architecture not in PUBLISHING_ARCHITECTURES
        ):
            return None
        return CallbackTaps(self._native, options.taps, self.model.hidden_size, options.rows)

    def _taps_of_layers(self, options: ContextOptions) -> TapReader | None:
        if not options.taps:
            return None
        return LayerInputTaps(
            self._native, self._pointer(), options.taps, self.model.hidden_size, options.rows
        )

    def _make(self, options: ContextOptions, taps: CallbackTaps | None) -> None:
        """The native context, which `close` frees; it uses the native model until then."""
        handle = self.model.handle
        api = handle.native.api
        mark = capture.count
        pointer = api.llama_init_from_model(handle.pointer, options.parameters(self.model, taps))
        if not pointer:
            raise CapacityError(
                f"a context of {self.n_ctx} tokens for {self.n_sequences} sequence(s) cannot be "
                f"made: {capture.reason(mark)}; choose a smaller one (-c) or free memory"
            )
        handle.retain()
        self._opened = _Opened(pointer)
        self._memory_value = int(api.llama_get_memory(pointer) or 0)
        self._closer = weakref.finalize(self, _release, api, self._opened, handle)

    def _best_tokens(self) -> BestTokens | None:
        """With the CPU kernels: finds the most likely tokens of many rows in one call."""
        plug_in = kernels.installed()
        if plug_in is None:
            return None
        return BestTokens(
            plug_in.library, self._native.logits_row, self.max_outputs, self._vocab_size
        )

    def _kept_snapshots(self) -> int:
        if not self.model.is_recurrent:
            return 0
        return int(self._native.api.llama_n_rs_seq(self._pointer()))

    def _make_state(self) -> State:
        model = self.model
        return State(
            self._native.api,
            self._pointer,
            self.n_sequences,
            model.is_recurrent,
            self._last_position,
            self._cut,
            lambda: free_state_bytes(model),
        )

    def _make_memory(self, options: ContextOptions) -> Memory:
        return Memory(
            self._native,
            self._memory_pointer,
            self.n_sequences,
            options.shared_cache,
            0 if options.swa_full or self.model.is_recurrent else self.model.window,
            self.state.forget_from,
        )

    def decode(self, batch: Batch) -> None:
        """Run the target over all rows of `batch`; results are valid until the next decode.

        Raises UsageError for rows that do not fit this context (token id, sequence, position)
        and CapacityError when the batch or the cache is too small; the cache is unchanged then.
        """
        pointer = self._pointer()
        self._check(batch)
        if self._tap_reader is not None:
            self._tap_reader.begin()
        self._wanted = b""
        mark = capture.count
        code = self._native.decode(pointer, batch.native)
        if code:
            raise self._decode_error(code, batch.size, mark)
        self._wanted = batch.wanted

    def wait(self) -> None:
        """Return once the results of the last decode are there (devices may still compute)."""
        self._native.synchronize(self._pointer())

    def logits(self, row: int) -> Rows:
        """float32 view (vocab,) on the logits of batch row `row`, valid until the next decode."""
        address = self._native.logits_row(self._pointer(), self._output_row(row))
        if not address:
            raise LibraryError(
                f"the library gave no logits for row {row}: decode again, or look at the library "
                "with `dspine doctor`"
            )
        return self._logits_views[row].at(address)

    def argmax(self, row: int) -> int:
        """The most likely token after batch row `row` (the lowest id among equals)."""
        return int(self.logits(row).argmax())

    def follow(self, first: int, drafts: Sequence[int]) -> Sequence[int]:
        """The most likely tokens after batch row `first` and after those behind it, as long as
        each is the draft that was decoded there: 1 to len(drafts) + 1 tokens.
        """
        end, best, wanted = first + len(drafts) + 1, self._best, self._wanted
        # Rows without logits, and logits that are no numbers, are for `argmax` to judge.
        if best is not None and 0 <= first < end <= len(wanted) and wanted.find(0, first, end) < 0:
            tokens = best.follow(self._pointer(), first, drafts)
            if tokens:
                return tokens
        found: list[int] = []
        for row in range(first, end):
            found.append(self.argmax(row))
            if row + 1 < end and found[-1] != drafts[row - first]:
                break
        return found

    def hidden(self, row: int) -> Rows:
        """float32 view (output size,) on the last hidden state of `row`, after the final norm.

        Needs `embeddings=True`; valid until the next decode.
        """
        if not self.embeddings:
            raise UsageError("hidden states were not asked for: make the context with embeddings")
        address = self._native.hidden_row(self._pointer(), self._output_row(row))
        if not address:
            raise LibraryError(
                f"the library gave no hidden state for row {row}: decode again, or look at the "
                "library with `dspine doctor`"
            )
        return float_view(address, self._output_size)

    def features(self, first: int, count: int) -> npt.NDArray[np.float32]:
        """Copy of the tapped rows [first, first + count) of the last decode.

        Shape (count, taps * hidden size), taps in the order they were named.
        """
        reader = self._tapped(first, count)
        out = RowBuffer(count, self._tapped_size)
        if count:
            reader.copy(first, count, out, 0)
        return out.rows

    def copy_features(self, first: int, count: int, out: RowBuffer, place: int) -> None:
        """The same rows to rows `place`, `place + 1`, ... of `out`, which must be as wide.

        UsageError where they do not fit.
        """
        if place < 0 or place + count > out.count or out.width != self._tapped_size:
            raise UsageError(
                f"{count} feature rows of {self._tapped_size} at row {place} do not fit into "
                f"{out.rows.shape}: make the buffer larger"
            )
        reader = self._tap_reader
        # A closed context has no rows.
        if reader is None or first < 0 or count < 1 or first + count > len(self._wanted):
            reader = self._tapped(first, count)
        reader.copy(first, count, out, place)

    def _tapped(self, first: int, count: int) -> TapReader:
        if not self.taps or self._tap_reader is None:
            raise UsageError("no layer is tapped: make the context with taps")
        self._pointer()
        if first < 0 or count < 0 or first + count > len(self._wanted):
            raise UsageError(
                f"rows {first} to {first + count - 1} were not decoded: the last decode had "
                f"{len(self._wanted)} rows"
            )
        return self._tap_reader

    def set_threads(self, n_threads: int) -> None:
        """Use that many CPU threads from the next decode on."""
        require_count("n_threads", n_threads)
        self._native.api.llama_set_n_threads(self._pointer(), n_threads, n_threads)
        self.n_threads = n_threads

    @property
    def is_closed(self) -> bool:
        return not self._opened.pointer

    def close(self) -> None:
        """Free the cache and all buffers; views on logits become invalid, later use raises."""
        self._wanted = b""
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pointer(self) -> int:
        pointer = self._opened.pointer
        if not pointer:
            raise ClosedError("this context is closed: make a new one")
        return pointer

    def _memory_pointer(self) -> int:
        self._pointer()
        return self._memory_value

    def _last_position(self, sequence: int) -> int:
        return self.memory.last_position(sequence)

    def _cut(self, sequence: int, length: int) -> bool:
        return self.memory.remove(sequence, length)

    def _output_row(self, row: int) -> int:
        if not 0 <= row < len(self._wanted):
            raise UsageError(
                f"row {row} was not decoded: the last decode had {len(self._wanted)} rows"
            )
        if not (self.embeddings or self._wanted[row]):
            raise UsageError(f"row {row} was added without logits: add it with logits")
        return row

    def _check(self, batch: Batch) -> None:
        """Everything that would make the library abort, or fail without saying why."""
        size = batch.size
        if size == 0:
            raise UsageError("the batch is empty: add rows before decoding")
        if size > self.n_batch:
            raise CapacityError(
                f"the batch has {size} rows, this context decodes at most {self.n_batch} at once: "
                f"split it, or make the context with a larger n_batch"
            )
        if batch.outputs > self.max_outputs:
            raise CapacityError(
                f"{batch.outputs} rows want logits, this context has room for {self.max_outputs}: "
                f"ask for fewer, or make the context with a larger max_outputs"
            )
        if batch.highest_token >= self._vocab_size:
            raise UsageError(
                f"token id {batch.highest_token} is outside the vocabulary of {self._vocab_size} "
                "tokens: tokenize the text with this target"
            )
        if self.needs_equal_rows and len(batch.spans) > 1 and not batch.has_equal_parts:
            # In pieces of equal length the library would come to the rows in another order.
            raise UsageError(
                f"the batch has rows of {len(batch.spans)} sequences: taps of architecture "
                f"{self.model.architecture} can be read only where each has as many, one "
                f"sequence after the other"
            )
        for sequence, (first, end) in batch.spans.items():
            self.memory.check(sequence)
            last = self._native.last_position(self._memory_value, sequence)
            if last >= 0 and first != last + 1:
                raise UsageError(
                    f"position {first} of sequence {sequence} does not follow {last}, the last "
                    f"one in memory: positions must be consecutive"
                )
            if end > self.n_ctx:
                raise CapacityError(
                    f"position {end - 1} of sequence {sequence} is beyond the context of "
                    f"{self.n_ctx} tokens: make the context larger or shorten the text"
                )

    def _decode_error(self, code: int, size: int, mark: int) -> Exception:
        reason = capture.reason(mark)
        if code == _NO_SLOT:
            return CapacityError(
                f"{size} more rows do not fit into the cache of {self.n_ctx} tokens for "
                f"{self.n_sequences} sequence(s): free sequences or make the context larger"
            )
        if code == _ABORTED:
            return LibraryError("the decode was aborted before it was complete: decode it again")
        return LibraryError(
            f"the library failed to decode {size} rows (code {code}): {reason}; look at the "
            "library with `dspine doctor`"
        )


class _Opened:
    """The native context, 0 once it is freed. To ask the finalizer would take several calls."""

    __slots__ = ("pointer",)

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer


def _release(api: Any, opened: _Opened, handle: Handle) -> None:
    pointer, opened.pointer = opened.pointer, 0
    api.llama_free(pointer)
    handle.release()
