"""The engine on the real library: answers equal plain ones, or the target alone explains why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspine
from dspine.engine.compare import Comparison
from dspine.engine.engine import Engine
from dspine.engine.events import Event, Finish, Step
from dspine.engine.ngram_table import build_table
from dspine.engine.trace import Trace
from dspine.errors import CapacityError, ClosedError, FileError, PairError, UsageError
from dspine.files import drafter_file
from dspine.files.drafter_file import write_drafter
from dspine.files.pairing import describe_target
from dspine.files.schema import DSpineConfig, TrainingRecord
from dspine.llama.batch import Batch
from dspine.llama.context import Context
from dspine.measured import Calibration
from tests.support.drafter_files import weights
from tests.support.tiny_models import tiny_llama, tiny_qwen35

RHYME = "Row, row, row your boat, gently down the stream.\n" * 4


@dataclass(frozen=True)
class Files:
    target: Path
    drafter: Path


def random_drafter(path: Path, target: Path, taps: tuple[int, ...], **changes: object) -> Path:
    """A drafter file for `target` whose weights are noise."""
    pair = describe_target(target)
    config = DSpineConfig(
        hidden_size=pair.hidden_size,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=pair.vocab_size,
        target_hidden_size=pair.hidden_size,
        block_size=6,
        taps=taps,
        mask_token_id=3,
        windows=(None, 24),
        causal=(True, True),
        transfer_rank=32,
        message_size=32,
        max_positions=2048,
    )
    config = replace(config, **changes)  # type: ignore[arg-type]
    noise = {
        name: np.asarray(values, np.float32) * 0.05 for name, values in weights(config).items()
    }
    record = TrainingRecord((0.5,) * (config.block_size - 1))
    write_drafter(path, config, pair, record, noise, "f32")
    return path


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp(str(request.param))
    make = tiny_llama if request.param == "dense" else tiny_qwen35
    target = make(folder / "target.gguf", seed=5)
    return Files(target, random_drafter(folder / "drafter.gguf", target, (0, 2)))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_llama(folder / "target.gguf", seed=5)
    return Files(target, random_drafter(folder / "drafter.gguf", target, (0, 2)))


@pytest.fixture(scope="module")
def smollm(
    default_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Engine]]:
    drafter = random_drafter(
        tmp_path_factory.mktemp("smollm") / "noise.gguf", default_target, (1, 14, 27), block_size=4
    )
    with dspine.load(
        default_target, drafter, n_ctx=512, n_threads=1, calibrate=False, proposer="dspine"
    ) as engine:
        yield drafter, engine


def explained(comparison: Comparison) -> bool:
    """Identical, or the target alone gives the speculative answer in the same batches."""
    return comparison.divergence is None or comparison.divergence.reproduced


@pytest.mark.parametrize("proposer", ["dspine", "ngram", "auto"])
@pytest.mark.parametrize("drafts", [1, 5])
def test_tiny_targets_answer_the_same_with_a_drafter_of_noise(
    pair: Files, proposer: str, drafts: int
) -> None:
    with dspine.load(
        pair.target,
        pair.drafter,
        proposer=proposer,
        spec_draft_n_max=drafts,
        n_ctx=256,
        n_threads=1,
        calibrate=False,
    ) as engine:
        for prompt in ([5, 6, 7, 5, 6], [9]):
            comparison = engine.compare(prompt, max_tokens=60)
            assert explained(comparison), comparison.divergence
            assert comparison.speculative.stats.disabled_reason is None
            stats = comparison.speculative.stats
            assert stats.drafted > 0
            assert max(event for event in stats.drafted_at_slot) <= stats.steps
            parts = stats.draft_ms + stats.verify_ms + stats.host_ms
            assert parts == pytest.approx(stats.wall_ms, rel=0.05)


def test_the_default_target_answers_the_same_with_a_drafter_of_noise(
    smollm: tuple[Path, Engine],
) -> None:
    _, engine = smollm
    comparison = engine.compare("Count from one to twenty.", max_tokens=12)
    assert explained(comparison), comparison.divergence
    stats = comparison.speculative.stats
    assert stats.disabled_reason is None and stats.proposers["dspine"].steps > 3
    assert comparison.plain.text.strip()


def test_repeats_are_proposed_and_accepted_on_the_default_target(default_target: Path) -> None:
    with dspine.load(
        default_target, proposer="ngram", n_ctx=512, n_threads=1, calibrate=False,
        spec_draft_n_max=4,
    ) as engine:  # fmt: skip
        comparison = engine.compare(RHYME, max_tokens=24, raw=True)
        assert explained(comparison), comparison.divergence
        stats = comparison.speculative.stats
        assert stats.proposers["ngram"].accepted > 8
        assert stats.acceptance_length > 2
        tokens = list(comparison.plain.tokens)
        end = [token for token in tokens if engine.tokenizer.is_end(token)]
        whole = b"".join(map(engine.tokenizer.piece, tokens)).decode("utf-8", "replace")
        assert comparison.plain.text == whole and len(end) <= 1


def test_stop_strings_and_limits_on_the_default_target(smollm: tuple[Path, Engine]) -> None:
    _, engine = smollm
    free = engine.complete(RHYME, raw=True, max_tokens=10)
    assert (len(free.tokens), free.reason) == (10, "length")
    stop = free.text[8:12]
    cut = engine.complete(RHYME, raw=True, max_tokens=10, stop=[stop])
    assert (cut.text, cut.reason) == (free.text.partition(stop)[0], "stop")


def test_the_context_limit(dense: Files) -> None:
    with dspine.load(
        dense.target, dense.drafter, proposer="auto", n_ctx=64, n_threads=1, calibrate=False
    ) as engine:
        for plain in (True, False):
            result = engine.complete([5] * 60, plain=plain)
            # Positions 60 ... 63 take tokens, and the last decode gives one more.
            assert result.reason == "context" and len(result.tokens) == 5
        with pytest.raises(CapacityError, match=r"65 tokens.*64"):
            engine.generate([5] * 65)


def test_an_interrupt_in_the_middle_of_a_step_keeps_text_and_memory(
    dense: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dspine.load(
        dense.target, dense.drafter, proposer="dspine", n_ctx=2000, n_threads=1, calibrate=False
    ) as engine:
        running = engine.generate([5, 6, 7], max_tokens=1900)
        events: list[Event] = [next(running) for _ in range(4)]
        decode, calls = Context.decode, [0]

        def interrupted(context: Context, batch: Batch) -> None:
            decode(context, batch)
            calls[0] += 1
            if calls[0] == 3:
                # Rows are decoded, nothing is settled yet: what Ctrl-C meets most often.
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Context, "decode", interrupted)
            events.extend(running)
        finish = events[-1]
        assert isinstance(finish, Finish) and finish.reason == "cancelled"
        tokens = [t for event in events if isinstance(event, Step) for t in event.tokens]
        assert len(tokens) >= 5
        assert engine.complete([5, 6, 7], max_tokens=len(tokens)).tokens == tuple(tokens)


def test_measured_widths_are_kept_for_the_next_start(
    dense: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspine.measured.NOISY", 1e9)
    options: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "cache_dir": tmp_path}
    with dspine.load(dense.target, dense.drafter, **options) as engine:
        plan = engine.plan
        assert plan is not None and plan.drafter is not None
        assert plan.cost_ms[1] > 0 and plan.cost_ms[16] >= plan.cost_ms[1]
        assert explained(engine.compare([5, 6, 7], max_tokens=30))
    (kept,) = (tmp_path / "calibration").iterdir()
    stamp = kept.stat().st_mtime_ns
    monkeypatch.setattr(
        "dspine.engine.calibrate.time_rows", lambda *a, **k: pytest.fail("measured again")
    )
    with dspine.load(dense.target, dense.drafter, **options) as engine:
        assert engine.plan == plan
    assert kept.stat().st_mtime_ns == stamp
    assert list((tmp_path / "probe").iterdir()), "the library's test is kept there too"


def test_the_drafter_file_is_read_once(dense: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    original = drafter_file.read_drafter

    def counted(path: Path) -> drafter_file.DrafterFile:
        read.append(path)
        return original(path)

    monkeypatch.setattr("dspine.engine.assemble.read_drafter", counted)
    monkeypatch.setattr("dspine.drafters.backbone.drafter.read_drafter", counted)
    with dspine.load(dense.target, dense.drafter, n_ctx=64, n_threads=1, calibrate=False):
        assert read == [dense.drafter]


def test_both_attention_settings_are_measured_for_any_kind_of_target(
    pair: Files, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"n_ctx": 64, "n_threads": 1, "cache_dir": tmp_path}
    with dspine.load(pair.target, calibrate_anew=True, **options) as engine:
        measured, plan = engine.calibration, engine.plan
    assert measured is not None and plan is not None
    assert set(measured.rows_ms) == {False, True}
    assert plan.cost_ms == measured.rows_ms[plan.flash_attention]
    assert {1, 2, 4, 8, 16} <= plan.cost_ms.keys()
    assert all(ms > 0 for table in measured.rows_ms.values() for ms in table.values())


def test_the_table_beside_the_drafter_is_used(dense: Files, tmp_path: Path) -> None:
    drafter = tmp_path / "d.gguf"
    drafter.write_bytes(dense.drafter.read_bytes())
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "calibrate": False}
    with dspine.load(dense.target, **options, proposer="none") as engine:
        answer = engine.complete([5, 6, 7], max_tokens=40).tokens
    build_table([[5, 6, 7, *answer]] * 9, min_probability=0.0).save(tmp_path / "d.ngram.npz")
    with dspine.load(dense.target, drafter, **options, proposer="ngram") as engine:
        stats = engine.complete([5, 6, 7], max_tokens=40).stats
        assert stats.acceptance_length > 2
    build_table([[5, 6, 320]] * 9, min_probability=0.0).save(tmp_path / "d.ngram.npz")
    with pytest.raises(FileError, match="another target"):
        dspine.load(dense.target, drafter, **options, proposer="ngram")


def test_what_cannot_be_loaded_is_told_in_a_sentence(
    dense: Files, tmp_path: Path, default_target: Path
) -> None:
    quick: dict[str, Any] = {"calibrate": False, "n_threads": 1}
    with pytest.raises(FileError, match="does not exist"):
        dspine.load(tmp_path / "none.gguf", **quick)
    with pytest.raises(FileError, match=r"none\.gguf"):
        dspine.load(dense.target, tmp_path / "none.gguf", **quick)
    with pytest.raises(PairError, match="hidden size"):
        dspine.load(default_target, dense.drafter, **quick)
    with pytest.raises(FileError, match="drafter"):
        dspine.load(dense.drafter, **quick)
    with pytest.raises(UsageError, match="needs a drafter"):
        dspine.load(dense.target, proposer="dspine", **quick)
    with pytest.raises(UsageError, match="proposer is 'fast'"):
        dspine.load(dense.target, proposer="fast", **quick)
    with pytest.raises(CapacityError, match="99999"):
        dspine.load(dense.target, n_ctx=99999, **quick)
    far = random_drafter(tmp_path / "far.gguf", dense.target, (0, 3))
    with pytest.raises((FileError, UsageError), match="layer 3"):
        dspine.load(dense.target, far, **quick)


def test_closing_frees_once_and_later_use_is_an_error(dense: Files) -> None:
    engine = dspine.load(dense.target, dense.drafter, n_ctx=256, n_threads=1, calibrate=False)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        engine.complete([5])


def test_a_trace_names_every_decode(dense: Files) -> None:
    with dspine.load(
        dense.target, dense.drafter, proposer="dspine", n_ctx=256, n_threads=1, calibrate=False
    ) as engine:
        trace = Trace()
        result = engine.complete(list(np.arange(5, 25).tolist()), max_tokens=20, trace=trace)
    assert sum(map(len, trace.chunks)) == 19
    assert sum(step.emitted for step in trace.steps) == len(result.tokens)
    assert trace.steps[0].position == 19
    assert {len(step.tokens) for step in trace.steps} >= {6}


def test_the_adaptive_policy_gives_the_plain_text_at_varying_widths(
    default_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Costs as they should be, not as a machine that runs tests has them.
    costs = Calibration({True: {1: 10.0, 16: 14.0}, False: {1: 10.0, 16: 14.0}}, {})
    monkeypatch.setattr("dspine.engine.assemble.calibrated", lambda *a, **k: costs)
    with dspine.load(
        default_target, proposer="ngram", n_ctx=512, n_threads=1, cache_dir=tmp_path
    ) as engine:
        widths = set()
        for prompt in (RHYME, "Name five trees."):
            comparison = engine.compare(prompt, max_tokens=32, raw=True)
            assert explained(comparison), comparison.divergence
            steps = list(engine.generate(prompt, max_tokens=32, raw=True))
            widths |= {step.drafted for step in steps if isinstance(step, Step)}
            if prompt == RHYME:
                assert comparison.speculative.stats.acceptance_length > 1.5
        assert len(widths) > 1
