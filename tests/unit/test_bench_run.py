"""Plans, journals and runs with answerers that reply by a rule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dspine.bench.configuration import Configuration, parse_configurations
from dspine.bench.journal import Journal
from dspine.bench.measurement import BenchPlan, Measurement
from dspine.bench.prompts import TASK_SETS, filler_text, named_tasks, read_prompts
from dspine.bench.run import measure
from dspine.errors import FileError, UsageError
from tests.support.bench_results import FakeAnswerer, measurement, plan


class Silence:
    """A listener that only counts."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.count = 0
        self._stop_after = stop_after

    def loaded(self, name: str, facts: Mapping[str, Any]) -> None:
        pass

    def measured(self, measurement: Measurement, done: int, total: int) -> None:
        self.count += 1
        if self.count == self._stop_after:
            raise KeyboardInterrupt


class Rig:
    """Runs plans and remembers who was asked what."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.started: list[FakeAnswerer] = []
        self.most_open = 0

    def start(self, configuration: Configuration) -> FakeAnswerer:
        made = FakeAnswerer(configuration, self.asked, lambda name, _: measurement(name))
        self.started.append(made)
        self.most_open = max(self.most_open, sum(one.is_open for one in self.started))
        return made

    def run(
        self, chosen: BenchPlan, path: Path, stop_after: int | None = None, **options: Any
    ) -> list[Measurement]:
        with Journal(path, chosen, {"sitting": len(self.started)}) as journal:
            measure(chosen, journal, self.start, Silence(stop_after), **options)
            return journal.measurements

    @property
    def order(self) -> list[tuple[str, str]]:
        """Configuration and prompt of every measured answer; warm-ups have another prompt."""
        return [(name, r["prompt"]) for name, r in self.asked if r["prompt"] != "Say hello."]


def test_configurations_take_turns_and_the_first_one_changes(tmp_path: Path) -> None:
    rig = Rig()
    chosen = plan("plain", "auto", prompts=3)
    measured = rig.run(chosen, tmp_path / "j")
    assert [name for name, _ in rig.order] == ["plain", "auto", "auto", "plain", "plain", "auto"]
    assert [prompt for _, prompt in rig.order][::2] == [p.prompt for p in chosen.prompts]
    assert {one.cell for one in measured} == set(chosen.cells())
    assert not any(one.is_open for one in rig.started)


def test_everybody_is_warmed_up_first(tmp_path: Path) -> None:
    rig = Rig()
    rig.run(plan("plain", "auto"), tmp_path / "j")
    assert [request["prompt"] for _, request in rig.asked[:2]] == ["Say hello."] * 2
    assert {name for name, _ in rig.asked[:2]} == {"plain", "auto"}


def test_one_at_a_time_never_has_two_loaded(tmp_path: Path) -> None:
    rig = Rig()
    chosen = plan("plain", "auto", repeats=2)
    measured = rig.run(chosen, tmp_path / "j", one_at_a_time=True)
    assert rig.most_open == 1 and len(rig.started) == 4
    assert [name for name, _ in rig.order] == (["plain"] * 2 + ["auto"] * 2) * 2
    assert len(measured) == 8


def test_seeds_are_shared_by_configurations_and_differ_by_repeat(tmp_path: Path) -> None:
    rig = Rig()
    rig.run(plan("plain", "auto", prompts=1, repeats=2, temperatures=(1.0,)), tmp_path / "j")
    seeds = [(name, r["seed"]) for name, r in rig.asked if r["temperature"] == 1.0]
    by_name = {name: [seed for n, seed in seeds if n == name] for name in ("plain", "auto")}
    assert by_name["plain"] == by_name["auto"] and len(set(by_name["plain"])) == 2


def test_depth_comes_with_a_text_to_fill_it(tmp_path: Path) -> None:
    rig = Rig()
    rig.run(plan("plain", prompts=1, depths=(0, 64)), tmp_path / "j")
    assert [("filler" in r, r["depth"]) for _, r in rig.asked] == [
        (False, 0),
        (False, 0),
        (True, 64),
    ]
    assert len(filler_text()) > 400_000


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_a_broken_off_run_goes_on_and_measures_nothing_twice(
    tmp_path: Path, stop_after: int
) -> None:
    chosen = plan("plain", "auto", prompts=3)
    path = tmp_path / "j"
    rig = Rig()
    with pytest.raises(KeyboardInterrupt):
        rig.run(chosen, path, stop_after)
    assert not any(one.is_open for one in rig.started)
    # A kill in the middle of a line leaves half of it.
    with path.open("a") as stream:
        stream.write('{"configuration": "au')
    measured = rig.run(chosen, path)
    assert len(rig.order) == 6 == len(set(rig.order))
    assert len({one.cell for one in measured}) == len(measured) == 6
    with Journal(path, chosen, {"sitting": 9}) as journal:
        assert len(journal.measurements) == 6
        assert [one["sitting"] for one in journal.provenance] == [0, 2, 9]


def test_a_journal_of_another_plan_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Rig().run(plan("plain"), path)
    before = path.read_bytes()
    with pytest.raises(FileError, match="another plan"):
        Journal(path, plan("plain", max_tokens=9), {})
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", ["nonsense", '{"tokens": []}', "[]", "3"])
def test_a_damaged_journal_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "j"
    path.write_text(line + "\n")
    with pytest.raises(FileError, match=r"line 1 of .* is damaged|incomplete or damaged"):
        Journal(path, plan("plain"), {})


def test_configurations_from_texts() -> None:
    found = parse_configurations(
        ["plain", "dspine,draft=1/3,ctk=q8_0", "auto,kernels=off,name=stock", "ngram,fa=off"],
        {"model": "m.gguf", "n_ctx": 64},
        has_drafter=True,
    )
    assert [one.name for one in found] == [
        "plain",
        "dspine,draft=1,ctk=q8_0",
        "dspine,draft=3,ctk=q8_0",
        "stock",
        "ngram,fa=off",
    ]
    assert found[2].options == {
        "model": "m.gguf",
        "n_ctx": 64,
        "proposer": "dspine",
        "spec_draft_n_max": 3,
        "cache_type_k": "q8_0",
    }
    assert found[3].environment == {"DSPINE_KERNELS": "off"}
    assert found[4].options["flash_attention"] is False
    assert [one.is_plain for one in found] == [True, False, False, False, False]


def test_default_configurations_need_a_drafter_for_the_last_two() -> None:
    names = [
        [c.name for c in parse_configurations([], {}, has_drafter=has)] for has in (True, False)
    ]
    assert names == [["plain", "ngram", "dspine", "auto"], ["plain", "ngram"]]


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["fast"], "begin with one of plain"),
        (["auto,width=3"], "give KEY=VALUE with one of"),
        (["auto,draft"], "give KEY=VALUE"),
        (["auto,draft=many"], "draft is 'many'"),
        (["auto,draft=0"], "draft is '0'"),
        (["auto,fa=maybe"], "use on, off or auto"),
        (["auto,kernels=no"], "use on or off, or one of amx"),
        (["plain,draft=3"], "is plain and has"),
        (["auto", "auto"], "two configurations are called 'auto'"),
    ],
)
def test_wrong_configurations_say_what_is_possible(texts: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_configurations(texts, {}, has_drafter=True)


def test_the_mix_has_ten_prompts_of_eight_kinds() -> None:
    mix = named_tasks(["mix"])
    assert len(mix) == 10
    kinds = {prompt.task for prompt in mix}
    assert kinds == {
        *("maths", "prose", "summary", "translation", "python", "cpp", "javascript", "sql"),
    }
    assert named_tasks(["sql"]) == [mix[-1]]


def test_acceptance_can_be_measured_by_language() -> None:
    found = named_tasks(["languages"])
    assert len({prompt.id for prompt in found}) == len({str(p.prompt) for p in found}) == 24
    assert [p.task for p in found] == [
        task for task in ("german", "french", "spanish", "chinese") for _ in range(6)
    ]
    assert named_tasks(["chinese"], 2) == [found[18], found[21]]
    assert all(any("\u4e00" <= c <= "\u9fff" for c in str(p.prompt)) for p in found[18:])


@pytest.mark.parametrize("name", TASK_SETS)
def test_public_sets_are_whole_and_sampled_evenly(name: str) -> None:
    whole = named_tasks([name])
    sizes = {"gsm8k": 1319, "math500": 500, "humaneval": 164, "mbpp": 257, "mt-bench": 80}
    assert len(whole) == sizes[name] == len({prompt.id for prompt in whole})
    some = named_tasks([name], 4)
    assert [whole.index(prompt) for prompt in some] == [i * len(whole) // 4 for i in range(4)]


def test_an_unknown_task_lists_the_possible_ones() -> None:
    with pytest.raises(
        UsageError, match=r"no task 'gsm9k': choose of mix, gsm8k, .*languages, .*sql, german"
    ):
        named_tasks(["gsm9k"])


def test_own_prompts_of_every_form(tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "2"},
    ]
    (tmp_path / "a.txt").write_text("Plain text")
    rows = [{"prompt": "A", "task": "t", "id": 7}, {"question": "B"}, {"turns": ["C", "D"]}, "E"]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    (tmp_path / "c.json").write_text(json.dumps({"messages": chat}))
    (tmp_path / "d.json").write_text(json.dumps(chat))
    (tmp_path / "e.json").write_text(json.dumps([{"messages": chat}, {"text": "F"}]))
    (tmp_path / "notes.bin").write_bytes(b"\xff")
    found = read_prompts(tmp_path)
    short = [(p.task, p.id, p.prompt) for p in found if isinstance(p.prompt, str)]
    assert short == [
        ("a", "a-0", "Plain text"),
        ("t", "7", "A"),
        ("b", "b-1", "B"),
        ("b", "b-2", "C"),
        ("b", "b-3", "E"),
        ("e", "e-1", "F"),
    ]
    chats = [p.prompt for p in found if not isinstance(p.prompt, str)]
    assert chats == [chat[:4]] * 3
    assert read_prompts(tmp_path / "b.jsonl", limit=1)[0].prompt == "A"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"prompt": "A"}\n{"prompt": \n', "line 2 of .* is not JSON"),
        ("a.jsonl", '{"words": "A"}\n', "line 1 of .* has no prompt"),
        ("a.jsonl", "\n", "holds no prompts"),
        ("a.jsonl", "7\n", "is no prompt"),
        ("a.json", "{", "is not JSON"),
        ("a.json", '{"messages": [{"role": "assistant", "content": "x"}]}', "has no prompt"),
        ("a.json", '{"messages": [{"text": "x"}]}', "needs a 'role'"),
        ("a.json", '{"messages": [{"role": "user", "content": [1]}]}', "leave images out"),
        ("a.txt", "", "has no prompt"),
    ],
)
def test_own_prompts_that_cannot_be_read(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(FileError, match=words):
        read_prompts(tmp_path / name)


def test_missing_and_empty_places_of_prompts(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="there is no file or folder"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(FileError, match="holds no prompts: put"):
        read_prompts(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(FileError, match="not text in UTF-8"):
        read_prompts(tmp_path / "b.txt")


def test_prompts_are_asked_at_once_and_the_last_batch_is_filled_up() -> None:
    chosen = plan("plain", "auto", prompts=3, concurrencies=(1, 2, 4))
    asked = [
        [(cell.concurrency, cell.prompt, cell.place) for cell in turn[0]] for turn in chosen.turns()
    ]
    assert asked == [
        *([(1, prompt, 0)] for prompt in ("p0", "p1", "p2")),
        [(2, "p0", 0), (2, "p1", 1)],
        [(2, "p2", 2), (2, "p0", 3)],
        [(4, "p0", 0), (4, "p1", 1), (4, "p2", 2), (4, "p0", 3)],
    ]
    cells = chosen.cells()
    assert len(cells) == len(set(cells)) == 2 * (3 + 4 + 4)
    # The same prompt has the same seed, however many are asked at once.
    assert len({chosen.seed_of(cell) for cell in cells if cell.prompt == "p0"}) == 1


def test_everybody_gets_as_many_requests_at_once_as_the_plan_says(tmp_path: Path) -> None:
    rig = Rig()
    measured = rig.run(plan("plain", prompts=3, concurrencies=(2,)), tmp_path / "j")
    assert rig.started[0].at_once == [2, 2, 2]  # the first one warms up
    assert [(one.cell.prompt, one.cell.batch) for one in measured] == [
        ("p0", (0, 0)),
        ("p1", (0, 0)),
        ("p2", (0, 1)),
        ("p0", (0, 1)),
    ]


def test_a_batch_of_which_a_part_is_kept_is_measured_again_and_counts_once(tmp_path: Path) -> None:
    chosen = plan("plain", prompts=2, concurrencies=(2,))
    path = tmp_path / "j"
    Rig().run(chosen, path)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    rig = Rig()
    measured = rig.run(chosen, path)
    assert rig.started[0].at_once == [2, 2]
    assert [one.cell for one in measured] == chosen.cells()
