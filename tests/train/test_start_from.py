"""A run that begins with an existing drafter: the same function at first, then training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspine.cli.main import run_cli
from dspine.errors import PairError, TrainingError
from dspine.files.checkpoint import read_checkpoint
from dspine.files.convert import convert_checkpoint
from dspine.files.gguf_file import read_header
from dspine.train.options import FitOptions, Geometry
from dspine.train.trainer import fit
from tests.support.tiny_models import tiny_llama
from tests.support.training import pattern_shards

TAPS = (0, 2)
GEOMETRY = Geometry(
    num_layers=2,
    block_size=5,
    transfer_rank=16,
    message_size=16,
    top_k=4,
    window=32,
    intermediate_size=64,
    mask_token_id=3,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a fine-tune of it (another final norm), shards of each, and a run."""
    folder = tmp_path_factory.mktemp("start")
    for name in ("base", "tune"):
        target = tiny_llama(folder / f"{name}.gguf", hidden_size=32, num_heads=2, num_kv_heads=1)
        if name == "tune":
            tune_norm(target)
        pattern_shards(folder / name, target, taps=TAPS, sequences=12, seed=1)
    fit(options(folder, "base", folder / "run", steps=60, learning_rate=4e-3))
    return folder


def tune_norm(target: Path) -> None:
    """A fine-tune's final norm is no longer that of its base."""
    place = read_header(target).tensors["output_norm.weight"]
    with target.open("r+b") as stream:
        stream.seek(place.offset)
        stream.write(np.full(place.n_elements, 1.25, "<f4").tobytes())


def options(data: Path, target: str, output: Path, **changes: object) -> FitOptions:
    base = FitOptions(
        target=data / f"{target}.gguf",
        shards=(data / target,),
        output=output,
        steps=1,
        geometry=GEOMETRY,
        draft_vocab_size=160,
        copy_layers=False,
        anchors_per_step=32,
        anchors_per_sequence=8,
        threads=1,
        checkpoint_minutes=1000,
        log_steps=1,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def loss(folder: Path) -> list[float]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["ce"] for line in lines]


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_it_begins_with_the_same_weights(data: Path, tmp_path: Path, kind: str) -> None:
    start = data / "run"
    if kind == "gguf":
        start = tmp_path / "drafter.gguf"
        convert_checkpoint(data / "run", start, dtype="f32")
    other = Geometry(num_layers=1, block_size=3, transfer_rank=8)
    result = fit(
        options(
            data,
            "tune",
            tmp_path / "out",
            init_from=start,
            learning_rate=1e-12,
            geometry=other,
            draft_vocab_size=None,
        )
    )
    before, after = (
        read_checkpoint(data / "run/checkpoint-00000060"),
        read_checkpoint(result.checkpoint),
    )
    # As a GGUF says it the epsilon is the shortest decimal.
    sizes = replace(before.config, rms_norm_eps=after.config.rms_norm_eps)
    assert after.config == sizes, "its own sizes, not those of the options"
    assert after.draft_vocab is not None and before.draft_vocab is not None
    assert after.draft_vocab.tolist() == before.draft_vocab.tolist()
    assert after.pair is not None and before.pair is not None
    assert after.pair.fingerprint != before.pair.fingerprint, "it belongs to the new target"
    for name, array in before.tensors.items():
        np.testing.assert_allclose(after.tensors[name], array, rtol=1e-5, atol=1e-7)
    # What it learnt on the pattern is there in the first step; a new drafter has to learn it.
    fit(options(data, "tune", tmp_path / "new"))
    assert loss(tmp_path / "out")[0] < 0.5 * loss(tmp_path / "new")[0]


def test_it_goes_on_without_the_file(data: Path, tmp_path: Path) -> None:
    start = tmp_path / "drafter.gguf"
    convert_checkpoint(data / "run", start, dtype="f32")
    command = ["train", "fit", "-m", str(data / "tune.gguf"), "--shards", str(data / "tune")]
    command += ["--init-from", str(start), "-t", "1", "-o", str(tmp_path / "out")]
    assert run_cli([*command, "--steps", "1"]) == 0
    start.unlink()
    assert run_cli([*command, "--steps", "2"]) == 0
    assert read_checkpoint(tmp_path / "out/checkpoint-00000002").config.block_size == 5


def test_what_does_not_fit_is_refused(data: Path, tmp_path: Path) -> None:
    wide = tiny_llama(tmp_path / "wide.gguf", hidden_size=64, num_heads=2, num_kv_heads=1)
    pattern_shards(tmp_path / "wide", wide, taps=TAPS, sequences=2, seed=1)
    with pytest.raises(PairError, match="hidden size is 32, but wide has 64"):
        fit(options(tmp_path, "wide", tmp_path / "a", init_from=data / "run"))
    pattern_shards(tmp_path / "tune", data / "tune.gguf", taps=(1, 2), sequences=2, seed=1)
    given = options(data, "tune", tmp_path / "b", init_from=data / "run")
    with pytest.raises(TrainingError, match=r"\[0, 2\], the shards hold \[1, 2\].*--taps 0,2"):
        fit(replace(given, shards=(tmp_path / "tune",)))
