"""Measures a loaded pair on this machine, or takes what an earlier start has kept of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from dspine.drafters.base import Drafter
from dspine.engine import calibrate
from dspine.engine.kept import cached, file_identity
from dspine.engine.llama_target import LlamaTarget
from dspine.errors import UsageError
from dspine.files.drafter_file import DrafterFile
from dspine.kernels.build import library_path
from dspine.llama.context import Context
from dspine.llama.model import Model
from dspine.machine import cpu_model, usable_cores
from dspine.measured import DEPTH, FURTHER, NOISY, Calibration


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the times depend on besides the files.

    `flash_attention` None: both settings. `fewer_threads` are tried beside `n_threads`.
    """

    n_ctx: int
    n_threads: int
    flash_attention: bool | None
    cache_type_k: str
    cache_type_v: str
    most_rows: int
    is_settled: bool = False
    """Flash attention stays on where it may, whatever the times say: off is not timed."""
    fewer_threads: tuple[int, ...] = ()

    @property
    def settings(self) -> tuple[bool, ...]:
        """The flash attention settings that are possible and not ruled out."""
        if self.flash_attention is not None:
            return (self.flash_attention,)
        return (True,) if self.is_settled or needs_flash(self.cache_type_v) else (False, True)


def needs_flash(cache_type_v: str) -> bool:
    """A quantised value cache works with flash attention only."""
    return cache_type_v not in ("f32", "f16", "bf16")


def check_flash(flash_attention: bool | None, cache_type_v: str) -> None:
    """UsageError where a cache was asked for that needs what was switched off."""
    if flash_attention is False and needs_flash(cache_type_v):
        raise UsageError(
            f"the value cache is {cache_type_v} (-ctv), which needs flash attention, and that is "
            f"off: use -fa auto or on, or -ctv f16"
        )


def calibrated(
    model: Model,
    file: DrafterFile | None,
    drafter: Drafter | None,
    conditions: Conditions,
    folder: Path,
    *,
    anew: bool = False,
) -> Calibration:
    """Times of this pair under these conditions, kept in `folder`; `anew` measures in any case."""
    key = key_of(model, file.path if file else None, conditions)
    found, _ = cached(key, folder, lambda: measure(model, file, drafter, conditions), anew=anew)
    return found


def key_of(model: Model, drafter: Path | None, conditions: Conditions) -> dict[str, Any]:
    """All that the times depend on: where one of it changes, they are measured again.

    `drafter` is its file. Raises OSError where a file has gone.
    """
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "kernels": [model.library.kernels.text, library_path(Path(), "").name],
        "library": [
            *file_identity(model.library.file),
            str(model.library.file.parent.resolve()),
        ],
        "target": file_identity(model.path),
        "drafter": file_identity(drafter) if drafter else None,
        "cache_types": [conditions.cache_type_k, conditions.cache_type_v],
        "n_threads": [conditions.n_threads, *conditions.fewer_threads],
        "n_ctx": conditions.n_ctx,
        "n_gpu_layers": model.n_gpu_layers,
        "extra_buffers": model.use_extra_buffers,
        "flash_attention": conditions.flash_attention,
        "rows": conditions.most_rows,
        "decodes": "after one of as many rows, and one of others",
    }


def measure(
    model: Model, file: DrafterFile | None, drafter: Drafter | None, conditions: Conditions
) -> Calibration:
    """Choose the threads, time the target in both attention settings in turn, then the drafter."""
    started = perf_counter()
    found = _measured(model, file, drafter, conditions)
    return replace(found, seconds=perf_counter() - started)


def _measured(
    model: Model, file: DrafterFile | None, drafter: Drafter | None, conditions: Conditions
) -> Calibration:
    most = conditions.most_rows
    depth = min(DEPTH, model.context_train - most)
    deep = max(depth, min(calibrate.DEEP, conditions.n_ctx, model.context_train - most))
    step = max(1, model.vocab_size // (deep + most + 1))
    tokens = [(index + 1) * step % model.vocab_size for index in range(deep + most)]
    with ExitStack() as stack:
        targets = {
            flash: LlamaTarget(
                stack.enter_context(
                    Context(
                        model,
                        n_ctx=deep + most,
                        n_threads=conditions.n_threads,
                        flash_attention=flash,
                        cache_type_k=conditions.cache_type_k,
                        cache_type_v=conditions.cache_type_v,
                        taps=drafter.taps if drafter else (),
                        max_outputs=most,
                    )
                )
            )
            for flash in conditions.settings
        }
        usual = targets[conditions.settings[-1]]
        set_threads = partial(_set_threads, targets.values(), drafter)
        few = tokens[: min(depth, 36)]
        threads, doubt, found = calibrate.with_threads(
            lambda candidates, fewer_from: calibrate.choose_threads(
                usual, set_threads, candidates, few, fewer_from=fewer_from
            ),
            (conditions.n_threads, *conditions.fewer_threads),
            lambda: _target_times(targets, tokens, depth, deep, most),
        )
        found = replace(found, n_threads=threads, noise=max(found.noise, doubt))
        if drafter is None or file is None:
            return found
        drafts = calibrate.time_drafter(
            drafter,
            file.config.feature_size,
            tuple(w for w in calibrate.row_counts(file.config.block_size) if w >= 2),
            depth=min(depth, conditions.n_ctx),
            before=partial(_decode_one, usual, tokens[0]),
        )
    return replace(
        found,
        draft_ms=drafts.ms,
        noise=max(found.noise, drafts.noise),
        context_ms=drafts.context_ms,
    )


def _target_times(
    targets: Mapping[bool, LlamaTarget], tokens: Sequence[int], depth: int, deep: int, most: int
) -> Calibration:
    """Decodes of up to `most` rows after `depth` positions, and of some counts after `deep`."""
    rows = calibrate.time_rows(targets, tokens, calibrate.row_counts(most), depth=depth, keep=True)
    found = Calibration(rows.ms, {}, rows.noise, depth, change_ms=rows.change_ms)
    if deep <= depth:
        return found
    useful = {flash: targets[flash] for flash in calibrate.of_use(rows.ms)}
    reached, further = calibrate.time_deep(useful, tokens, (1, 4, most), held=depth)
    if reached < depth + FURTHER or further.noise >= NOISY:
        return found
    return replace(found, deep=reached, deep_ms=further.ms)


def _set_threads(targets: Iterable[LlamaTarget], drafter: Drafter | None, count: int) -> None:
    for target in targets:
        target.context.set_threads(count)
    if drafter is not None:
        drafter.set_threads(count)


def _decode_one(target: LlamaTarget, token: int) -> None:
    """What comes before a draft in a step: it takes the caches."""
    target.clear()
    target.decode([token], 0, "all")
    target.wait()


def fewer_threads(n_threads: int) -> tuple[int, ...]:
    """Counts worth trying instead: three quarters, half; one of two."""
    return tuple(sorted({3 * n_threads // 4, n_threads // 2} - {0, n_threads}, reverse=True))
