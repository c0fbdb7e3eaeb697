"""Answers of the target: sampling and loop rules by hand, batched equals single, resuming."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dspine.errors import CapacityError, FileError, TrainingError, UsageError  # noqa: E402
from dspine.llama.batch import Batch  # noqa: E402
from dspine.llama.context import Context  # noqa: E402
from dspine.llama.model import Model  # noqa: E402
from dspine.train import answers as answers_module  # noqa: E402
from dspine.train import line_file  # noqa: E402
from dspine.train.answers import AnswerOptions, generate_answers  # noqa: E402
from dspine.train.generation import (  # noqa: E402
    Generator,
    Job,
    common_prefix,
    is_looping,
    sample_rows,
)
from dspine.train.progress import JobProgress  # noqa: E402
from dspine.train.prompts import PromptEncoder  # noqa: E402
from tests.support.tiny_models import tiny_llama, tiny_qwen35  # noqa: E402

MAX_TOKENS = 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target") / "tiny.gguf")


def write_prompts(path: Path, texts: list[str], **fields: Any) -> Path:
    lines = [{"id": i, "source": "own", "prompt": t, **fields} for i, t in enumerate(texts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def options(target: Path, tmp_path: Path) -> AnswerOptions:
    texts = [f"say {'the ' * (i % 5)}{i}" for i in range(10)]
    return AnswerOptions(
        target=target,
        prompts=(write_prompts(tmp_path / "prompts.jsonl", texts),),
        output=tmp_path / "answers.jsonl",
        max_tokens=MAX_TOKENS,
        max_prompt_tokens=64,
        slots=4,
        seed=5,
        threads=1,
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def check_greedy(target: Path, prompt: list[int], answer: list[int]) -> None:
    """Every answer token is the most probable one when decoded alone, near ties allowed."""
    with Model.load(target) as model, Context(model, n_ctx=128, n_threads=1) as context:
        batch = Batch(128)
        batch.add_tokens(prompt + answer, 0)
        context.decode(batch)
        for index, token in enumerate(answer):
            logits = context.logits(len(prompt) - 1 + index)
            assert logits[token] > logits.max() - 0.02


def test_sampling_by_hand() -> None:
    # Probabilities 0.5, 0.3, 0.15, 0.05: with top-p 0.9 the set is the first three, sum 0.95.
    logits = np.log(np.array([[0.15, 0.5, 0.05, 0.3]], dtype=np.float32))
    order = []
    for uniform in (0.0, 0.5 / 0.95 - 1e-3, 0.5 / 0.95 + 1e-3, 0.8 / 0.95 + 1e-3, 0.9999):
        order += sample_rows(logits, np.ones(1), np.array([0.9]), np.array([uniform])).tolist()
    assert order == [1, 1, 3, 0, 0]
    # Reaching top-p exactly ends the set: 0.5 alone.
    assert sample_rows(logits, np.ones(1), np.array([0.5]), np.array([0.99]))[0] == 1
    # Temperature 0.5 squares the odds: 0.25 : 0.09 : 0.0225 : 0.0025, sum 0.365.
    halves = np.full(1, 0.5)
    for uniform, token in ((0.25 / 0.365 - 1e-3, 1), (0.25 / 0.365 + 1e-3, 3)):
        assert sample_rows(logits, halves, np.ones(1), np.array([uniform]))[0] == token


def test_rows_are_sampled_independently() -> None:
    logits = np.random.default_rng(0).normal(size=(6, 700)).astype(np.float32)
    temperatures = np.array([0.0, 1.0, 0.0, 0.3, 2.0, 5.0])
    top_p = np.array([0.9, 0.2, 0.9, 0.95, 0.999, 1.0])
    uniforms = np.array([0.5, 0.1, 0.9, 0.3, 0.99, 0.999])
    together = sample_rows(logits, temperatures, top_p, uniforms)
    for row in range(6):
        part = slice(row, row + 1)
        alone = sample_rows(logits[part], temperatures[part], top_p[part], uniforms[part])
        assert together[row] == alone[0]
    assert together[0] == logits[0].argmax()
    assert together[2] == logits[2].argmax()


def test_draws_follow_the_distribution() -> None:
    probs = np.array([0.1, 0.2, 0.3, 0.4])
    logits = np.tile(np.log(probs).astype(np.float32), (2000, 1))
    uniforms = (np.arange(2000) + 0.5) / 2000
    tokens = sample_rows(logits, np.ones(2000), np.ones(2000), uniforms)
    assert np.allclose(np.bincount(tokens, minlength=4) / 2000, probs, atol=1e-3)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([7] * 31, False),
        ([7] * 32, True),
        ([7] * 32 + [8], False),
        ([1, 2] * 16, True),
        ([9] + [1, 2] * 16, True),
        (list(range(11)) * 3, True),  # 33 tokens, three pieces of 11
        (list(range(20)) * 2, False),
        (list(range(20)) * 3, True),
        (list(range(64)) * 3, True),
        (list(range(65)) * 3, False),  # longer than the longest period looked for
        (list(range(200)), False),
        ([], False),
    ],
)
def test_loops(tokens: list[int], expected: bool) -> None:
    assert is_looping(tokens) is expected


def test_common_prefix() -> None:
    assert common_prefix([[1, 2, 3, 4], [1, 2, 5], [1, 2, 3]]) == (1, 2)
    assert common_prefix([[1, 2], [1, 2]]) == (1,)  # one token of each must be left
    assert common_prefix([[1, 2], [3]]) == ()
    assert common_prefix([]) == ()


def test_answers_are_those_of_single_decoding(options: AnswerOptions) -> None:
    report = generate_answers(dataclasses.replace(options, greedy_share=1.0))
    lines = read_lines(options.output)
    assert report.answers == len(lines) == 10
    assert report.tokens == sum(len(line["g"]) for line in lines)
    assert sorted(line["id"] for line in lines) == list(range(10))
    prompts = read_lines(options.prompts[0])
    with Model.load(options.target) as model:
        encoder, is_end = PromptEncoder(model), model.tokenizer.is_end
        for line in lines:
            assert line["p"] == encoder.encode(prompts[line["id"]]["prompt"])
            assert (line["t"], line["source"]) == (0.0, "own")
            ended = [is_end(token) for token in line["g"]]
            assert not any(ended[:-1])
            assert ended[-1] or len(line["g"]) == MAX_TOKENS
    assert report.ended == sum(len(line["g"]) < MAX_TOKENS for line in lines)
    for line in lines[:4]:
        check_greedy(options.target, line["p"], line["g"])


def test_the_chat_template_is_the_targets(target: Path) -> None:
    with Model.load(target) as model:
        text = b"".join(
            model.tokenizer.piece(token, special=True)
            for token in PromptEncoder(model, system="be short").encode("why?")
        )
    assert text == (
        b"<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n"
        b"<|im_start|>assistant\n"
    )


def test_an_answer_ends_with_the_end_token(target: Path) -> None:
    with Model.load(target) as model:
        generator = Generator(model, slots=2, max_prompt_tokens=8, max_tokens=40, n_threads=1)
        try:
            # Temperature 5 is nearly uniform over 320 tokens: some of 30 answers meet an end.
            jobs = [Job(str(i), (5, 6, 7), 5.0, 1.0, i) for i in range(30)]
            answers = [answer for _, answer in generator.run(jobs)]
            ends = [[model.tokenizer.is_end(token) for token in answer] for answer in answers]
        finally:
            generator.close()
    assert len(answers) == 30
    assert not any(any(row[:-1]) for row in ends)
    early = [row for row in ends if len(row) < 40]
    assert early
    assert all(row[-1] for row in early)


def test_a_hybrid_target_answers_too(tmp_path: Path) -> None:
    path = tiny_qwen35(tmp_path / "hybrid.gguf")
    with Model.load(path) as model:
        generator = Generator(
            model, slots=3, max_prompt_tokens=8, max_tokens=6, shared_prefix=(5,), n_threads=1
        )
        try:
            jobs = [Job(str(i), (5, 6 + i), 0.0, 1.0, i) for i in range(7)]
            found = {job.key: answer for job, answer in generator.run(jobs)}
        finally:
            generator.close()
    assert len(found) == 7
    for i in range(7):
        check_greedy(path, [5, 6 + i], found[str(i)])


def test_a_prompt_that_does_not_fit_is_one_sentence(target: Path) -> None:
    with Model.load(target) as model:
        generator = Generator(model, slots=1, max_prompt_tokens=2, max_tokens=4, n_threads=1)
        try:
            with pytest.raises(CapacityError, match="prompt long has 3 tokens"):
                list(generator.run([Job("long", (5, 6, 7), 0.0, 1.0, 0)]))
        finally:
            generator.close()


def test_a_stopped_run_goes_on_and_decides_the_same(
    options: AnswerOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = dataclasses.replace(options, output=tmp_path / "whole.jsonl", answers_per_prompt=2)
    generate_answers(whole)

    class Stopping(JobProgress):
        def advance(self, count: int, note: str = "") -> None:
            super().advance(count, note)
            if self.done == 7:
                raise KeyboardInterrupt

    parts = dataclasses.replace(options, answers_per_prompt=2)
    with monkeypatch.context() as patch:
        patch.setattr(answers_module, "JobProgress", Stopping)
        with pytest.raises(KeyboardInterrupt):
            generate_answers(parts)
    assert len(read_lines(parts.output)) == 7
    # A kill in the middle of a line: it is made again.
    data = parts.output.read_bytes()
    parts.output.write_bytes(data[:-15])
    report = generate_answers(parts)
    assert report.answers == 20 - 6

    def facts(path: Path) -> list[tuple[int, float, str]]:
        return sorted((line["id"], line["t"], str(line["p"])) for line in read_lines(path))

    assert facts(parts.output) == facts(whole.output)
    temperatures = [line["t"] for line in read_lines(whole.output)]
    assert 0 < temperatures.count(0.0) < 10
    assert set(temperatures) == {0.0, 0.8}
    assert generate_answers(parts).answers == 0


def test_which_prompts_are_answered(options: AnswerOptions, tmp_path: Path) -> None:
    first = dataclasses.replace(options, limit=3)
    assert generate_answers(first).answers == 3
    assert generate_answers(first).answers == 0
    done = {line["id"] for line in read_lines(options.output)}
    rest = dataclasses.replace(options, skip=(options.output,), output=tmp_path / "rest.jsonl")
    assert generate_answers(rest).answers == 7
    assert {line["id"] for line in read_lines(rest.output)} == set(range(10)) - done
    none = dataclasses.replace(options, sources=("code",), output=tmp_path / "none.jsonl")
    assert generate_answers(none).answers == 0
    short = dataclasses.replace(options, max_prompt_tokens=5, output=tmp_path / "short.jsonl")
    assert generate_answers(short).too_long == 10


def test_a_full_disk_keeps_the_complete_lines(
    options: AnswerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate_answers(dataclasses.replace(options, limit=2))
    before = options.output.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(line_file, "_SYNC_LINES", 1)
        patch.setattr(os, "fsync", full)
        with pytest.raises(TrainingError, match=r"No space left on device.*make room"):
            generate_answers(options)
    assert options.output.read_bytes().startswith(before)
    generate_answers(options)
    assert sorted(line["id"] for line in read_lines(options.output)) == list(range(10))


def test_bad_options_are_one_sentence(options: AnswerOptions, tmp_path: Path) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"slots": 0}, "slots is 0"),
        ({"greedy_share": 1.5}, "greedy_share is 1.5"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"output": tmp_path / "a.jsonl.gz"}, "without .gz"),
    )
    for changes, message in cases:
        with pytest.raises(UsageError, match=message):
            generate_answers(dataclasses.replace(options, **changes))
    with pytest.raises(UsageError, match="prompt id 0 stands in the prompt files twice"):
        generate_answers(dataclasses.replace(options, prompts=options.prompts * 2))


def test_the_last_prompt_may_lack_its_line_feed(options: AnswerOptions, tmp_path: Path) -> None:
    prompts = tmp_path / "by-hand.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}')
    assert generate_answers(dataclasses.replace(options, prompts=(prompts,))).answers == 2


def test_a_file_that_holds_no_answers_is_left_alone(options: AnswerOptions, tmp_path: Path) -> None:
    """The prompts named as output by mistake, with a last line that lacks its line feed."""
    prompts = tmp_path / "by-hand.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}')
    before = prompts.read_bytes()
    with pytest.raises(FileError, match="line 1 is not an answer"):
        generate_answers(dataclasses.replace(options, prompts=(prompts,), output=prompts))
    assert prompts.read_bytes() == before
    with pytest.raises(TrainingError, match="name a file in it"):
        generate_answers(dataclasses.replace(options, output=tmp_path))


@pytest.mark.parametrize(
    ("text", "is_ours"),
    [
        ("my notes", False),
        ('{"id":"a","prompt":"one"}', False),
        ("[1, 2]", False),
        ('{"id":', True),
        ('{"id":"a","t":0.0,"p":[1', True),
        ('{"id":"a","t":0.0,"p":[1],"g":[2]}', True),
    ],
)
def test_only_the_beginning_of_an_answer_is_cut_off(
    options: AnswerOptions, tmp_path: Path, text: str, is_ours: bool
) -> None:
    output = tmp_path / "one-line"
    output.write_text(text)
    wanted = dataclasses.replace(options, output=output, limit=1)
    if is_ours:
        assert generate_answers(wanted).answers == 1
        assert output.read_text().count("\n") == 1
    else:
        with pytest.raises(TrainingError, match="holds no answers: name another file"):
            generate_answers(wanted)
        assert output.read_text() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": 1}\n', "line 1 is not a prompt"),
        ('{"id": 1, "prompt": "  "}\n', "the prompt is empty"),
        ("[]\n", "line 1 is not a prompt"),
        ("not json\n", "line 1 is not a prompt"),
    ],
)
def test_bad_prompt_files_are_one_sentence(
    options: AnswerOptions, tmp_path: Path, text: str, message: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(text)
    with pytest.raises(FileError, match=message):
        generate_answers(dataclasses.replace(options, prompts=(bad,)))
