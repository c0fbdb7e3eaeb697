"""From checked options to the parts of an engine: library, target, drafter, times, context."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dspine.drafters.kinds import AnyDrafter, open_drafter
from dspine.engine.costs import CostTable, interpolate
from dspine.engine.kv_types import check_cache_types
from dspine.engine.llama_target import LlamaTarget, LlamaTargets
from dspine.engine.lookups import LOOKUP_SCORES
from dspine.engine.measure import Conditions, calibrated, fewer_threads, needs_flash
from dspine.engine.ngram_table import NgramTable
from dspine.engine.parts import EngineParts, ProposerName, TargetFacts
from dspine.engine.policies import UNKNOWN_CURVE, assumes_acceptance, does_not_pay, policy_maker
from dspine.engine.promise import Promise
from dspine.engine.prompt import token_text
from dspine.engine.rollback import MAX_REPLAY, RollbackMode, check_snapshots, choose_rollback
from dspine.engine.state_copies import measure_copies, snapshots_or_not
from dspine.engine.waiting import Copies
from dspine.engine.width import WidthPlan, best_width, plan_widths
from dspine.errors import FileError, UsageError
from dspine.files.drafter_file import DrafterFile, read_drafter
from dspine.files.fingerprint import file_fingerprint
from dspine.files.pairing import check_pair, check_unpaired, describe_target, rotary_base
from dspine.llama.cache_size import check_cache
from dspine.llama.context import Context
from dspine.llama.library import find_library
from dspine.llama.model import Model, check_file, load_safely
from dspine.llama.sampler import SamplerChain
from dspine.llama.sampler_options import ChainOptions
from dspine.machine import cache_folder, physical_cores
from dspine.measured import Calibration
from dspine.text.chat_template import TEMPLATE_KEY, ChatTemplate

log = logging.getLogger("dspine.load")
"""Says at level INFO what is done now, for whoever waits."""

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


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What options, target and drafter file settle before anything is measured."""

    block: int
    """Width of the drafter's block, 1 without a drafter."""
    most: int
    """Rows of a verify at most."""
    drafts: int
    """Drafts of a step at most."""
    n_ctx: int
    """Positions of each sequence."""
    n_threads: int


@dataclass(frozen=True, slots=True)
class _Rollback:
    """How rejected drafts leave the memory, why so, and what its copies cost (None: nothing)."""

    mode: RollbackMode
    reason: str
    copies: Copies | None = None

    @property
    def replay(self) -> int:
        """Confirmed rows that are decoded again in front of an anchor at most."""
        return MAX_REPLAY if self.mode == "checkpoint" else 0

    def snapshots(self, drafts: int) -> int:
        """They cost memory all the time: as many as may be drafted, and none without drafts."""
        return drafts if self.mode == "snapshots" else 0


@dataclass(frozen=True, slots=True)
class _Choice:
    """What the times have decided; without times, what holds then."""

    n_threads: int
    flash_attention: bool
    measured: Calibration | None = None
    plan: WidthPlan | None = None
    costs: CostTable | None = None
    disabled: str | None = None
    """Why the drafter pays nowhere, if it does not."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What was opened, and what was settled for it."""

    model: Model
    file: DrafterFile | None
    drafter: AnyDrafter | None
    sizes: _Sizes
    rollback: _Rollback
    choice: _Choice


def load_parts(options: LoadOptions) -> EngineParts:
    """Everything an engine is made of; frees what it made when it fails halfway."""
    if options.proposer == "dspine" and options.drafter is None:
        raise UsageError("proposer drafter needs a drafter: give its file (-md)")
    check_file(options.model)
    file, notices = _read_drafter(options)
    with ExitStack() as stack:
        log.info("reading the target")
        library = find_library(options.library)
        notices += [library.notice] if library.notice else []
        folder = options.cache_dir or cache_folder()
        model = stack.enter_context(_load_target(options, folder))
        notices += [model.notice] if model.notice else []
        mode = choose_rollback(
            options.rollback, is_recurrent=model.is_recurrent, architecture=model.architecture
        )
        sizes = _sizes(options, model, file)
        _check_cache(options, model, sizes)
        rollback = _settle_rollback(mode, options, model, sizes.drafts)
        if file is not None:
            log.info("reading the drafter")
        drafter = _open_drafter(options, model, file, sizes, folder)
        if drafter is not None:
            stack.callback(drafter.close)
        if options.calibrate:
            log.info("measuring this machine, or taking what was measured before")
        choice = _choose(options, model, file, drafter, sizes, rollback.copies, folder)
        if options.calibrate and file is not None and not file.record.acceptance_curve:
            notices.append(assumes_acceptance(file.path))
        if drafter is not None and choice.disabled is not None:
            drafter.close()
            drafter = None
        loaded = _Loaded(model, file, drafter, sizes, rollback, choice)
        log.info("making the context")
        context = stack.enter_context(_make_context(options, loaded))
        check_snapshots(rollback.snapshots(sizes.drafts), context.snapshots, model.architecture)
        if drafter is not None:
            drafter.prepare(0, range(2, min(sizes.block, sizes.drafts + 1) + 1))
        parts = _assemble(options, loaded, context, notices)
        parts.close = stack.pop_all().close
        return parts


def _read_drafter(options: LoadOptions) -> tuple[DrafterFile | None, list[str]]:
    """The drafter's file, if one is wanted, and what to say of the pair.

    Headers alone tell a wrong pair, before a large target is loaded.
    """
    if options.drafter is None or options.proposer not in ("auto", "dspine"):
        return None, []
    file = read_drafter(options.drafter)
    described = describe_target(options.model)
    wanted, most = options.spec_draft_n_max or 0, file.config.block_size - 1
    notices = []
    if wanted > most:
        notices.append(
            f"--spec-draft-n-max is {wanted}, and a block of {file.path.name} has {most} drafts: "
            f"it makes no more"
        )
    if file.pair is not None:
        return file, [*check_pair(file.pair, described), *notices]
    base = rotary_base(options.model)
    return file, [*check_unpaired(file.path.name, file.config, described, base), *notices]


def _load_target(options: LoadOptions, folder: Path) -> Model:
    if options.probe:
        return load_safely(options.model, n_gpu_layers=options.n_gpu_layers, cache_dir=folder)
    return Model.load(options.model, n_gpu_layers=options.n_gpu_layers)


def _sizes(options: LoadOptions, model: Model, file: DrafterFile | None) -> _Sizes:
    block = file.config.block_size if file else 1
    most = max(MAX_NGRAM_WIDTH, block)
    wanted = 0 if options.proposer == "none" else options.spec_draft_n_max or most
    asked = (options.n_ctx or 0) // options.parallel
    return _Sizes(
        block=block,
        most=most,
        drafts=min(wanted, most - 1),
        n_ctx=asked or min(model.context_train, DEFAULT_CONTEXT),
        n_threads=options.n_threads or physical_cores(),
    )


def _check_cache(options: LoadOptions, model: Model, sizes: _Sizes) -> None:
    """Before anything is opened or measured in a context of that size."""
    check_cache(
        model,
        sizes.n_ctx,
        options.parallel,
        options.cache_type_k,
        options.cache_type_v,
        options.flash_attention is not False,
        options.swa_full,
    )


def _settle_rollback(
    mode: RollbackMode, options: LoadOptions, model: Model, drafts: int
) -> _Rollback:
    if mode != "checkpoint":
        wanted = "as was asked for" if options.rollback == mode else ""
        return _Rollback(mode, wanted or "the memory is one of separate positions")
    if not drafts:
        return _Rollback(mode, "nothing is drafted")
    copies = measure_copies(model, drafts, n_threads=options.n_threads or physical_cores())
    if options.rollback != "auto":
        return _Rollback(mode, "as was asked for", copies.times)
    fits, why = snapshots_or_not(copies, drafts, options.n_batch, options.parallel)
    return _Rollback("snapshots", why) if fits else _Rollback(mode, why, copies.times)


def _open_drafter(
    options: LoadOptions, model: Model, file: DrafterFile | None, sizes: _Sizes, folder: Path
) -> AnyDrafter | None:
    if file is None:
        return None
    if options.check_cache:
        check_cache_types(
            model,
            options.cache_type_k,
            options.cache_type_v,
            n_threads=sizes.n_threads,
            folder=folder,
        )
    return open_drafter(file, model, n_ctx=sizes.n_ctx, n_threads=sizes.n_threads)


def _choose(
    options: LoadOptions,
    model: Model,
    file: DrafterFile | None,
    drafter: AnyDrafter | None,
    sizes: _Sizes,
    copies: Copies | None,
    folder: Path,
) -> _Choice:
    """Threads, flash attention and widths, by the times of this machine where they are wanted."""
    flash = options.flash_attention
    if flash is None and model.library.kernels.active:
        # Our kernels take over attention only as one operation; cut into products it would
        # make logits depend on the batch again.
        flash = True
    if not options.calibrate:
        needed = needs_flash(options.cache_type_v)
        return _Choice(sizes.n_threads, needed if flash is None else flash)
    conditions = Conditions(
        n_ctx=sizes.n_ctx,
        n_threads=sizes.n_threads,
        flash_attention=options.flash_attention,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        most_rows=sizes.most,
        is_settled=flash is not None and not options.calibrate_anew,
        fewer_threads=() if options.n_threads else fewer_threads(sizes.n_threads),
    )
    measured = calibrated(model, file, drafter, conditions, folder, anew=options.calibrate_anew)
    n_threads = measured.n_threads or sizes.n_threads
    if drafter is not None:
        drafter.set_threads(n_threads)
    curve, block = _acceptance(file), sizes.block
    rows_ms = measured.rows_ms if flash is None else {flash: measured.rows_ms[flash]}
    plan = plan_widths(rows_ms, measured.draft_ms, curve, NGRAM_CURVE, sizes.most, block, copies)
    disabled = None
    if drafter is not None and options.spec_draft_n_max is None:
        hoped = [0.5 + 0.5 * chance for chance in curve]
        costs = plan.cost_ms, measured.draft_ms, hoped, block, copies
        if best_width(*costs).width < 2:
            disabled = does_not_pay(*costs)
    return _Choice(
        n_threads,
        plan.flash_attention if flash is None else flash,
        measured,
        plan,
        measured.costs(plan.flash_attention),
        disabled,
    )


def _acceptance(file: DrafterFile | None) -> Sequence[float]:
    """The chance of each slot to be accepted if all before it are, as far as the file says."""
    return (file.record.acceptance_curve if file else ()) or UNKNOWN_CURVE


def _no_room(options: LoadOptions) -> str | None:
    """Why nothing can be drafted, where batches hold no row beside the anchors."""
    if options.proposer == "none" or options.n_batch >= 2 * options.parallel:
        return None
    return (
        f"batches of {options.n_batch} tokens (-b) for {options.parallel} sequence(s) have no row "
        f"for a draft"
    )


def _trained_on_thoughts(file: DrafterFile | None) -> bool | None:
    return None if file is None or file.pair is None else file.pair.thinking


def _make_context(options: LoadOptions, loaded: _Loaded) -> Context:
    sizes, rollback, drafter = loaded.sizes, loaded.rollback, loaded.drafter
    return Context(
        loaded.model,
        n_ctx=sizes.n_ctx,
        n_batch=options.n_batch,
        n_threads=loaded.choice.n_threads,
        flash_attention=loaded.choice.flash_attention,
        cache_type_k=options.cache_type_k,
        cache_type_v=options.cache_type_v,
        taps=drafter.taps if drafter else (),
        max_outputs=options.parallel * (sizes.most + rollback.replay),
        snapshots=rollback.snapshots(sizes.drafts),
        n_sequences=options.parallel,
        swa_full=options.swa_full,
    )


def _assemble(
    options: LoadOptions, loaded: _Loaded, context: Context, notices: Sequence[str]
) -> EngineParts:
    model, file, drafter = loaded.model, loaded.file, loaded.drafter
    sizes, rollback, choice = loaded.sizes, loaded.rollback, loaded.choice
    policy = policy_maker(
        choice.costs,
        options.spec_draft_n_max,
        block_size=sizes.block if drafter else 1,
        most=sizes.most,
        curve=_acceptance(file),
        snapshots=rollback.snapshots(sizes.drafts),
        replay=rollback.replay,
        parallel=options.parallel,
        follows=drafter is not None and drafter.follows,
    )
    together = LlamaTargets(context) if options.parallel > 1 else None
    return EngineParts(
        model_path=options.model,
        target=together.targets[0] if together else LlamaTarget(context),
        tokenizer=model.tokenizer,
        facts=TargetFacts(
            model.context_train, model.hidden_size, model.num_parameters, model.size_bytes
        ),
        policy=policy(),
        together=together,
        make_policy=policy,
        rows_ms=partial(interpolate, choice.costs.rows_ms) if choice.costs is not None else None,
        proposer=options.proposer,
        template=_template(options, model),
        rollback=rollback.mode,
        rollback_reason=rollback.reason,
        is_recurrent=model.is_recurrent,
        drafter=drafter,
        drafter_path=options.drafter,
        trained_on_thoughts=None if drafter is None else _trained_on_thoughts(file),
        max_positions=min(file.config.max_positions, sizes.n_ctx) if file else 0,
        promise=Promise(next(iter(file.record.acceptance_curve), None) if file else None),
        ngram_min_match=options.ngram_min_match,
        ngram_table=_table(options, model.vocab_size),
        plan=choice.plan,
        calibration=choice.measured,
        disabled_reason=choice.disabled or _no_room(options),
        notices=tuple(notices),
        made_with={
            "target": file_fingerprint(options.model),
            "drafter": None if drafter is None or file is None else file_fingerprint(file.path),
            "library": model.library.llama_version,
            "cache_type_k": options.cache_type_k,
            "cache_type_v": options.cache_type_v,
            "flash_attention": choice.flash_attention,
        },
        make_sampler=_sampler_maker(model, sizes.n_ctx),
    )


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
            f"{vocab_size}: the n-gram table belongs to another target, name this one's "
            "(--ngram-table) or none"
        )
    return table
