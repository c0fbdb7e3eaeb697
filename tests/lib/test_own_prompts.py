"""Prompts that the target writes itself: which are kept, resuming, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dspine.cli.main import run_cli  # noqa: E402
from dspine.default_pair import default_target  # noqa: E402
from dspine.errors import TrainingError, UsageError  # noqa: E402
from dspine.llama.model import load_safely  # noqa: E402
from dspine.train import own_prompts  # noqa: E402
from dspine.train.generation import Job  # noqa: E402
from dspine.train.own_prompts import OwnPromptOptions, write_prompts  # noqa: E402
from dspine.train.prompts import PromptEncoder  # noqa: E402


@pytest.fixture
def options(tmp_path: Path) -> OwnPromptOptions:
    return OwnPromptOptions(
        target=default_target(), output=tmp_path / "own.jsonl", count=4, slots=4, threads=1
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def scripted(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> list[Job]:
    """Lets the n-th prompt that is begun go on as texts[n], without a decode; "..." never ends.

    Returns the jobs that were begun.
    """
    with load_safely(default_target()) as model:
        end = model.tokenizer.encode("<|im_end|>", parse_special=True)
        written = [
            model.tokenizer.encode(text) + ([] if text.endswith("...") else end) for text in texts
        ]
    begun: list[Job] = []

    class Scripted:
        def __init__(self, _model: Any, **_: Any) -> None: ...

        def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, list[int]]]:
            for job in jobs:
                number = int(job.key.rpartition("-")[2])
                begun.append(job)
                yield job, written[number % len(written)]

        def close(self) -> None: ...

    monkeypatch.setattr(own_prompts, "Generator", Scripted)
    return begun


def test_the_target_writes_and_goes_on(options: OwnPromptOptions, tmp_path: Path) -> None:
    openings = tmp_path / "openings.txt"
    openings.write_text("Explain \nWrite a poem\\nabout")
    wanted = replace(options, openings=openings, max_tokens=60)
    report = write_prompts(wanted)
    lines = read_lines(options.output)
    assert report.prompts == len(lines) == 4
    for line in lines:
        assert line["prompt"].startswith(("Explain", "Write a poem\nabout"))
        assert "<|" not in line["prompt"]
    # A half-written line goes, the others stay, numbers go on.
    before = options.output.read_text()
    options.output.write_text(before + '{"id":"self-9')
    assert write_prompts(replace(wanted, count=6)).prompts == 2
    assert options.output.read_text().startswith(before)
    ids = [line["id"] for line in read_lines(options.output)]
    assert len(set(ids)) == 6
    assert write_prompts(replace(wanted, count=6)).prompts == 0


def test_only_whole_new_and_unlike_prompts_are_kept(
    options: OwnPromptOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [
        "Why is the sky blue?",
        "It does not end...",
        "why is the SKY blue",
        "Two words",
        "Tell me: how many eggs do the ducks lay in a week?",
        "Name three rivers in Europe.",
    ]
    begun = scripted(monkeypatch, texts)
    unlike = ("So how many eggs do the ducks lay in May?", "Why is the sky blue, and not red?")
    report = write_prompts(replace(options, count=2, unlike=unlike[:1]))
    assert [line["prompt"] for line in read_lines(options.output)] == [texts[0], texts[5]]
    assert (report.prompts, report.unended, report.repeated) == (2, 1, 3)
    assert len({job.seed for job in begun}) == len(begun) == 6
    # A text of fewer than eight words is only the same if all of it is.
    again = replace(options, count=1, output=options.output.with_name("other.jsonl"))
    assert write_prompts(replace(again, unlike=unlike[1:])).prompts == 1


def test_a_target_that_hardly_ends_a_prompt_is_given_up(
    options: OwnPromptOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, ["Why is the sky blue?", *["On and on..."] * 99])
    with pytest.raises(TrainingError, match=r"of 32 prompts .* only 1 .* give openings"):
        write_prompts(options)
    assert len(read_lines(options.output)) == 1


def test_files_of_another_kind_stay_as_they_are(options: OwnPromptOptions) -> None:
    others = '{"id":"7","prompt":"Why is the sky blue?"}\n{"id":"8","pro'
    options.output.write_text(others)
    with pytest.raises(TrainingError, match=r"another origin \(id 7\): name another file"):
        write_prompts(options)
    assert options.output.read_text() == others
    options.output.write_text("my notes")
    with pytest.raises(TrainingError, match="holds no prompts: name another file"):
        write_prompts(options)
    assert options.output.read_text() == "my notes"


def test_bad_input_is_one_sentence(
    options: OwnPromptOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"temperature 0 must lie in"):
        write_prompts(replace(options, temperature=0))
    with pytest.raises(UsageError, match=r"count is 0: it must be at least 1"):
        write_prompts(replace(options, count=0))
    with pytest.raises(UsageError, match=r"openings .*gone cannot be read .*: check the path"):
        write_prompts(replace(options, openings=tmp_path / "gone"))
    with pytest.raises(UsageError, match=r"gz cannot be added to: name a file without .gz"):
        write_prompts(replace(options, output=tmp_path / "own.jsonl.gz"))
    told = ["train", "prompts", "-o", str(tmp_path / "own.jsonl"), "--top-p", "2"]
    assert run_cli(told) == 2
    assert "top_p 2.0 in 0 ... 1" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "bare.gguf has no chat template, so that it cannot write as a user: give prompts"),
        ("{{ messages | length }}", "bare.gguf does not show the user's message as it is: give"),
    ],
)
def test_a_target_without_a_usable_template_is_refused(template: str | None, expected: str) -> None:
    bare: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(bos=-1, eos=-1),
        path=Path("bare.gguf"),
        metadata=lambda _key: template,
    )
    with pytest.raises(UsageError, match=expected):
        PromptEncoder(bare).before_user()
