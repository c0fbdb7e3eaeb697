"""Makes an engine from files: library, target, drafter, measured widths, context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast, get_args

from dspine.default_pair import choose_pair
from dspine.drafters.kinds import AnyDrafter, open_drafter
from dspine.engine.costs import interpolate
from dspine.engine.engine import Engine, EngineParts, ProposerName
from dspine.engine.kv_types import check_cache_types
from dspine.engine.llama_target import LlamaTarget, LlamaTargets
from dspine.engine.measure import Conditions, calibrated, check_flash, fewer_threads, needs_flash
from dspine.engine.ngram_table import NgramTable
from dspine.engine.policies import UNKNOWN_CURVE, assumes_acceptance, does_not_pay, policy_maker
from dspine.engine.prompt import token_text
from dspine.engine.proposal import DRAFTER
from dspine.engine.proposers import LOOKUP_SCORES
from dspine.engine.rollback import (
    MAX_REPLAY,
    ROLLBACK_CHOICES,
    RollbackMode,
    check_snapshots,
    choose_rollback,
)
from dspine.engine.state_copies import measure_copies, snapshots_or_not
from dspine.engine.waiting import Copies
from dspine.engine.width import best_width, plan_widths
from dspine.errors import FileError, UsageError
from dspine.files.drafter_file import DrafterFile, read_drafter
from dspine.files.fingerprint import file_fingerprint
from dspine.files.pairing import check_pair, check_unpaired, describe_target
from dspine.llama.context import Context
from dspine.llama.library import find_library
from dspine.llama.model import Model, check_file, load_safely
from dspine.llama.sampler import SamplerChain
from dspine.llama.sampler_options import ChainOptions
from dspine.machine import cache_folder, physical_cores
from dspine.text.chat_template import TEMPLATE_KEY, ChatTemplate

DEFAULT_CONTEXT = 4096
MAX_NGRAM_WIDTH = 16
"""Rows verified at most for an n-gram proposal; long matches go on for long."""

NGRAM_CURVE = tuple(score for _, score in reversed(LOOKUP_SCORES[:-1]))
"""Acceptance along a lookup that starts with a match of two tokens."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Checked options of `load`; None stands for a default that depends on the target."""

    model: Path
    drafter: Path | None
    proposer: ProposerName
    n_ctx: int | None
    n_threads: int | None
    n_batch: int
    n_gpu_layers: int
    spec_draft_n_max: int | None
    flash_attention: bool | None
    cache_type_k: str
    cache_type_v: str
    library: Path | None
    cache_dir: Path | None
    probe: bool
    calibrate: bool
    calibrate_anew: bool
    ngram_min_match: int
    ngram_table: Path | None
    chat_template: str | None
    rollback: str = "auto"
    check_cache: bool = True
    swa_full: bool = False
    parallel: int = 1


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
    return Engine(
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


def load_parts(options: LoadOptions) -> EngineParts:
    """Everything an engine is made of; frees what it made when it fails halfway."""
    if options.proposer == "dspine" and options.drafter is None:
        raise UsageError("proposer drafter needs a drafter: give its file (-md)")
    check_file(options.model)
    file: DrafterFile | None = None
    notices: list[str] = []
    if options.drafter is not None and options.proposer in ("auto", "dspine"):
        # Headers alone tell a wrong pair, before a large target is loaded.
        file = read_drafter(options.drafter)
        described = describe_target(options.model)
        notices += (
            check_pair(file.pair, described)
            if file.pair is not None
            else check_unpaired(file.path.name, file.config, described)
        )
    with ExitStack() as stack:
        find_library(options.library)
        cache_dir = options.cache_dir or cache_folder()
        model = stack.enter_context(
            load_safely(options.model, n_gpu_layers=options.n_gpu_layers, cache_dir=cache_dir)
            if options.probe
            else Model.load(options.model, n_gpu_layers=options.n_gpu_layers)
        )
        notices += [model.notice] if model.notice else []
        rollback = choose_rollback(
            options.rollback, is_recurrent=model.is_recurrent, architecture=model.architecture
        )
        block = file.config.block_size if file else 1
        most = max(MAX_NGRAM_WIDTH, block)
        drafts = (
            0 if options.proposer == "none" else min(options.spec_draft_n_max or most, most - 1)
        )
        rollback, why, copies = _settle_rollback(rollback, options, model, drafts)
        flash = options.flash_attention
        if flash is None and model.library.kernels.active:
            # Our kernels take over attention only as one operation; cut into products it would
            # make logits depend on the batch again.
            flash = True
        parallel = options.parallel
        n_ctx = (options.n_ctx or 0) // parallel or min(model.context_train, DEFAULT_CONTEXT)
        n_threads = options.n_threads or physical_cores()

        drafter: AnyDrafter | None = None
        if file is not None and options.check_cache:
            check_cache_types(
                model,
                options.cache_type_k,
                options.cache_type_v,
                n_threads=n_threads,
                folder=cache_dir,
            )
        if file is not None:
            drafter = open_drafter(file, model, n_ctx=n_ctx, n_threads=n_threads)
            stack.callback(drafter.close)

        measured = plan = disabled = costs = None
        curve = (file.record.acceptance_curve if file else ()) or UNKNOWN_CURVE
        if options.calibrate:
            conditions = Conditions(
                n_ctx=n_ctx,
                n_threads=n_threads,
                flash_attention=options.flash_attention,
                cache_type_k=options.cache_type_k,
                cache_type_v=options.cache_type_v,
                most_rows=most,
                is_settled=flash is not None and not options.calibrate_anew,
                fewer_threads=() if options.n_threads else fewer_threads(n_threads),
            )
            measured = calibrated(
                model, file, drafter, conditions, cache_dir, anew=options.calibrate_anew
            )
            n_threads = measured.n_threads or n_threads
            if drafter is not None:
                drafter.set_threads(n_threads)
            if file is not None and not file.record.acceptance_curve:
                notices.append(assumes_acceptance(file.path))
            rows_ms = measured.rows_ms if flash is None else {flash: measured.rows_ms[flash]}
            plan = plan_widths(rows_ms, measured.draft_ms, curve, NGRAM_CURVE, most, block, copies)
            costs = measured.costs(plan.flash_attention)
            hoped = [0.5 + 0.5 * chance for chance in curve]
            if drafter is not None and options.spec_draft_n_max is None:
                choice = best_width(plan.cost_ms, measured.draft_ms, hoped, block, copies)
                if choice.width < 2:
                    drafter.close()
                    drafter = None
                    disabled = does_not_pay(plan.cost_ms, measured.draft_ms, hoped, block, copies)
        if flash is None:
            flash = plan.flash_attention if plan else needs_flash(options.cache_type_v)
        # Snapshots cost memory all the time: as many as may be drafted, and none without drafts.
        snapshots = drafts if rollback == "snapshots" else 0
        replay = MAX_REPLAY if rollback == "checkpoint" else 0
        context = stack.enter_context(
            Context(
                model,
                n_ctx=n_ctx,
                n_batch=options.n_batch,
                n_threads=n_threads,
                flash_attention=flash,
                cache_type_k=options.cache_type_k,
                cache_type_v=options.cache_type_v,
                taps=drafter.taps if drafter else (),
                max_outputs=parallel * (most + replay),
                snapshots=snapshots,
                n_sequences=parallel,
                swa_full=options.swa_full,
            )
        )
        check_snapshots(snapshots, context.snapshots, model.architecture)
        if drafter is not None:
            drafter.prepare(0, range(2, min(block, drafts + 1) + 1))

        policy = policy_maker(
            costs,
            options.spec_draft_n_max,
            block_size=block if drafter else 1,
            most=most,
            curve=curve,
            snapshots=snapshots,
            replay=replay,
            parallel=parallel,
        )
        together = LlamaTargets(context) if parallel > 1 else None
        parts = EngineParts(
            model_path=options.model,
            target=together.targets[0] if together else LlamaTarget(context),
            tokenizer=model.tokenizer,
            policy=policy(),
            together=together,
            make_policy=policy,
            rows_ms=partial(interpolate, costs.rows_ms) if costs is not None else None,
            proposer=options.proposer,
            template=_template(options, model),
            rollback=rollback,
            rollback_reason=why,
            is_recurrent=model.is_recurrent,
            drafter=drafter,
            drafter_path=options.drafter,
            max_positions=min(file.config.max_positions, n_ctx) if file else 0,
            ngram_min_match=options.ngram_min_match,
            ngram_table=_table(options, model.vocab_size),
            plan=plan,
            calibration=measured,
            disabled_reason=disabled,
            notices=tuple(notices),
            made_with={
                "target": file_fingerprint(options.model),
                "drafter": None if drafter is None or file is None else file_fingerprint(file.path),
                "library": model.library.llama_version,
                "cache_type_k": options.cache_type_k,
                "cache_type_v": options.cache_type_v,
                "flash_attention": flash,
            },
            make_sampler=_sampler_maker(model, n_ctx),
        )
        parts.close = stack.pop_all().close
        return parts


def _settle_rollback(
    mode: RollbackMode, options: LoadOptions, model: Model, drafts: int
) -> tuple[RollbackMode, str, Copies | None]:
    """The mode, why it is that one, and what its copies cost (None: nothing)."""
    if mode != "checkpoint":
        wanted = "as was asked for" if options.rollback == mode else ""
        return mode, wanted or "the memory is one of separate positions", None
    if not drafts:
        return mode, "nothing is drafted", None
    copies = measure_copies(model, drafts, n_threads=options.n_threads or physical_cores())
    if options.rollback != "auto":
        return mode, "as was asked for", copies.times
    fits, why = snapshots_or_not(copies, drafts, options.n_batch, options.parallel)
    return ("snapshots", why, None) if fits else (mode, why, copies.times)


def _template(options: LoadOptions, model: Model) -> ChatTemplate | None:
    source = options.chat_template or model.metadata(TEMPLATE_KEY)
    if not source:
        return None
    tokenizer = model.tokenizer
    return ChatTemplate(
        source,
        bos=token_text(tokenizer, tokenizer.bos),
        eos=token_text(tokenizer, tokenizer.eos),
    )


def _sampler_maker(
    model: Model, n_ctx: int
) -> Callable[[ChainOptions, Sequence[int]], SamplerChain]:
    def make(options: ChainOptions, prompt: Sequence[int]) -> SamplerChain:
        chain = SamplerChain(options, n_vocab=model.vocab_size, n_ctx=n_ctx, model=model)
        chain.accept_all(prompt)
        return chain

    return make


def _table(options: LoadOptions, vocab_size: int) -> NgramTable | None:
    if options.proposer not in ("auto", "ngram"):
        return None
    path = options.ngram_table
    if path is None and options.drafter is not None:
        beside = options.drafter.with_suffix(".ngram.npz")
        path = beside if beside.exists() else None
    if path is None:
        return None
    table = NgramTable.load(path)
    if table.highest_token >= vocab_size:
        raise FileError(
            f"{path} proposes token {table.highest_token}, the target's vocabulary has "
            f"{vocab_size}: the n-gram table belongs to another target"
        )
    return table


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value).expanduser()
