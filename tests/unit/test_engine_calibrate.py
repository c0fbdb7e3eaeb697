"""Timing and keeping measurements; the clock is the test's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dspine.drafters.base import Draft, Draw
from dspine.engine import calibrate
from dspine.engine.calibrate import never_cheaper, row_counts, time_rows
from dspine.engine.kept import cached, file_identity
from dspine.engine.measure import Conditions, fewer_threads, key_of
from dspine.llama.model import Model
from dspine.measured import NOISY, Calibration
from tests.support.fake_drafter import FakeDrafter
from tests.support.fake_target import FakeTarget, mixing

ROWS = {False: {1: 8.0, 4: 20.0}, True: {1: 9.0, 4: 15.0}}


class Clock:
    """Time passes only when something is computed."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(calibrate, "perf_counter", fake)
    return fake


def test_rows_are_timed_at_their_depth_and_the_memory_is_left_empty(clock: Clock) -> None:
    class Timed(FakeTarget):
        turn = 0

        def decode(self, tokens: Sequence[int], position: int, logits: object) -> None:
            super().decode(tokens, position, "all")
            self.turn += 1
            disturbed = 0.050 if self.turn % 7 == 0 else 0.0
            clock.now += 0.010 + 0.002 * len(tokens) + disturbed

    target = Timed(mixing(50, 1), 50, n_ctx=60, n_batch=16)
    timing = time_rows({False: target}, [7] * 60, (1, 4, 8), depth=40, repeats=5)
    assert timing.ms[False] == pytest.approx({1: 12.0, 4: 18.0, 8: 26.0})
    assert timing.noise == pytest.approx(1.0)
    assert target.memory == []
    assert {position for position, tokens in target.decoded if len(tokens) in (1, 4)} == {40}


def test_a_disturbance_hits_both_attention_settings(clock: Clock) -> None:
    decodes = 0

    class Disturbed(FakeTarget):
        def decode(self, tokens: Sequence[int], position: int, logits: object) -> None:
            nonlocal decodes
            super().decode(tokens, position, "all")
            decodes += 1
            # In one piece, and not over the same counts of both.
            clock.now += 0.010 * len(tokens) * (2 if 5 <= decodes <= 9 else 1)

    targets = {flash: Disturbed(mixing(50, 1), 50, n_ctx=60, n_batch=16) for flash in (True, False)}
    timing = time_rows(targets, [7] * 60, (1, 2, 4), depth=16, repeats=6)
    assert decodes == 26, "two for the depth; each timed after one of as many rows, but long ones"
    assert list(timing.ms) == [False, True]
    assert timing.ms[False] == pytest.approx({1: 10.0, 2: 20.0, 4: 40.0})
    assert timing.ms[True] == pytest.approx(timing.ms[False])


def test_a_decode_is_timed_after_one_of_as_many_rows(clock: Clock) -> None:
    """The library builds its graph anew where they differ; next to a long decode that is little."""

    class Rebuilding(FakeTarget):
        rows = 0

        def decode(self, tokens: Sequence[int], position: int, logits: object) -> None:
            super().decode(tokens, position, "all")
            clock.now += 0.001 * (len(tokens) != self.rows) + 0.012 * len(tokens)
            self.rows = len(tokens)

    target = Rebuilding(mixing(50, 1), 50, n_ctx=60, n_batch=16)
    timing = time_rows({False: target}, [7] * 60, (1, 2, 4), depth=16)
    assert timing.ms[False] == pytest.approx({1: 12.0, 2: 24.0, 4: 49.0})
    assert timing.change_ms == pytest.approx(1.0)
    threads: list[int] = []
    calibrate.choose_threads(target, threads.append, (2, 1), [7] * 20, repeats=1)
    assert [len(tokens) for _, tokens in target.decoded][-6:] == [1, 1, 4, 1, 1, 4]


class Slow(FakeTarget):
    """Every decode takes a second, or as long as its list says."""

    clock: Clock
    seconds: list[float]

    def decode(self, tokens: Sequence[int], position: int, logits: object) -> None:
        super().decode(tokens, position, "all")
        self.clock.now += self.seconds.pop(0) if self.seconds else 1.0


@pytest.mark.parametrize(
    ("seconds", "budget", "noisy"), [([], 800.0, False), ([1.0, 1.0, 2.5, 1.3], 1300.0, True)]
)
def test_the_budget_also_bounds_the_first_round(
    clock: Clock, seconds: list[float], budget: float, noisy: bool
) -> None:
    target = Slow(mixing(50, 1), 50, n_ctx=60, n_batch=16)
    target.clock, target.seconds = clock, seconds
    timing = time_rows(
        {False: target}, [7] * 60, (1, 2, 3, 4), depth=16, repeats=5, budget_ms=budget
    )
    # One for the depth, the smallest and the largest, one row again to compare, and one more.
    assert [len(tokens) for _, tokens in target.decoded] == [16, 1, 4, 1, 2]
    if noisy:  # three rows lie between two and four
        assert timing.ms[False] == pytest.approx({1: 1000.0, 2: 1000.0, 3: 1750.0, 4: 2500.0})
    assert Calibration(timing.ms, {}, timing.noise).is_noisy is noisy


def test_nothing_repeated_is_no_certainty() -> None:
    assert calibrate.spread({1: [5.0], 2: [6.0]}, 2) == NOISY
    # Two times that differ by half: typical is the upper one.
    assert calibrate.spread({1: [5.0, 7.5]}, 1) == pytest.approx(1.5)
    assert calibrate.spread({1: [5.0, 7.5]}, 2) == NOISY


def test_what_was_confirmed_is_not_timed_again(clock: Clock) -> None:
    """Two times that agree end a count; the disturbed one is repeated until two do."""
    target = Slow(mixing(50, 1), 50, n_ctx=60, n_batch=16)
    target.clock = clock
    # The depth; 1, 8, 1 and 4 rows; then what is in doubt: 8 and 4, and 4 twice more.
    target.seconds = [1.0, 1.0, 2.0, 1.0, 9.0, 2.0, 1.5, 1.6, 1.52]
    timing = time_rows({True: target}, [7] * 60, (1, 4, 8), depth=16, budget_ms=1e9)
    assert [len(tokens) for _, tokens in target.decoded] == [16, 1, 8, 1, 4, 8, 4, 4, 4]
    assert timing.ms[True] == pytest.approx({1: 1000.0, 4: 1500.0, 8: 2000.0})


def test_a_setting_that_is_nowhere_faster_is_of_no_use() -> None:
    fast, slow = {1: 10.0, 4: 14.0, 8: 20.0}, {1: 10.1, 4: 15.0, 8: 24.0}
    assert calibrate.of_use({False: slow, True: fast}) == (True,)
    assert calibrate.of_use({False: fast, True: slow}) == (False,)
    crossing = {**slow, 1: 9.0}
    assert calibrate.of_use({False: crossing, True: fast}) == (False, True)
    noise = {count: 0.99 * ms for count, ms in fast.items()}
    assert calibrate.of_use({False: noise, True: fast}) == (False,)
    assert calibrate.of_use({True: slow}) == (True,)


def test_the_drafter_is_timed_with_the_context_of_a_step(clock: Clock) -> None:
    class Timed(FakeDrafter):
        def add_context(self, seq: int, position: int, features: object) -> None:
            clock.now += 0.001

        def draft(
            self,
            seq: int,
            anchor: int,
            width: int,
            draw: Draw | None = None,
            lead: tuple[int, ...] = (),
        ) -> Draft:
            clock.now += 0.001 * width
            return Draft((1,) * (width - 1))

    drafter = Timed(lambda tokens, count: [1] * count)
    timing = calibrate.time_drafter(drafter, 2, (2, 8), depth=20)
    assert timing.ms == pytest.approx({2: 3.0, 8: 9.0})
    assert timing.context_ms == pytest.approx(1.0 / 18)


class Paced(FakeTarget):
    """Costs grow with rows and context; a third thread is in the way of the others."""

    clock: Clock
    threads = 1

    def decode(self, tokens: Sequence[int], position: int, logits: object) -> None:
        super().decode(tokens, position, "all")
        rate = {1: 1.0, 2: 0.6, 3: 0.9}[self.threads]
        self.clock.now += rate * (0.004 + 0.002 * len(tokens) + 0.00001 * position)

    def set_threads(self, count: int) -> None:
        self.threads = count


def paced(clock: Clock) -> Paced:
    target = Paced(mixing(50, 1), 50, n_ctx=600, n_batch=64)
    target.clock = clock
    return target


def test_a_deep_context_is_timed_as_far_as_the_budget_goes(clock: Clock) -> None:
    tokens = [7] * (512 + 8)
    depth, timing = calibrate.time_deep({True: paced(clock)}, tokens, (1, 8), budget_ms=1e9)
    assert depth == 512 and timing.noise == pytest.approx(1.0)
    assert timing.ms[True] == pytest.approx({1: 6.0 + 5.12, 8: 20.0 + 5.12})
    # Each 64 tokens take 0.132 s and a little more.
    depth, _ = calibrate.time_deep({True: paced(clock)}, tokens, (1, 8), budget_ms=300.0)
    assert depth == 192


def test_a_deep_context_goes_on_from_what_is_in_memory(clock: Clock) -> None:
    target, tokens = paced(clock), [7] * (256 + 8)
    timing = time_rows({True: target}, tokens, (1, 8), depth=64, keep=True)
    assert len(target.memory) == 64
    started = len(target.decoded)
    depth, further = calibrate.time_deep({True: target}, tokens, (1, 8), held=64, budget_ms=1e9)
    assert depth == 256 and target.memory == []
    assert min(position for position, _ in target.decoded[started:]) == 64
    # 0.01 ms for each token of context.
    assert further.ms[True][1] - timing.ms[True][1] == pytest.approx(0.01 * 192)


def test_the_slope_of_the_costs_comes_from_both_depths() -> None:
    rows = {True: {1: 6.0, 8: 20.0}}
    found = Calibration(rows, {2: 1.0}, depth=128, deep=512, deep_ms={True: {1: 9.84, 8: 19.0}})
    table = found.costs(True)
    assert table.depth == 128 and table.slope_ms == pytest.approx({1: 0.01, 8: 0.0})
    assert Calibration(rows, {}).costs(True).slope_ms is None
    other = replace(found, rows_ms={**rows, False: {1: 7.0, 8: 30.0}})
    assert other.costs(False).slope_ms == pytest.approx({1: 0.01, 8: 0.0})
    assert other.costs(False).rows_ms == {1: 7.0, 8: 30.0}
    disturbed = Calibration(rows, {}, depth=128, deep=256, deep_ms={True: {1: 26.0}})
    assert disturbed.costs(True).slope_ms == pytest.approx({1: 6.0 / 128})


def test_the_fastest_number_of_threads_is_chosen(clock: Clock) -> None:
    target = paced(clock)
    chosen = calibrate.choose_threads(target, target.set_threads, (3, 2, 1), [7] * 36)
    assert chosen == (2, 1.0)
    assert target.threads == 2 and target.memory == []
    assert calibrate.choose_threads(target, target.set_threads, (1,), [7] * 36) == (1, 1.0)


def test_fewer_threads_win_a_tie(clock: Clock) -> None:
    target = paced(clock)
    assert calibrate.choose_threads(target, lambda count: None, (2, 1), [7] * 36) == (1, 1.0)
    assert [fewer_threads(count) for count in (1, 2, 4, 16)] == [(), (1,), (3, 2), (12, 8)]


def test_fewer_threads_that_win_on_a_busy_machine_are_not_kept(clock: Clock) -> None:
    class Busy(Paced):
        turn = 0

        def decode(self, tokens: Sequence[int], position: int, logits: object) -> None:
            super().decode(tokens, position, logits)
            self.turn += 1
            clock.now += 0.02 * (1 + self.turn % 5) if self.threads == 2 else 0.0

    target = Busy(mixing(50, 1), 50, n_ctx=600, n_batch=64)
    target.clock = clock
    found = calibrate.choose_threads(target, target.set_threads, (2, 1), [7] * 36)
    assert found == (1, NOISY)


@pytest.mark.parametrize(
    ("busy_until", "threads", "noise", "looks"),
    [(0, 2, 1.0, 1), (90, 2, NOISY, 2), (10**9, 1, 1.0, 2)],
)
def test_fewer_threads_must_win_again_after_the_measurement(
    clock: Clock, busy_until: int, threads: int, noise: float, looks: int
) -> None:
    class Shared(FakeTarget):
        """Two threads halve the time unless something else holds a core, steadily."""

        threads = 2
        decodes = 0

        def decode(self, tokens: Sequence[int], position: int, logits: object) -> None:
            super().decode(tokens, position, "all")
            self.decodes += 1
            alone = self.threads == 2 and self.decodes > busy_until
            clock.now += 0.005 if alone else 0.010

        def set_threads(self, count: int) -> None:
            self.threads = count

    target = Shared(mixing(50, 1), 50, n_ctx=600, n_batch=64)
    seen: list[tuple[Sequence[int], float]] = []

    def choose(candidates: Sequence[int], fewer_from: float) -> tuple[int, float]:
        seen.append((candidates, fewer_from))
        return calibrate.choose_threads(
            target, target.set_threads, candidates, [7] * 36, fewer_from=fewer_from
        )

    def measure() -> int:
        target.decodes += 60
        return target.threads

    chosen, doubt, measured_with = calibrate.with_threads(choose, (2, 1), measure)
    assert (chosen, doubt, measured_with) == (threads, noise, threads)
    assert target.threads == threads
    assert len(seen) == looks


@pytest.mark.parametrize(
    ("fewer_from", "threads"),
    [(calibrate.FEWER_THREADS_FROM, 2), (calibrate.STILL_FEWER_FROM, 1)],
)
def test_a_second_look_keeps_fewer_threads_that_are_nearly_as_fast(
    clock: Clock, fewer_from: float, threads: int
) -> None:
    class Close(FakeTarget):
        threads = 2

        def decode(self, tokens: Sequence[int], position: int, logits: object) -> None:
            super().decode(tokens, position, "all")
            clock.now += 0.010 if self.threads == 2 else 0.011

        def set_threads(self, count: int) -> None:
            self.threads = count

    target = Close(mixing(50, 1), 50, n_ctx=600, n_batch=64)
    found = calibrate.choose_threads(
        target, target.set_threads, (2, 1), [7] * 36, fewer_from=fewer_from
    )
    assert found == (threads, 1.0)


def test_more_rows_never_cost_less() -> None:
    assert never_cheaper({1: 9.0, 2: 8.0, 4: 12.0}) == {1: 8.0, 2: 8.0, 4: 12.0}


def test_row_counts_end_with_the_largest() -> None:
    assert row_counts(8) == (1, 2, 3, 4, 6, 8)
    assert row_counts(7) == (1, 2, 3, 4, 6, 7)
    assert row_counts(2) == (1, 2)


def test_a_measurement_is_kept_and_used_again(tmp_path: Path) -> None:
    made = Calibration(ROWS, {2: 1.5, 8: 4.0}, 1.1, 100, 400, {True: {1: 11.0}}, 0.03, 2, 1.5, 0.7)
    assert made.costs(True).change_ms == 0.7
    first, kept = cached({"target": "a"}, tmp_path, lambda: made)
    assert (first, kept) == (made, False)
    again, kept = cached({"target": "a"}, tmp_path, lambda: pytest.fail("measured again"))
    assert (again, kept) == (made, True)
    other = Calibration(ROWS, {}, 1.0)
    assert cached({"target": "b"}, tmp_path, lambda: other) == (other, False)


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"key": 1}',
        "KEY-ONLY",
        "NO-ROWS",
        "NEGATIVE",
        "DEPTHS",
        "CHANGE",
    ],
)
def test_a_damaged_file_is_measured_anew(tmp_path: Path, damage: str) -> None:
    made = Calibration(ROWS, {}, 1.0)
    cached({"target": "a"}, tmp_path, lambda: made)
    (file,) = tmp_path.rglob("*.json")
    document = json.loads(file.read_text())
    if damage == "KEY-ONLY":
        damage = json.dumps({"key": document["key"]})
    elif damage == "NO-ROWS":
        damage = json.dumps({**document, "rows_ms": {"off": {}}})
    elif damage == "NEGATIVE":
        damage = json.dumps({**document, "rows_ms": {"off": {"1": -3}}})
    elif damage == "DEPTHS":
        damage = json.dumps({**document, "deep": 0, "deep_ms": {"on": {"1": 9.0}}})
    elif damage == "CHANGE":
        damage = json.dumps({**document, "change_ms": -0.1})
    file.write_text(damage)
    anew = Calibration(ROWS, {2: 9.0}, 1.0)
    assert cached({"target": "a"}, tmp_path, lambda: anew) == (anew, False)
    assert cached({"target": "a"}, tmp_path, lambda: pytest.fail("measured"))[0] == anew


def test_measuring_anew_replaces_what_is_kept(tmp_path: Path) -> None:
    cached({}, tmp_path, lambda: Calibration(ROWS, {}, 1.0))
    newer = Calibration({False: {1: 5.0}}, {}, 1.0)
    assert cached({}, tmp_path, lambda: newer, anew=True) == (newer, False)
    assert cached({}, tmp_path, lambda: pytest.fail("measured")) == (newer, True)


def test_an_empty_measurement_is_not_kept(tmp_path: Path) -> None:
    cached({}, tmp_path, lambda: Calibration({}, {}, 1.0))
    assert not list(tmp_path.rglob("*.json"))


def test_a_noisy_measurement_is_used_and_not_kept(tmp_path: Path) -> None:
    noisy = Calibration(ROWS, {}, 3.0)
    assert cached({}, tmp_path, lambda: noisy) == (noisy, False)
    assert not list(tmp_path.rglob("*.json"))


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "calibration").write_text("a file where a folder should be")
    made = Calibration(ROWS, {}, 1.0)
    assert cached({}, tmp_path, lambda: made) == (made, False)


def test_another_file_is_another_key(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"a")
    before = file_identity(file)
    file.write_bytes(b"ab")
    assert file_identity(file) != before


CONDITIONS = Conditions(
    n_ctx=2048,
    n_threads=2,
    flash_attention=None,
    cache_type_k="f16",
    cache_type_v="f16",
    most_rows=16,
)
OTHERWISE: dict[str, dict[str, Any]] = {
    "-c": {"n_ctx": 4096},
    "-t": {"n_threads": 1},
    "threads that are tried": {"fewer_threads": (1,)},
    "-fa": {"flash_attention": True},
    "-ctk": {"cache_type_k": "q8_0"},
    "-ctv": {"cache_type_v": "q8_0"},
    "rows": {"most_rows": 8},
}


def _loaded(folder: Path, **other: Any) -> Model:
    """As much of a model as the key of its measurement asks for."""
    for name in ("target.gguf", "drafter.gguf", "libllama.so"):
        if not (folder / name).exists():
            (folder / name).write_bytes(name.encode())
    library = SimpleNamespace(file=folder / "libllama.so", kernels=SimpleNamespace(text="avx2"))
    facts = {"n_gpu_layers": 0, "use_extra_buffers": True, **other}
    return cast(Model, SimpleNamespace(path=folder / "target.gguf", library=library, **facts))


@pytest.mark.parametrize("name", OTHERWISE)
def test_another_setting_is_measured_anew(tmp_path: Path, name: str) -> None:
    model, drafter = _loaded(tmp_path), tmp_path / "drafter.gguf"
    key = key_of(model, drafter, CONDITIONS)
    assert key == key_of(_loaded(tmp_path), drafter, CONDITIONS)
    assert key != key_of(model, drafter, replace(CONDITIONS, **OTHERWISE[name]))


@pytest.mark.parametrize("name", ["target.gguf", "drafter.gguf", "libllama.so"])
def test_another_library_target_or_drafter_is_measured_anew(tmp_path: Path, name: str) -> None:
    model, drafter = _loaded(tmp_path), tmp_path / "drafter.gguf"
    key = key_of(model, drafter, CONDITIONS)
    (tmp_path / name).write_bytes(b"another version of it")
    assert key != key_of(model, drafter, CONDITIONS)


def test_other_kernels_layers_on_a_device_or_no_drafter_are_measured_anew(tmp_path: Path) -> None:
    model, drafter = _loaded(tmp_path), tmp_path / "drafter.gguf"
    key = key_of(model, drafter, CONDITIONS)
    others = [
        key_of(_loaded(tmp_path, n_gpu_layers=99), drafter, CONDITIONS),
        key_of(_loaded(tmp_path, use_extra_buffers=False), drafter, CONDITIONS),
        key_of(model, None, CONDITIONS),
    ]
    model.library.kernels.text = "off"  # type: ignore[misc]
    others.append(key_of(model, drafter, CONDITIONS))
    assert key not in others
