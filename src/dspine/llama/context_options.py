"""What a Context is asked for: its checks, and the library's parameters for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.errors import UsageError
from dspine.llama.cache_size import CACHE_TYPES, check_cache
from dspine.llama.checks import require_count
from dspine.llama.model import Model
from dspine.llama.taps import CallbackTaps, check_taps
from dspine.machine import physical_cores


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """The arguments of `Context`, under their names there."""

    n_ctx: int
    n_batch: int
    n_threads: int | None
    flash_attention: bool
    cache_type_k: str
    cache_type_v: str
    n_sequences: int
    taps: tuple[int, ...]
    embeddings: bool
    shared_cache: bool
    max_outputs: int | None
    snapshots: int
    swa_full: bool
    taps_by_callback: bool

    @property
    def positions(self) -> int:
        """Positions of all sequences together."""
        return self.n_ctx if self.shared_cache else self.n_ctx * self.n_sequences

    @property
    def rows(self) -> int:
        """Rows of one batch at most."""
        return min(self.n_batch, self.positions)

    @property
    def outputs(self) -> int:
        """Rows with logits in one batch at most."""
        if self.embeddings or self.max_outputs is None:
            return self.rows
        return min(self.rows, max(self.max_outputs, self.n_sequences))

    @property
    def threads(self) -> int:
        return self.n_threads or physical_cores()

    def check(self, model: Model) -> None:
        """Everything that would make the library abort, or fail without saying why.

        UsageError for what cannot be, CapacityError for a cache that is too large.
        """
        for name in ("n_ctx", "n_batch", "n_sequences"):
            require_count(name, getattr(self, name))
        for name in ("n_threads", "max_outputs"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))
        require_count("snapshots", self.snapshots, 0)
        most = model.handle.native.api.llama_max_parallel_sequences()
        if self.n_sequences > most:
            raise UsageError(
                f"n_sequences is {self.n_sequences}: this library serves at most {most} "
                "sequences at once, choose fewer (-np)"
            )
        check_taps(self.taps, model.num_layers)
        check_cache(
            model,
            self.n_ctx,
            1 if self.shared_cache else self.n_sequences,
            self.cache_type_k,
            self.cache_type_v,
            self.flash_attention,
            self.swa_full,
        )
        if self.snapshots and self.rows < self.snapshots + 2:
            raise UsageError(
                f"{self.snapshots} snapshots need batches of at least {self.snapshots + 2} "
                f"tokens, this context has {self.rows}: raise the batch size (-b) or draft less"
            )

    def parameters(self, model: Model, taps: CallbackTaps | None) -> Any:
        """llama_context_params; `taps` are those that hear of every node."""
        api = model.handle.native.api
        params = api.llama_context_default_params()
        params.n_ctx = self.positions
        params.n_batch = params.n_ubatch = self.rows
        params.n_outputs_max = max(self.outputs, self.n_sequences)
        params.n_seq_max = self.n_sequences
        params.n_threads = params.n_threads_batch = self.threads
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if self.flash_attention
            else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        params.pooling_type = api.LLAMA_POOLING_TYPE_NONE
        params.type_k = CACHE_TYPES[self.cache_type_k]
        params.type_v = CACHE_TYPES[self.cache_type_v]
        params.embeddings = self.embeddings
        params.kv_unified = self.shared_cache
        params.n_rs_seq = self.snapshots
        # Only windows that slide are known to hold what a block cut off again needs.
        params.swa_full = self.swa_full or not model.window
        params.no_perf = True
        if taps is not None:
            params.cb_eval = taps.callback
        return params
