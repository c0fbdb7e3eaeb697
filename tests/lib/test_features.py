"""Capturing features: values against the formulas, which tokens are labels, split, resuming."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from dspine.errors import FileError, UsageError  # noqa: E402
from dspine.files.dtypes import bf16_from_float32, float32_from_bf16  # noqa: E402
from dspine.llama.batch import Batch  # noqa: E402
from dspine.llama.context import Context  # noqa: E402
from dspine.llama.convert_weights import convert_weights  # noqa: E402
from dspine.llama.model import Model  # noqa: E402
from dspine.train import features as features_module  # noqa: E402
from dspine.train.features import FeatureOptions, capture, top_probabilities  # noqa: E402
from dspine.train.progress import JobProgress  # noqa: E402
from dspine.train.shards import Shard, ShardWriter, list_shards  # noqa: E402
from tests.lib.test_llama_numpy import forward  # noqa: E402
from tests.support.tiny_models import tiny_llama  # noqa: E402

TAPS = (0, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target") / "tiny.gguf")


def write_answers(path: Path, lines: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def random_lines(count: int, seed: int = 0, prompt: int = 5, answer: int = 9) -> list[Any]:
    random = np.random.default_rng(seed)
    return [
        {
            "id": index,
            "t": 0.8,
            "p": random.integers(3, 300, prompt).tolist(),
            "g": random.integers(3, 300, answer).tolist(),
        }
        for index in range(count)
    ]


@pytest.fixture
def options(target: Path, tmp_path: Path) -> FeatureOptions:
    answers = write_answers(tmp_path / "answers.jsonl", random_lines(12))
    return FeatureOptions(
        target=target,
        answers=(answers,),
        output=tmp_path / "features",
        taps=TAPS,
        max_tokens=32,
        shard_tokens=30,
        threads=1,
        seed=None,
    )


def all_shards(folder: Path) -> list[Shard]:
    return [Shard.read(path) for path in list_shards(folder)]


def all_ids(folder: Path) -> list[str]:
    return [i for shard in all_shards(folder) for i in shard.info.ids]


def test_features_and_teacher_follow_the_formulas(options: FeatureOptions, target: Path) -> None:
    line = random_lines(1)[0]
    report = capture(options)
    assert (report.sequences, report.tokens, report.labels) == (12, 12 * 14, 12 * 9)
    shard = all_shards(options.output)[0]
    rows = shard.sequence(0)
    tokens = line["p"] + line["g"]
    assert shard.tokens[rows].tolist() == tokens
    # Labels are the answer's tokens; row i of the teacher predicts token i + 1.
    assert shard.loss_mask[rows].tolist() == [0] * 5 + [1] * 9
    layers, _, logits = forward(target, tokens)
    expected = np.concatenate([layers[tap] for tap in TAPS], axis=1)
    found = float32_from_bf16(shard.features[rows])
    # bfloat16 keeps 8 bits: half a unit is 2^-9 of the value, the cache's f16 adds a little.
    assert np.abs(found - expected).max() < 2**-8 * np.abs(expected).max()
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    for row in range(14):
        ids = shard.teacher_ids[rows][row]
        probs = shard.teacher_probs[rows][row].astype(np.float64)
        if not 4 <= row <= 12:
            assert not ids.any()
            assert not probs.any()
            continue
        assert len(set(ids.tolist())) == 64
        assert (np.diff(probs) <= 0).all()
        # The cache holds keys and values in 16 bits.
        assert np.abs(probs - weights[row][ids]).max() < 1e-2 * weights[row].max()
        # Nothing outside the 64 is more probable than the last of them (up to rounding).
        others = np.delete(weights[row], ids)
        assert others.max() < weights[row][ids].min() * 1.02


def test_top_probabilities_by_hand() -> None:
    logits = np.log(np.array([[1, 4, 2, 1], [8, 1, 1, 6]], dtype=np.float32))
    ids, probs = top_probabilities(logits, 2)
    assert ids.tolist() == [[1, 2], [0, 3]]
    assert np.allclose(probs, [[0.5, 0.25], [0.5, 0.375]], atol=1e-3)


def test_greedy_answers_are_confirmed(options: FeatureOptions, tmp_path: Path) -> None:
    prompt, answer = [5, 60, 200, 7], []
    with Model.load(options.target) as model, Context(model, n_ctx=64, n_threads=1) as context:
        batch = Batch(64)
        pending, position = prompt, 0
        for _ in range(20):
            batch.clear()
            batch.add_tokens(pending, position, logits="last")
            context.decode(batch)
            position += len(pending)
            pending = [context.argmax(len(batch) - 1)]
            answer += pending
    lines = [{"id": "a", "t": 0, "p": prompt, "g": answer}, {**random_lines(1)[0], "t": 0.8}]
    report = capture(
        dataclasses.replace(
            options, answers=(write_answers(tmp_path / "greedy.jsonl", lines),), max_tokens=64
        )
    )
    assert report.greedy_labels == 20
    assert report.agreement is not None
    assert report.agreement >= 0.95  # a near tie may fall the other way in another batch shape


def test_held_out_prompts_are_kept_apart(options: FeatureOptions, tmp_path: Path) -> None:
    lines = random_lines(40) + random_lines(40, seed=1)
    held = tmp_path / "held"
    report = capture(
        dataclasses.replace(
            options,
            answers=(write_answers(tmp_path / "many.jsonl.gz", lines),),
            held_out=held,
            held_out_one_in=4,
            seed=3,
        )
    )
    expected = {str(i) for i in range(40) if zlib.crc32(str(i).encode()) % 4 == 0}
    assert {i.split(":")[0] for i in all_ids(held)} == expected
    assert len(all_ids(held)) == report.held_out_sequences == 2 * len(expected)
    rest = [i.split(":")[0] for i in all_ids(options.output)]
    assert not expected.intersection(rest)
    assert len(rest) == 80 - report.held_out_sequences
    assert rest != sorted(rest, key=int)  # shuffled


def test_a_stopped_capture_goes_on(
    options: FeatureOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopping(JobProgress):
        def advance(self, count: int, note: str = "") -> None:
            super().advance(count, note)
            if self.done >= 5 * 14:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(features_module, "JobProgress", Stopping)
        with pytest.raises(KeyboardInterrupt):
            capture(options)
    assert len(all_ids(options.output)) == 5
    # A kill would also leave a shard half written.
    (options.output / ".shard-00009.safetensors.0badcafe.partial").write_bytes(b"\0" * 100)
    report = capture(options)
    assert report.sequences == 7
    ids = all_ids(options.output)
    assert sorted(int(i.split(":")[0]) for i in ids) == list(range(12))
    assert not list(options.output.glob("*.partial"))
    assert capture(options).sequences == 0


def test_a_token_limit_counts_all_runs(options: FeatureOptions) -> None:
    limited = dataclasses.replace(options, token_limit=40)
    assert capture(limited).tokens == 42  # three whole sequences of 14
    assert capture(limited).tokens == 0
    assert capture(dataclasses.replace(options, token_limit=60)).tokens == 28


def test_long_sequences_are_cut_and_long_prompts_left_out(
    options: FeatureOptions, tmp_path: Path
) -> None:
    lines = [
        random_lines(1, prompt=4, answer=60)[0],
        {**random_lines(1, prompt=12, answer=5)[0], "id": "long prompt"},
        {**random_lines(1, prompt=40, answer=5)[0], "id": "no label fits"},
        {**random_lines(1, prompt=4)[0], "id": "no answer", "g": []},
    ]
    answers = write_answers(tmp_path / "lengths.jsonl", lines)
    report = capture(dataclasses.replace(options, answers=(answers,), max_prompt_tokens=10))
    assert (report.sequences, report.tokens, report.labels) == (1, 32, 28)
    other = dataclasses.replace(options, answers=(answers,), output=tmp_path / "all")
    assert {i.split(":")[0] for i in (capture(other), all_ids(other.output))[1]} == {
        "0",
        "long prompt",
    }


def test_sources_come_from_the_prompt_file(options: FeatureOptions, tmp_path: Path) -> None:
    prompts = write_answers(
        tmp_path / "prompts.jsonl",
        [{"id": i, "source": "code" if i % 3 else "maths"} for i in range(12)],
    )
    chosen = dataclasses.replace(options, prompts=prompts, sources=("maths",))
    assert capture(chosen).sequences == 4
    assert {s for shard in all_shards(options.output) for s in shard.info.sources} == {"maths"}
    with pytest.raises(UsageError, match="prompt file"):
        capture(dataclasses.replace(options, sources=("maths",)))


def test_every_token_of_plain_text_is_a_label(options: FeatureOptions, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the thing in the sand " * 12)
    report = capture(dataclasses.replace(options, answers=(), texts=(text,), max_tokens=16))
    with Model.load(options.target) as model:
        tokens = model.tokenizer.encode(text.read_text())
    assert report.tokens == len(tokens)
    shards = all_shards(options.output)
    assert [t for shard in shards for t in shard.tokens.tolist()] == tokens
    first = shards[0].sequence(0)
    assert shards[0].loss_mask[first].tolist() == [0] + [1] * 15
    assert (shards[0].teacher_probs[first][:15, 0] > 0).all()
    assert report.agreement is None


def test_a_mixture_of_captures_is_refused(options: FeatureOptions, tmp_path: Path) -> None:
    capture(dataclasses.replace(options, token_limit=14))
    with pytest.raises(UsageError, match=r"taps \[0, 2\], now \[1\]"):
        capture(dataclasses.replace(options, taps=(1,)))
    foreign = ShardWriter(tmp_path / "other", taps=TAPS, fingerprint="beef", shard_tokens=1)
    foreign.add(
        sequence_id="x",
        source="x",
        temperature=0.0,
        tokens=np.zeros(2, np.int32),
        loss_mask=np.ones(2, np.uint8),
        features=bf16_from_float32(np.zeros((2, 128), np.float32)),
        teacher_ids=np.zeros((2, 64), np.int32),
        teacher_probs=np.zeros((2, 64), np.float16),
    )
    with pytest.raises(UsageError, match="another target"):
        capture(dataclasses.replace(options, output=tmp_path / "other"))


def _line(**changes: Any) -> str:
    fields = {"id": 1, "t": 0.0, "p": [5, 6], "g": [7, 8], **changes}
    return json.dumps({k: v for k, v in fields.items() if v is not None}) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_line(g=[7, 320]), "line 1 has token ids outside the vocabulary of 320"),
        (_line(p=[-1]), "outside the vocabulary"),
        (_line(g=None), "line 1 is not an answer"),
        (_line(g=[[7], [8]]), "not a list of whole numbers"),
        (_line(g=[7.5]), "not a list of whole numbers"),
        (_line(g="text"), "not a list of whole numbers"),
        (_line(t="warm"), "line 1 is not an answer"),
        ("[1]\n", "line 1 is not an answer"),
        (_line() + "{half\n" + _line(), "line 2 is not an answer"),
        (None, "cannot be read"),
    ],
)
def test_bad_answer_files_are_one_sentence(
    options: FeatureOptions, tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(FileError, match=message):
        capture(dataclasses.replace(options, answers=(path,)))


def test_a_damaged_gzip_file_is_one_sentence(options: FeatureOptions, tmp_path: Path) -> None:
    path = write_answers(tmp_path / "bad.jsonl.gz", random_lines(50))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(FileError, match="cannot be read"):
        capture(dataclasses.replace(options, answers=(path,)))


def test_a_half_written_last_line_is_left_out(options: FeatureOptions) -> None:
    path = options.answers[0]
    path.write_bytes(path.read_bytes()[:-20])
    assert capture(options).sequences == 11


def test_bad_options_are_one_sentence(options: FeatureOptions) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"max_tokens": 1}, "max_tokens is 1"),
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"weights": "q4"}, "weights 'q4' is unknown"),
        ({"held_out": options.output}, "held-out"),
        ({"taps": (3,)}, "layer 3 cannot be read"),
    )
    for changes, message in cases:
        with pytest.raises(UsageError, match=message):
            capture(dataclasses.replace(options, **changes))


def test_a_copy_in_16_bits_is_the_same_model(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "q.gguf", weights="q4_1")
    copy = tmp_path / "f16.gguf"
    convert_weights(source, copy, "f16")
    logits = []
    for path in (source, copy):
        with Model.load(path) as model, Context(model, n_ctx=32, n_threads=1) as context:
            batch = Batch(8)
            batch.add_tokens([5, 60, 200, 7, 9], 0)
            context.decode(batch)
            logits.append(np.array([context.logits(row) for row in range(5)]))
    quantised, exact = logits
    assert np.abs(quantised - exact).max() < 0.05 * np.abs(exact).max()
    cosine = (quantised * exact).sum() / np.linalg.norm(quantised) / np.linalg.norm(exact)
    assert cosine > 0.999
    with pytest.raises(UsageError, match="unknown"):
        convert_weights(source, copy, "q5")
    with pytest.raises(UsageError, match="source itself"):
        convert_weights(source, source, "f16")
    with pytest.raises(FileError, match=r"absent\.gguf does not exist"):
        convert_weights(tmp_path / "absent.gguf", copy, "f16")
    with pytest.raises(FileError, match="cannot be copied"):
        convert_weights(source, tmp_path / "no folder" / "f16.gguf", "f16")


def test_a_capture_with_a_copy_keeps_the_copy(options: FeatureOptions, tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "q.gguf", weights="q4_1")
    report = capture(dataclasses.replace(options, target=source, weights="f16", token_limit=20))
    assert report.tokens == 28
    assert (options.output / "q-f16.gguf").is_file()
    assert len(all_shards(options.output)) >= 1
