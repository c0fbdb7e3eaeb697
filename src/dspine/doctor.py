"""Examines this machine: the library, whether it survives a decode, what rows cost, what pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspine.default_pair import choose_pair
from dspine.errors import DspineError, LibraryError

if TYPE_CHECKING:
    from dspine.engine.engine import Engine
    from dspine.llama.library import Library
    from dspine.llama.model import Model
    from dspine.llama.probe import ProbeResult


FLASH_STAYS_ON = (
    "flash attention stays on whatever the times: the CPU kernels compute attention only as that "
    "one operation, which is what makes a row's result the same in every batch"
)
DISTURBED = (
    "the times vary, other programs seem to be at work: they are not kept, measure again when "
    "the machine is idle"
)


@dataclass(frozen=True, slots=True)
class Question:
    """What to examine; None stands for a default."""

    model: Path | None = None
    drafter: Path | None = None
    library: Path | None = None
    cache_dir: Path | None = None
    n_ctx: int | None = None
    n_threads: int | None = None
    n_gpu_layers: int = 0
    flash_attention: bool | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"


@dataclass(frozen=True, slots=True)
class Speculation:
    """What the measurements promise for the pair."""

    drafter: str | None
    pays: bool
    width: int
    """Block width that would be used, 1 without drafts of a drafter."""
    expected_speedup: float
    verdict: str


@dataclass(slots=True)
class Report:
    """What was found, as far as the examination came; `problems` is empty when all works."""

    library: Library | None = None
    probe: ProbeResult | None = None
    target: dict[str, Any] | None = None
    rows_ms: dict[bool, dict[int, float]] = field(default_factory=dict)
    """Milliseconds by flash attention (off, on) and row count: what the choice was made from."""
    flash_attention: bool | None = None
    """The setting that would be used."""
    draft_ms: dict[int, float] = field(default_factory=dict)
    """Milliseconds of a draft by block width."""
    deep: int = 0
    """Context tokens before the rows of `deep_ms`; those of `rows_ms` have few."""
    deep_ms: dict[int, float] = field(default_factory=dict)
    threads: int = 0
    """The number that would be used."""
    measured_s: float = 0.0
    """Seconds that the times took, 0 without any."""
    n_ctx: int = 0
    """Context for which they were taken."""
    cache_types: tuple[str, str] = ("", "")
    """Number formats of keys and values, likewise."""
    rollback: str = ""
    """How rejected drafts would be taken back."""
    rollback_reason: str = ""
    speculation: Speculation | None = None
    notes: list[str] = field(default_factory=list)
    """Worth knowing, but nothing is wrong."""
    problems: list[str] = field(default_factory=list)
    exit_code: int = 0

    def add_problem(self, sentence: str, exit_code: int) -> None:
        """The first problem decides the exit code."""
        self.problems.append(sentence)
        self.exit_code = self.exit_code or exit_code

    def to_json(self) -> dict[str, Any]:
        """`rows_ms` is that of the setting that would be used."""
        used = self.rows_ms.get(self.flash_attention) if self.flash_attention is not None else None
        return {
            "ok": not self.problems,
            "problems": self.problems,
            "notes": self.notes,
            "library": self.library and _plain(asdict(self.library)),
            "kernels": self.library and _kernels(self.library),
            "probe": self.probe and {"status": self.probe.status, **asdict(self.probe)},
            "target": self.target,
            "flash_attention": self.flash_attention,
            "rows_ms": used and _text_keys(used),
            "rows_ms_by_flash_attention": {
                "on" if on else "off": _text_keys(rows) for on, rows in self.rows_ms.items()
            },
            "draft_ms": _text_keys(self.draft_ms),
            "deep": self.deep,
            "deep_ms": _text_keys(self.deep_ms),
            "threads": self.threads,
            "measured_s": round(self.measured_s, 2),
            "n_ctx": self.n_ctx,
            "cache_types": list(self.cache_types),
            "rollback": self.rollback,
            "rollback_reason": self.rollback_reason,
            "speculation": self.speculation and asdict(self.speculation),
        }


def examine(question: Question, on_stage: Callable[[str], None]) -> Report:
    """Go through every part until one fails; `on_stage` hears what takes a while.

    Problems that a user can cure end up in the report, not in an exception.
    """
    report = Report()
    try:
        _examine(question, report, on_stage)
    except DspineError as error:
        report.add_problem(str(error), error.exit_code)
    return report


def _examine(question: Question, report: Report, on_stage: Callable[[str], None]) -> None:
    from dspine.llama.library import find_library
    from dspine.llama.model import Model, check_file
    from dspine.llama.probe import probe

    report.library = find_library(question.library)
    model_path, drafter_path = choose_pair(question.model, question.drafter)
    check_file(model_path)
    on_stage("decoding one token in a child process")
    report.probe = probe(model_path, report.library, folder=question.cache_dir)
    report.probe.require_usable()
    if report.probe.notice:
        report.add_problem(report.probe.notice, LibraryError.exit_code)
    with Model.load(
        model_path,
        n_gpu_layers=question.n_gpu_layers,
        use_extra_buffers=report.probe.use_extra_buffers,
    ) as model:
        report.target = _describe(model)
    on_stage("timing the target with and without flash attention, and the drafter")
    with _open(question, model_path, drafter_path) as engine:
        known = report.probe.notice
        report.notes += [notice for notice in engine.notices if notice != known]
        plan, measured = engine.plan, engine.calibration
        if plan is not None and measured is not None:
            report.flash_attention = plan.flash_attention
            report.rows_ms, report.draft_ms = measured.rows_ms, measured.draft_ms
            report.threads, report.deep = measured.n_threads, measured.deep
            report.deep_ms = measured.deep_ms.get(plan.flash_attention, {})
            report.measured_s, report.n_ctx = measured.seconds, engine.n_ctx
            report.cache_types = (question.cache_type_k, question.cache_type_v)
            if len(measured.rows_ms) > 1 and report.library.kernels.active:
                report.notes.append(FLASH_STAYS_ON)
            report.notes += [DISTURBED] if measured.is_noisy else []
        report.speculation = _judge(engine)
        report.rollback = engine.rollback
        report.rollback_reason = engine.rollback_reason


def _open(question: Question, model: Path, drafter: Path | None) -> Engine:
    from dspine.engine.load import load

    return load(
        model,
        drafter,
        n_ctx=question.n_ctx,
        n_threads=question.n_threads,
        n_gpu_layers=question.n_gpu_layers,
        flash_attention=question.flash_attention,
        cache_type_k=question.cache_type_k,
        cache_type_v=question.cache_type_v,
        library=question.library,
        cache_dir=question.cache_dir,
        calibrate_anew=True,
    )


def _judge(engine: Engine) -> Speculation:
    drafter, plan = engine.drafter_path, engine.plan
    if drafter is None or plan is None or plan.drafter is None:
        verdict = "no drafter for this target: drafts come from repeated text alone"
        return Speculation(None, pays=False, width=1, expected_speedup=1.0, verdict=verdict)
    choice = plan.drafter
    if choice.width < 2 and engine.disabled_reason is not None:
        verdict = engine.disabled_reason
    elif choice.width < 2:
        from dspine.engine.policies import promise

        assert plan.nearest is not None  # there is a drafter
        verdict = (
            f"drafting does not pay here on usual text, where the best width of "
            f"{plan.nearest.width} would {promise(plan.nearest)}; it is tried where a text suits "
            f"the drafter better"
        )
    else:
        verdict = (
            f"drafting pays: {choice.width} rows a verify give about "
            f"{choice.expected_tokens:.2f} tokens in {choice.step_ms:.1f} ms, "
            f"{choice.speedup:.2f} times the plain speed"
        )
    return Speculation(str(drafter), choice.width > 1, choice.width, choice.speedup, verdict)


def _describe(model: Model) -> dict[str, Any]:
    return {
        "path": str(model.path),
        "architecture": model.architecture,
        "layers": model.num_layers,
        "parameters": model.num_parameters,
        "bytes": model.size_bytes,
    }


def _text_keys(rows: dict[int, float]) -> dict[str, float]:
    return {str(count): round(ms, 3) for count, ms in rows.items()}


def _kernels(library: Library) -> dict[str, Any]:
    found = library.kernels
    return {"active": found.active, "text": found.text, **asdict(found)}


def _plain(value: Any) -> Any:
    """Paths as texts and tuples as lists, for JSON."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
