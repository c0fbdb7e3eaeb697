"""`dspine.load`: checks what is asked for and makes an engine of it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import cast, get_args

from dspine.default_pair import choose_pair
from dspine.engine.assemble import LoadOptions, load_parts
from dspine.engine.engine import Engine
from dspine.engine.measure import check_flash
from dspine.engine.parts import ProposerName
from dspine.engine.proposal import DRAFTER
from dspine.engine.rollback import ROLLBACK_CHOICES
from dspine.errors import UsageError


def load(
    model: str | Path | None = None,
    drafter: str | Path | None = None,
    *,
    proposer: str = "auto",
    n_ctx: int | None = None,
    n_threads: int | None = None,
    n_batch: int = 512,
    n_gpu_layers: int = 0,
    spec_draft_n_max: int | None = None,
    rollback: str = "auto",
    flash_attention: bool | None = None,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    swa_full: bool = False,
    library: str | Path | None = None,
    cache_dir: str | Path | None = None,
    probe: bool = True,
    calibrate: bool = True,
    calibrate_anew: bool = False,
    ngram_min_match: int = 2,
    ngram_table: str | Path | None = None,
    chat_template: str | None = None,
    check_cache: bool = True,
    parallel: int = 1,
) -> Engine:
    """Load a target and its drafter and measure how wide to draft on this machine.

    model, drafter: GGUF files; without `model` the default pair.
    proposer: auto (n-gram where a long match exists, else the drafter), drafter (or, as it was
    called before there were other kinds, dspine), ngram or none.
    n_ctx: positions of prompt and answer together (default: the model's, at most 4096).
    n_threads: default one for each physical core, or fewer where that is measured to be faster.
    n_batch: prompt tokens decoded at once.
    spec_draft_n_max: drafts of every step (default: as many as pay, decided at each step).
    rollback: how rejected drafts leave the target's memory: auto, trim, snapshots or checkpoint.
    flash_attention: on, off, or None for the faster one.
    cache_type_k, cache_type_v: number formats of the target's cache. swa_full: keep positions
    that left a sliding window.
    library: folder of another llama.cpp build. cache_dir: where measurements are kept.
    probe: test the library in a child process first. calibrate: measure, or take what is kept;
    calibrate_anew: measure in any case and keep that.
    ngram_min_match: shortest repeat that is continued. ngram_table: a table of likely next
    tokens (default: the one beside the drafter, NAME.ngram.npz). chat_template: Jinja text.
    check_cache: refuse quantised caches that change too many choices for a drafter.
    parallel: sequences on which `Engine.scheduler` answers at once; `n_ctx` is then divided
    among them (default: as much for each as one alone has).

    Raises UsageError, FileError, PairError, LibraryError or CapacityError with a sentence.
    """
    if proposer == "drafter":
        proposer = DRAFTER
    if proposer not in get_args(ProposerName):
        raise UsageError(f"proposer is {proposer!r}: choose one of auto, drafter, ngram, none")
    if rollback not in ROLLBACK_CHOICES:
        raise UsageError(f"rollback is {rollback!r}: choose one of {', '.join(ROLLBACK_CHOICES)}")
    for name, value, least in (
        ("n_ctx", n_ctx, 1),
        ("n_threads", n_threads, 1),
        ("n_batch", n_batch, 1),
        ("spec_draft_n_max", spec_draft_n_max, 1),
        ("ngram_min_match", ngram_min_match, 1),
        ("parallel", parallel, 1),
    ):
        if value is not None and value < least:
            raise UsageError(f"{name} is {value}: it must be at least {least}")
    if n_ctx is not None and n_ctx < parallel:
        raise UsageError(
            f"n_ctx is {n_ctx} for {parallel} sequences: each needs at least one position"
        )
    if n_batch < parallel:
        raise UsageError(
            f"n_batch is {n_batch} for {parallel} sequences: a decode needs a row for each of them"
        )
    check_flash(flash_attention, cache_type_v)
    pair = choose_pair(_path(model), _path(drafter))
    engine = Engine(
        load_parts(
            LoadOptions(
                model=pair[0],
                drafter=pair[1],
                proposer=cast("ProposerName", proposer),
                n_ctx=n_ctx,
                n_threads=n_threads,
                n_batch=n_batch,
                n_gpu_layers=n_gpu_layers,
                spec_draft_n_max=spec_draft_n_max,
                rollback=rollback,
                swa_full=swa_full,
                flash_attention=flash_attention,
                cache_type_k=cache_type_k,
                cache_type_v=cache_type_v,
                library=_path(library),
                cache_dir=_path(cache_dir),
                probe=probe,
                calibrate=calibrate,
                calibrate_anew=calibrate_anew,
                ngram_min_match=ngram_min_match,
                ngram_table=_path(ngram_table),
                chat_template=chat_template,
                check_cache=check_cache,
                parallel=parallel,
            )
        )
    )
    # Python would look through all that was loaded during one of the first answers: 15 ms at once.
    gc.collect()
    return engine


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value).expanduser()
