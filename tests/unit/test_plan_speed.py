"""Predicted speeds: published figures, hand-computed cases, bounds, and files of acceptance."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspine.errors import FileError, UsageError
from dspine.measured import Calibration, CostTable
from dspine.plan.acceptance import Acceptance, read_acceptance
from dspine.plan.devices import DEVICES, DeviceModel, device_model, read_calibration
from dspine.plan.speed import predict

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {
    "code": (7.66, 128.7),
    "math": (7.36, 122.8),
    "summary": (3.64, 62.0),
    "prose": (2.53, 41.6),
}
"""Tokens a step and tokens a second of DSpine on an RTX 3090, by task."""

MEASURED = DeviceModel(
    "here",
    "by hand",
    table=CostTable({1: 10.0, 2: 12.0, 4: 16.0}, {2: 2.0, 4: 4.0}, 128, {1: 0.01, 4: 0.02}),
)


def kept(folder: Path, name: str, target: str, drafter: str | None, row_ms: float = 10.0) -> Path:
    """A calibration as the engine keeps it."""
    calibration = Calibration({True: {1: row_ms, 4: 20.0}}, {2: 1.0, 4: 2.0}, n_threads=2)
    key = {"cpu": "A CPU", "target": [target, 1, 2], "drafter": drafter and [drafter, 1, 2]}
    path = folder / "calibration" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"key": json.dumps(key), **calibration.to_json()}))
    return path


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


# -- the published figures -------------------------------------------------------------------


@pytest.mark.parametrize("task", PUBLISHED)
def test_published_speeds_within_three_percent(task: str) -> None:
    tokens, speed = PUBLISHED[task]
    found = predict(DEVICES["rtx-3090"], [Acceptance(task, lengths={16: tokens})])[0]
    assert found.best.width == 16
    assert found.best.speed[0] == pytest.approx(speed, rel=0.03)
    assert found.best.gain[0] == pytest.approx(speed / 28.2, rel=0.03)


def test_every_device_says_where_its_numbers_come_from() -> None:
    assert all(device.source for device in DEVICES.values())


# -- tokens a step ----------------------------------------------------------------------------


def test_chances_by_slot_give_every_width() -> None:
    task = Acceptance("t", (0.8, 0.5, 0.5))
    # 1 + 0.8 + 0.8 x 0.5 + 0.8 x 0.5 x 0.5
    assert [task.tokens(w).least for w in (1, 2, 3, 4)] == pytest.approx([1.0, 1.8, 2.2, 2.4])
    assert all(task.tokens(w).is_known for w in (1, 2, 3, 4))
    assert task.widest == 4


def test_a_length_bounds_narrower_widths() -> None:
    task = Acceptance("t", lengths={16: 4.0})
    assert task.tokens(16).is_known
    # All steps alike: min(4, 8). Steps of 1 or 16: 1 + 7 x 3 / 15.
    assert (task.tokens(8).least, task.tokens(8).most) == pytest.approx((2.4, 4.0))
    assert (task.tokens(3).least, task.tokens(3).most) == pytest.approx((1.4, 3.0))
    two = Acceptance("t", lengths={4: 2.5, 8: 3.5})
    # Between them: on the line, or as if the first three slots' gain of 0.5 went on.
    assert (two.tokens(6).least, two.tokens(6).most) == pytest.approx((3.0, 3.5))


@given(st.lists(st.floats(0.0, 1.0), min_size=15, max_size=15))
def test_the_bounds_hold_for_any_chances(chances: list[float]) -> None:
    exact = Acceptance("t", tuple(chances))
    known = Acceptance("t", lengths={w: exact.tokens(w).least for w in (4, 16)})
    for width in range(1, 17):
        bounds, tokens = known.tokens(width), exact.tokens(width).least
        assert bounds.least - 1e-9 <= tokens <= bounds.most + 1e-9


# -- costs ------------------------------------------------------------------------------------


def test_measured_costs_at_a_width_and_a_depth() -> None:
    assert MEASURED.step(1).most == 10.0
    assert MEASURED.step(3).most == pytest.approx(14.0 + 3.0)  # halfway between 2 and 4
    # 1,000 tokens beyond the measurement at 0.02 ms for 4 rows.
    assert MEASURED.step(4, 1128).most == pytest.approx(16.0 + 20.0 + 4.0)


def test_whole_steps_bound_what_is_between_them() -> None:
    device = DEVICES["rtx-3090"]
    assert device.step(16).is_known and device.step(1).is_known
    between = device.step(8)
    assert (between.least, between.most) == pytest.approx((1000 / 28.2, 59.5))
    with pytest.raises(UsageError, match="width 17 is not known on rtx-3090"):
        device.step(17)


def test_the_best_width_by_hand() -> None:
    # Tokens 1, 1.8, 2.2, 2.4; ms 10, 14, 17, 20: 100, 128.6, 129.4, 120 tokens a second.
    found = predict(MEASURED, [Acceptance("t", (0.8, 0.5, 0.5))])[0]
    assert found.best.width == 3
    assert found.best.speed[0] == pytest.approx(2.2 / 17 * 1000)
    assert found.best.gain[0] == pytest.approx(2.2 / 1.7)
    assert found.undecided == ()


def test_plain_is_best_where_nothing_is_accepted() -> None:
    assert predict(MEASURED, [Acceptance("t", (0.1, 0.1, 0.1))])[0].best.width == 1


def test_widths_that_may_be_faster_are_named() -> None:
    found = predict(DEVICES["rtx-3090"], [Acceptance("prose", lengths={16: 2.53})])[0]
    assert found.best.width == 16
    assert 8 in found.undecided
    eight = found.at(8)
    assert eight is not None and eight.speed[0] < found.best.speed[0] < eight.speed[1]


# -- kept measurements --------------------------------------------------------------------------


def test_the_newest_measurement_of_the_pair_is_taken(tmp_path: Path) -> None:
    first = kept(tmp_path, "a.json", "t.gguf", "d.gguf", 11.0)
    os.utime(first, (1, 1))
    kept(tmp_path, "b.json", "t.gguf", "d.gguf", 12.0)
    kept(tmp_path, "c.json", "other.gguf", None, 13.0)
    (tmp_path / "calibration" / "broken.json").write_text("{")
    found = device_model("here", tmp_path, Path("x/t.gguf"), Path("d.gguf"))
    assert found.plain_ms() == 12.0
    assert found.source == "measured by dspine: t.gguf and d.gguf, flash attention on, 2 threads"
    assert device_model("here", tmp_path, Path("other.gguf")).plain_ms() == 13.0
    assert device_model(str(first), tmp_path).plain_ms() == 11.0
    with pytest.raises(FileError, match=r"no measurement of new.gguf is kept.*dspine doctor"):
        device_model("here", tmp_path, Path("new.gguf"))


def test_devices_that_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean rtx-3090.*here"):
        device_model("rtx-3080", tmp_path)
    with pytest.raises(FileError, match="is not a calibration"):
        read_calibration(write(tmp_path / "x.json", {"key": "{}"}))
    with pytest.raises(FileError, match="cannot be read"):
        read_calibration(tmp_path / "none.json")


# -- files of acceptance ------------------------------------------------------------------------


def test_simple_files(tmp_path: Path) -> None:
    document = {"a": 3.5, "b": [0.5, 0.25], "c": {"acceptance_length": 2, "width": 4}}
    a, b, c = read_acceptance(write(tmp_path / "a.json", document), 16)
    assert (a.task, a.lengths) == ("a", {16: 3.5})
    assert (b.task, b.chances) == ("b", (0.5, 0.25))
    assert (c.task, c.lengths) == ("c", {4: 2.0})


def test_results_of_our_own_programs(tmp_path: Path) -> None:
    pair = read_acceptance(ROOT / "benchmarks" / "results" / "demo_pair.json", 8)
    assert {task.task for task in pair} == {"gsm8k", "humaneval", "mt-bench", "all"}
    assert all(set(task.lengths or ()) == {4, 8} for task in pair)
    train = {"acceptance_curve": [0.5], "by_source": {"web": {"acceptance_curve": [0.6]}}}
    web, everything = read_acceptance(write(tmp_path / "t.json", train), 8)
    assert (web.task, web.chances) == ("web", (0.6,))
    assert (everything.task, everything.chances) == ("all", (0.5,))
    rows = [
        {"task": "x", "temperature": 1.0, "slot_acceptance": [0.1, 0.1]},
        {"task": "x", "temperature": 0.0, "slot_acceptance": [0.7, 0.6]},
        {"task": "x", "temperature": 0.0, "slot_acceptance": []},
    ]
    (x,) = read_acceptance(write(tmp_path / "e.json", {"summary": rows}), 8)
    assert x.chances == (0.7, 0.6)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ([1, 2], "no JSON object"),
        ({}, "no JSON object"),
        ({"a": 20.0}, "a is 20.0: it must be tokens a step from 1 to 16"),
        ({"a": 0.4}, "it must be tokens a step from 1 to 16"),
        ({"a": [0.5, 1.5]}, "a is 1.5: it must be a chance from 0 to 1"),
        ({"a": "many"}, "a is 'many'"),
        ({"a": True}, "a is True"),
        ({"a": {"acceptance_length": 2.0, "width": 1}}, "the width of a is 1"),
        ({"results": {"plain": {}}}, "no setting with a fixed number of drafts"),
        ({"summary": []}, "no configuration that drafted"),
    ],
)
def test_files_that_say_nothing_usable(tmp_path: Path, document: object, complaint: str) -> None:
    with pytest.raises(FileError, match=complaint):
        read_acceptance(write(tmp_path / "a.json", document), 16)


def test_files_that_are_no_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("acceptance")
    with pytest.raises(FileError, match=r"is not JSON.*code"):
        read_acceptance(tmp_path / "a.json", 16)
    with pytest.raises(FileError, match="cannot be read"):
        read_acceptance(tmp_path / "none.json", 16)
