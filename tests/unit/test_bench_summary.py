"""Figures from measurements, against sums by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspine.bench.measurement import Measurement
from dspine.bench.result import collect, read_result
from dspine.bench.significance import compare_results
from dspine.bench.summary import ALL, ratio, ratio_interval, speed_parts, summarise
from dspine.bench.tables import WIDTH, changes_table, csv_text, tables
from dspine.errors import FileError, UsageError
from tests.support.bench_results import measurement, plan, result


def test_speed_ratio_and_acceptance_are_quotients_of_sums() -> None:
    rows = summarise(
        [
            measurement("plain", "p0", wall_ms=40.0),
            measurement("plain", "p1", wall_ms=60.0),
            measurement("auto", "p0", wall_ms=10.0, steps=2),
            measurement("auto", "p1", wall_ms=40.0, steps=3),
        ],
        "plain",
    )
    plain, auto = rows
    assert (plain.tokens_per_second, auto.tokens_per_second) == pytest.approx((80.0, 160.0))
    assert (plain.ratio, auto.ratio) == pytest.approx((1.0, 2.0))
    assert auto.acceptance_length == pytest.approx(8 / 5)
    assert auto.draft_ms == pytest.approx(50 * 0.2 / 5)
    assert auto.prefill_tokens_per_second == pytest.approx(500.0)
    assert (auto.same_text, auto.differences) == (2, ())


def test_slots_count_only_what_was_reached() -> None:
    row = summarise(
        [
            measurement("d", "p0", drafted_at=(10, 10, 4), accepted_at=(8, 4, 1)),
            measurement("d", "p1", drafted_at=(10, 2), accepted_at=(2, 1)),
        ],
        None,
    )[0]
    # 10 of 20 at slot 1; 5 of the 10 that slot 1 let through; slot 3 was drafted 4 times only.
    assert row.slot_acceptance == pytest.approx((0.5, 0.5, 0.25))
    assert row.acceptance_rate == pytest.approx(16 / 36)
    assert row.ratio is None and row.same_text is None


def test_tasks_have_rows_of_their_own_and_one_together() -> None:
    rows = summarise(
        [
            measurement("plain", task="maths", wall_ms=40),
            measurement("plain", task="code", wall_ms=10),
        ],
        "plain",
    )
    assert [row.task for row in rows] == ["maths", "code", ALL]
    assert rows[2].tokens_per_second == pytest.approx(160.0)


def test_temperatures_and_depths_are_kept_apart() -> None:
    rows = summarise(
        [
            measurement("plain", temperature=0.0),
            measurement("plain", temperature=1.0, wall_ms=80),
            measurement("plain", depth=512, wall_ms=20),
        ],
        "plain",
    )
    found = {(row.temperature, row.depth): row.tokens_per_second for row in rows}
    assert found == pytest.approx({(0.0, 0): 100.0, (1.0, 0): 50.0, (0.0, 512): 200.0})


def test_the_first_different_token_is_found() -> None:
    own = [
        measurement("auto", "p0", tokens=(1, 2, 9, 4)),
        measurement("auto", "p1", tokens=(1, 2)),
        measurement("auto", "p2"),
    ]
    base = [measurement("plain", f"p{i}") for i in range(3)]
    row = next(r for r in summarise([*base, *own], "plain") if r.configuration == "auto")
    assert row.same_text == 1
    places = [(one.prompt, one.position, one.plain_token, one.token) for one in row.differences]
    assert places == [("p0", 2, 3, 9), ("p1", 2, 3, None)]


def test_spread_is_that_of_repeats_of_one_prompt() -> None:
    rows = summarise(
        [measurement(repeat=i, wall_ms=wall) for i, wall in enumerate((40.0, 50.0))], "plain"
    )
    speeds = (100.0, 80.0)
    expected = np.std(speeds, ddof=1) / np.mean(speeds)
    assert rows[0].spread == pytest.approx(expected)
    assert summarise([measurement()], "plain")[0].spread is None


def test_interval_of_a_constant_ratio_is_that_ratio_and_a_noisy_one_is_wider() -> None:
    base = [measurement("plain", f"p{i}", wall_ms=40) for i in range(20)]
    same = [measurement("auto", f"p{i}", wall_ms=20) for i in range(20)]
    noisy = [measurement("auto", f"p{i}", wall_ms=10 + i) for i in range(20)]
    low, high = ratio_interval(speed_parts(same), speed_parts(base)) or (0, 0)
    assert (low, high) == pytest.approx((2.0, 2.0))
    interval = ratio_interval(speed_parts(noisy), speed_parts(base))
    assert interval is not None
    middle = ratio(speed_parts(noisy), speed_parts(base))
    assert interval[0] < middle < interval[1]
    # The standard error of a mean of 10 ... 29 over 20 draws is 1.29: about 13 % both ways.
    assert 0.15 < (interval[1] - interval[0]) / middle < 0.4


def test_one_answer_has_no_interval() -> None:
    row = summarise([measurement("plain"), measurement("auto")], "plain")[1]
    assert row.ratio_interval is None and row.acceptance_interval is None


def test_every_figure_of_a_document_follows_from_its_measurements(tmp_path: Path) -> None:
    made = result(
        *(
            measurement("plain", f"p{i}", repeat=r, wall_ms=40 + i + r)
            for i in (0, 1)
            for r in (0, 1)
        ),
        *(measurement("auto", f"p{i}", repeat=r, steps=2) for i in (0, 1) for r in (0, 1)),
        repeats=2,
    )
    path = tmp_path / "r.json"
    made.write(path)
    document = json.loads(path.read_text())
    measured = [Measurement.from_json(row) for row in document["measurements"]]
    again = [
        json.loads(json.dumps(row.to_json())) for row in summarise(measured, document["plain"])
    ]
    assert document["summary"] == again
    assert read_result(path) == made
    assert made.is_complete


def test_a_result_without_all_cells_is_not_complete() -> None:
    chosen = plan("plain", "auto")
    made = collect(chosen, {}, [], [measurement("plain", "p0")])
    assert not made.is_complete and made.plain == "plain"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "it is not JSON"),
        ("[]", "is no result of"),
        ('{"measurements": [], "format": 99}', "format 99"),
        ('{"measurements": [], "format": 1}', "is damaged"),
        (
            """{"measurements": [{}], "format": 1, "kind": "bench", "complete": true,
            "plain": null, "plan": {}, "configurations": {}, "provenance": []}""",
            "incomplete or damaged",
        ),
    ],
)
def test_another_file_is_no_result(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(FileError, match=words):
        read_result(path)


def test_compare_finds_what_is_more_than_chance() -> None:
    first = result(*(measurement("d", f"p{i}", steps=4) for i in range(10)))
    second = result(
        *(measurement("d", f"p{i}", steps=2, wall_ms=40 + (-1) ** i) for i in range(10))
    )
    accepted, speed = compare_results(first, second)
    assert (accepted.figure, accepted.before, accepted.after) == ("acceptance length", 1.0, 2.0)
    assert accepted.ratio == pytest.approx(2.0) and accepted.is_significant
    assert speed.ratio == pytest.approx(1.0, abs=1e-9) and not speed.is_significant
    lines = changes_table([accepted, speed]).lines()
    assert "2.000*" in lines[1] and "*" not in lines[2]


def test_compare_matches_single_configurations_of_different_names() -> None:
    changes = compare_results(result(measurement("a")), result(measurement("b", steps=2)))
    assert {(one.first, one.second) for one in changes} == {("a", "b")}


def test_speeds_of_an_evaluation_are_not_compared() -> None:
    made = result(measurement("d"), kind="eval")
    assert [one.figure for one in compare_results(made, made)] == ["acceptance length"]


def test_compare_needs_something_in_common() -> None:
    with pytest.raises(UsageError, match="no configuration and prompt in common"):
        compare_results(result(measurement("a", "p0")), result(measurement("a", "p1")))


def test_tables_fit_100_columns_and_mark_other_texts() -> None:
    names = [f"dspine,draft={i},ctk=q8_0,ctv=q8_0,rollback=snapshots" for i in range(8)]
    rows = [measurement("plain", f"p{i}", task=f"task{i}") for i in range(8)]
    rows += [
        measurement(name, f"p{i}", task=f"task{i}", drafted_at=(4,) * 7, accepted_at=(3,) * 7)
        for name in names
        for i in range(8)
    ]
    rows[-1] = replace(rows[-1], tokens=(7,))
    made = tables(result(*rows))
    assert all(len(line) <= WIDTH for table in made for line in table.lines())
    main = made[0]
    assert [main.rows[i][0] for i in main.marked] == [names[-1]]
    assert main.rows[-1][-1] == "1 differ" and main.rows[1][-1] == "same"
    assert made[-1].rows[0][-2:] == ("1", "7")
    assert main.markdown().count("\n") == 2 + 1 + len(main.rows)


def test_csv_has_a_line_for_each_row() -> None:
    made = result(measurement("plain"), measurement("auto", steps=2))
    header, *lines = csv_text(made).splitlines()
    assert len(lines) == len(made.rows) == 2
    second = dict(zip(header.split(","), lines[1].split(","), strict=True))
    assert second["configuration"] == "auto" and float(second["acceptance_length"]) == 2.0


def _at_once(*spans: float, alone: float = 40.0) -> list[Measurement]:
    """Four prompts one at a time, then two at once with these spans of a batch (ms)."""
    made = [measurement("d", f"p{i}", span_ms=alone) for i in range(4)]
    for number, span in enumerate(spans):
        made += [
            measurement("d", f"p{i}", concurrency=2, place=i, span_ms=span, wall_ms=50.0)
            for i in (2 * number, 2 * number + 1)
        ]
    return made


def test_answers_at_once_count_the_time_of_their_batch_once() -> None:
    one, two = summarise(_at_once(50.0, 78.0), None)
    assert (one.concurrency, two.concurrency) == (1, 2)
    # 16 tokens in 4 x 40 ms; the same 16 tokens in 50 + 78 ms.
    assert one.together_per_second == pytest.approx(100.0)
    assert two.together_per_second == pytest.approx(125.0)
    assert one.gain == pytest.approx(1.0) and two.gain == pytest.approx(1.25)
    assert two.tokens_per_second == pytest.approx(80.0)  # 4 tokens in 50 ms
    low, high = two.gain_interval or (0, 0)
    assert low == pytest.approx(80 / 78) and high == pytest.approx(1.6)


def test_a_part_of_a_batch_has_no_speed_of_all() -> None:
    rows = _at_once(50.0, 78.0)
    mixed = [
        replace(one, cell=replace(one.cell, task=f"t{int(one.cell.prompt[1]) % 2}")) for one in rows
    ]
    found = {(row.task, row.concurrency): row for row in summarise(mixed, None)}
    assert found["t0", 2].together_per_second is None and found["t0", 2].gain is None
    assert found[ALL, 2].gain == pytest.approx(1.25)
    # Results from before are read, and have no such times.
    old = summarise([measurement("d")], None)[0]
    assert old.together_per_second is None and old.gain is None


def test_answers_at_once_are_compared_with_plain_ones_at_the_same_load_but_for_the_text() -> None:
    rows = summarise(
        [
            measurement("plain", wall_ms=40.0),
            measurement("plain", wall_ms=80.0, concurrency=2, tokens=(9, 9, 9, 9)),
            measurement("auto", wall_ms=40.0, concurrency=2),
        ],
        "plain",
    )
    auto = next(row for row in rows if row.configuration == "auto")
    assert auto.ratio == pytest.approx(2.0) and auto.same_text == 1
    crowded = next(r for r in rows if r.configuration == "plain" and r.concurrency == 2)
    assert crowded.same_text == 0 and crowded.differences[0].position == 0


def test_figures_of_answers_at_once_follow_from_the_document(tmp_path: Path) -> None:
    made = result(*_at_once(50.0, 78.0), prompts=4, concurrencies=(1, 2))
    assert made.is_complete
    path = tmp_path / "r.json"
    made.write(path)
    document = json.loads(path.read_text())
    measured = [Measurement.from_json(row) for row in document["measurements"]]
    again = [json.loads(json.dumps(row.to_json())) for row in summarise(measured, None)]
    assert document["summary"] == again and read_result(path) == made
    # The same by hand, from the raw rows alone.
    batches = {
        (row["repeat"], row["place"] // 2): row["span_ms"]
        for row in document["measurements"]
        if row["concurrency"] == 2
    }
    tokens = sum(row["counted"] for row in document["measurements"] if row["concurrency"] == 2)
    assert document["summary"][1]["together_per_second"] == pytest.approx(
        tokens / sum(batches.values()) * 1000
    )
    *_, table = tables(made)
    assert table.header[1:4] == ("at once", "all tok/s", "to one at a time")
    assert [row[1:4] for row in table.rows] == [
        ("1", "100.0", "1.00 [1.00, 1.00]"),
        ("2", "125.0", "1.25 [1.03, 1.60]"),
    ]
    assert all(len(line) <= WIDTH for line in table.lines())
    header, _, second = csv_text(made).splitlines()
    row = dict(zip(header.split(","), second.split(","), strict=True))
    assert (row["concurrency"], row["gain"]) == ("2", "1.25")


def test_a_result_of_format_1_is_read(tmp_path: Path) -> None:
    made = result(measurement("d"))
    document = made.to_json() | {"format": 1}
    for row in document["measurements"]:
        for name in ("concurrency", "place", "span_ms"):
            del row[name]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    assert read_result(path).measurements == made.measurements


def test_compare_keeps_answers_at_once_apart() -> None:
    made = result(*_at_once(50.0, 78.0), prompts=4, concurrencies=(1, 2))
    changes = compare_results(made, made)
    assert [(one.concurrency, one.figure) for one in changes] == [
        *((n, figure) for n in (1, 2) for figure in ("acceptance length", "tokens/s"))
    ]
    assert "2 at once" in changes_table(changes).lines()[3]


def test_answers_that_fill_a_batch_up_count_for_the_speed_of_all_alone() -> None:
    rows = [measurement("d", f"p{i}", concurrency=2, place=i, span_ms=40.0) for i in range(2)]
    rows += [
        measurement("d", "p2", concurrency=2, place=2, span_ms=60.0),
        measurement("d", "p0", concurrency=2, place=3, span_ms=60.0, steps=1, wall_ms=1.0),
    ]
    [row] = summarise(rows, None)
    assert (row.answers, row.tokens, row.acceptance_length) == (3, 12, 1.0)
    assert row.tokens_per_second == pytest.approx(100.0)
    assert row.together_per_second == pytest.approx(160.0)
