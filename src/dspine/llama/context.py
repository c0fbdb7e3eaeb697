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
from dspine.llama.cache_size import CACHE_TYPES, check_cache, free_state_bytes
from dspine.llama.checks import require_count
from dspine.llama.log import capture
from dspine.llama.memory import Memory
from dspine.llama.model import Model, _Handle
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
    check_taps,
    float_view,
)
from dspine.machine import physical_cores
from dspine.machine import usable_cores as usable_cores

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
        handle = model._open()
        api = handle.native.api
        for name, value in (
            ("n_ctx", n_ctx),
            ("n_batch", n_batch),
            ("n_sequences", n_sequences),
            ("n_threads", 1 if n_threads is None else n_threads),
            ("max_outputs", 1 if max_outputs is None else max_outputs),
        ):
            require_count(name, value)
        require_count("snapshots", snapshots, 0)
        if n_sequences > api.llama_max_parallel_sequences():
            raise UsageError(
                f"n_sequences is {n_sequences}: this library serves at most "
                f"{api.llama_max_parallel_sequences()} sequences at once"
            )
        check_taps(taps, model.num_layers)
        check_cache(
            model,
            n_ctx,
            1 if shared_cache else n_sequences,
            cache_type_k,
            cache_type_v,
            flash_attention,
            swa_full,
        )
        self.model = model
        self.n_ctx = n_ctx
        self.n_sequences = n_sequences
        self.flash_attention = flash_attention
        self.taps = tuple(taps)
        self.embeddings = embeddings
        self.n_threads = n_threads or physical_cores()
        self._native = handle.native
        self._vocab_size = model.vocab_size
        self._tapped_size = len(taps) * model.hidden_size
        self._output_size = model.output_size
        self._wanted = b""  # one byte per row of the last decode, 1 where it has logits
        native_ctx = n_ctx if shared_cache else n_ctx * n_sequences
        rows = min(n_batch, native_ctx)
        if embeddings or max_outputs is None:
            max_outputs = rows
        self.max_outputs = min(rows, max(max_outputs, n_sequences))
        if snapshots and rows < snapshots + 2:
            raise UsageError(
                f"{snapshots} snapshots need batches of at least {snapshots + 2} tokens, this "
                f"context has {rows}: raise the batch size (-b) or draft less"
            )
        self._logits_views: defaultdict[int, LastingView] = defaultdict(
            lambda: LastingView(self._vocab_size)
        )

        callback = (
            CallbackTaps(handle.native, taps, model.hidden_size, rows)
            if taps
            and (
                taps_by_callback
                or handle.native.set_tap is None
                or model.architecture not in PUBLISHING_ARCHITECTURES
            )
            else None
        )
        params = api.llama_context_default_params()
        params.n_ctx = native_ctx
        params.n_batch = params.n_ubatch = rows
        params.n_outputs_max = max(self.max_outputs, n_sequences)
        params.n_seq_max = n_sequences
        params.n_threads = params.n_threads_batch = self.n_threads
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if flash_attention
            else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.pooling_type = api.LLAMA_POOLING_TYPE_NONE
        params.type_k, params.type_v = CACHE_TYPES[cache_type_k], CACHE_TYPES[cache_type_v]
        params.embeddings = embeddings
        params.kv_unified = shared_cache
        params.n_rs_seq = snapshots
        # Only windows that slide are known to hold what a block cut off again needs.
        params.swa_full = swa_full or not model.window
        params.no_perf = True
        if callback is not None:
            params.cb_eval = callback.callback
        mark = capture.mark()
        pointer = api.llama_init_from_model(handle.pointer, params)
        if not pointer:
            raise CapacityError(
                f"a context of {n_ctx} tokens for {n_sequences} sequence(s) cannot be made: "
                f"{capture.reason(mark)}"
            )
        handle.retain()
        self._pointer_value: int = pointer
        self._memory_value = int(api.llama_get_memory(pointer) or 0)
        self._closer = weakref.finalize(self, _release, api, pointer, handle)
        try:
            self.n_batch: int = min(rows, api.llama_n_batch(pointer))
            self._tap_reader: TapReader | None = callback
            self._equal_rows = callback is not None and n_sequences > 1
            if taps and callback is None:
                self._tap_reader = LayerInputTaps(
                    handle.native, pointer, taps, model.hidden_size, rows
                )
            plug_in = kernels.installed()
            self._best: BestTokens | None = None
            if plug_in is not None:
                self._best = BestTokens(
                    plug_in.library, handle.native.logits_row, self.max_outputs, self._vocab_size
                )
            self.snapshots: int = api.llama_n_rs_seq(pointer) if model.is_recurrent else 0
            self.state = State(
                api,
                self._pointer,
                n_sequences,
                model.is_recurrent,
                self._last_position,
                self._cut,
                lambda: free_state_bytes(model),
            )
            self.memory = Memory(
                handle.native,
                self._memory_pointer,
                n_sequences,
                shared_cache,
                0 if swa_full or model.is_recurrent else model.window,
                self.state.forget_from,
            )
        except BaseException:
            self.close()
            raise

    def decode(self, batch: Batch) -> None:
        """Run the target over all rows of `batch`; results are valid until the next decode.

        Raises UsageError for rows that do not fit this context (token id, sequence, position)
        and CapacityError when the batch or the cache is too small; the cache is unchanged then.
        """
        pointer = self._pointer()
        size = len(batch)
        self._check(batch, size)
        if self._tap_reader is not None:
            self._tap_reader.begin()
        self._wanted = b""
        mark = capture.mark()
        code = self._native.decode(pointer, batch.native)
        if code:
            raise self._decode_error(code, size, mark)
        self._wanted = batch.wanted()

    def wait(self) -> None:
        """Return once the results of the last decode are there (devices may still compute)."""
        self._native.synchronize(self._pointer())

    def logits(self, row: int) -> Rows:
        """float32 view (vocab,) on the logits of batch row `row`, valid until the next decode."""
        address = self._native.logits_row(self._pointer(), self._output_row(row))
        if not address:
            raise LibraryError(f"the library gave no logits for row {row}")
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
            raise LibraryError(f"the library gave no hidden state for row {row}")
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
        if place < 0 or place + count > len(out.rows) or out.rows.shape[1] != self._tapped_size:
            raise UsageError(
                f"{count} feature rows of {self._tapped_size} at row {place} do not fit into "
                f"{out.rows.shape}"
            )
        self._tapped(first, count).copy(first, count, out, place)

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
        return not self._closer.alive

    def close(self) -> None:
        """Free the cache and all buffers; views on logits become invalid, later use raises."""
        self._wanted = b""
        self._closer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pointer(self) -> int:
        if not self._closer.alive:
            raise ClosedError("this context is closed: make a new one")
        return self._pointer_value

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

    def _check(self, batch: Batch, size: int) -> None:
        """Everything that would make the library abort, or fail without saying why."""
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
                f"token id {batch.highest_token} is outside the vocabulary of "
                f"{self._vocab_size} tokens"
            )
        if self._equal_rows and len(batch.spans) > 1 and not batch.has_equal_parts:
            # In pieces of equal length the library would come to the rows in another order.
            raise UsageError(
                f"the batch has rows of {len(batch.spans)} sequences: taps of architecture "
                f"{self.model.architecture} can be read only where each has as many, one "
                f"sequence after the other"
            )
        for sequence, (first, end) in batch.spans.items():
            last = self.memory.last_position(sequence)
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
            return LibraryError("the decode was aborted before it was complete")
        return LibraryError(f"the library failed to decode {size} rows (code {code}): {reason}")


def _release(api: Any, pointer: int, handle: _Handle) -> None:
    api.llama_free(pointer)
    handle.release()
