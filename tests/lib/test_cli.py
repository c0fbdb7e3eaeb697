"""The command line on the real library: tiny pairs, bad input, doctor."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dspine.cli.main import run_cli
from dspine.engine import calibrate
from dspine.llama import probe as probe_module
from dspine.llama.probe import CURE, ProbeResult
from tests.support.drafter_files import gguf_bytes, pair_text, pair_u32, tensor_entry
from tests.support.tiny_models import tiny_llama
from tests.support.tiny_pair import write_pair_drafter

PROMPT = "abcabcabcabc"
PROGRAM = [sys.executable, "-c", "from dspine.cli.main import main; main()"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_llama(folder / "target.gguf", seed=1)
    return target, write_pair_drafter(folder / "drafter.gguf", target)


def arguments(target: Path, drafter: Path | None, *more: str) -> list[str]:
    named = [] if drafter is None else ["-md", str(drafter)]
    return ["run", "-m", str(target), *named, "-t", "1", "-c", "256", "-n", "24", "--raw", *more]


def document(capsys: pytest.CaptureFixture[str], command: list[str]) -> dict[str, Any]:
    assert run_cli(command) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("proposer", ["dspine", "ngram", "auto"])
def test_a_random_drafter_changes_nothing(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], proposer: str
) -> None:
    plain = document(capsys, arguments(*pair, "--json", "--plain", PROMPT))
    drafted = document(
        capsys,
        arguments(*pair, "--json", "--proposer", proposer, "--spec-draft-n-max", "4", PROMPT),
    )
    assert plain["tokens"] == drafted["tokens"]
    assert plain["text"] == drafted["text"]
    assert plain["stats"]["drafted"] == 0
    if proposer == "dspine":
        assert drafted["stats"]["drafted"] > 0


@pytest.mark.parametrize(("drafts", "told"), [("5", False), ("6", True)])
def test_more_drafts_than_a_block_has_are_told(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], drafts: str, told: bool
) -> None:
    assert run_cli(arguments(*pair, "--spec-draft-n-max", drafts, PROMPT)) == 0
    sentence = "--spec-draft-n-max is 6, and a block of drafter.gguf has 5 drafts: it makes no more"
    assert (f"dspine: {sentence}\n" in capsys.readouterr().err) is told


def test_batches_without_a_row_for_drafts_are_told(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # With a number of drafts nothing is measured, and whether drafting pays here is not told.
    assert run_cli(arguments(*pair, "-b", "1", "--spec-draft-n-max", "3", PROMPT)) == 0
    told = capsys.readouterr().err
    assert (
        "drafting off: batches of 1 tokens (-b) for 1 sequence(s) have no row for a draft" in told
    )


def test_compare_on_a_real_pair(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(
        capsys, arguments(*pair, "--compare", "--json", "--spec-draft-n-max", "3", PROMPT)
    )
    assert found["identical"] or found["divergence"]["reproduced"]
    assert found["ratio"] > 0
    assert found["speculative"]["acceptance_length"] >= 1


def truncated(path: Path, source: Path) -> Path:
    path.write_bytes(source.read_bytes()[:-4096])
    return path


def foreign(path: Path, architecture: str, *more: bytes) -> Path:
    """A complete file of another architecture; `more` are its further keys."""
    tensor, data = tensor_entry("x", (32,), 0, 0), bytes(128)
    keys = [pair_text("general.architecture", architecture), *more]
    path.write_bytes(gguf_bytes(keys, [tensor], data))
    return path


@pytest.fixture(scope="module")
def bad(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Command lines that cannot work, by what is wrong with them."""
    target, drafter = pair
    folder = tmp_path_factory.mktemp("bad")
    other = tiny_llama(folder / "other.gguf", vocab_size=352)
    text = folder / "text.gguf"
    text.write_text("this is no model at all")
    deep = write_pair_drafter(folder / "deep.gguf", target, taps=(0, 3))
    dflash, clip = foreign(folder / "dflash.gguf", "dflash"), foreign(folder / "clip.gguf", "clip")
    eagle3, tomorrow = (
        foreign(folder / "eagle3.gguf", "eagle3"),
        foreign(folder / "9.gguf", "llama9"),
    )
    layers = [pair_u32("qwen35.block_count", 4), pair_u32("qwen35.nextn_predict_layers", 1)]
    mtp = foreign(folder / "mtp.gguf", "qwen35", *layers)
    return {
        "missing target": arguments(folder / "gone.gguf", None, PROMPT),
        "missing drafter": arguments(target, folder / "gone.gguf", PROMPT),
        "folder as target": arguments(folder, None, PROMPT),
        "not a GGUF": arguments(text, None, PROMPT),
        "drafter is not a GGUF": arguments(target, text, PROMPT),
        "truncated target": arguments(truncated(folder / "t.gguf", target), None, PROMPT),
        "truncated drafter": arguments(target, truncated(folder / "d.gguf", drafter), PROMPT),
        "drafter as target": arguments(drafter, None, PROMPT),
        "target as drafter": arguments(target, target, PROMPT),
        "dflash as target": arguments(dflash, None, PROMPT),
        "dflash as drafter": arguments(target, dflash, PROMPT),
        "projector as target": arguments(clip, None, PROMPT),
        "projector as drafter": arguments(target, clip, PROMPT),
        "drafter of another target": arguments(other, drafter, PROMPT),
        "tap beyond the last layer": arguments(target, deep, PROMPT),
        "prompt longer than -c": arguments(target, drafter, "a" * 300),
        "-c beyond the window": arguments(target, drafter, "-c", "2049", PROMPT),
        "-c beyond all memory": arguments(target, drafter, "-c", "100000000", PROMPT),
        "EAGLE-3 as drafter": arguments(target, eagle3, PROMPT),
        "EAGLE-3 as target": arguments(eagle3, None, PROMPT),
        "MTP layers as drafter": arguments(target, mtp, PROMPT),
        "MTP layers as target": arguments(mtp, None, PROMPT),
        "an architecture of tomorrow": arguments(tomorrow, None, PROMPT),
        "empty prompt": arguments(target, drafter, ""),
    }


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("missing target", "gone.gguf does not exist"),
        ("missing drafter", "gone.gguf does not exist"),
        ("folder as target", "is a folder: name the .gguf file in it"),
        ("not a GGUF", "text.gguf is not a GGUF file"),
        ("drafter is not a GGUF", "text.gguf is not a GGUF file"),
        ("truncated target", "t.gguf cannot be loaded"),
        ("truncated drafter", "d.gguf is damaged"),
        ("drafter as target", "drafter.gguf is a DSpine drafter, not a target"),
        (
            "target as drafter",
            "target.gguf is no drafter that dspine runs: it is of architecture 'llama'",
        ),
        ("dflash as target", "dflash.gguf is a drafter of the DFlash family, not a target"),
        ("dflash as drafter", "dflash.gguf"),
        ("projector as target", "clip.gguf is a multimodal projector (mmproj), not a target"),
        (
            "projector as drafter",
            "clip.gguf is no drafter that dspine runs: it is a multimodal projector",
        ),
        ("drafter of another target", "vocabulary size is 320"),
        ("tap beyond the last layer", "layer 3"),
        ("prompt longer than -c", "the prompt has 300 tokens, the context has 256"),
        ("-c beyond the window", "2049 tokens is above the 2048"),
        ("-c beyond all memory", "100000000 tokens is above the 2048"),
        ("EAGLE-3 as drafter", "it is an EAGLE-3 drafter; name a file that"),
        ("EAGLE-3 as target", "eagle3.gguf is an EAGLE-3 drafter, not a target"),
        ("MTP layers as drafter", "it is a qwen35 model or its next-token (MTP) layers"),
        (
            "MTP layers as target",
            "mtp.gguf holds next-token (MTP) layers of a qwen35 model and not",
        ),
        ("an architecture of tomorrow", "architecture 'llama9', which this llama.cpp library does"),
        ("empty prompt", "the prompt is empty"),
    ],
)
def test_bad_input_is_one_sentence(
    bad: dict[str, list[str]], capsys: pytest.CaptureFixture[str], case: str, told: str
) -> None:
    assert run_cli(bad[case]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dspine: ")
    assert err.count("\n") == 1
    assert told in err
    # What is wrong, then what to do about it.
    assert ": " in err.removeprefix("dspine: ") or "; " in err


def test_a_closed_pipe_ends_quietly(pair: tuple[Path, Path]) -> None:
    started = subprocess.Popen(
        [*PROGRAM, *arguments(pair[0], None, "-n", "-1", "-c", "2048", "--no-probe", PROMPT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert started.stdout is not None and started.stderr is not None
    started.stdout.close()
    err = started.stderr.read()
    started.stderr.close()
    assert started.wait(timeout=300) == 1
    assert b"Traceback" not in err
    assert b"Exception ignored" not in err


@pytest.fixture
def doctor(pair: tuple[Path, Path]) -> list[str]:
    return ["doctor", "-m", str(pair[0]), "-md", str(pair[1]), "-t", "1", "-c", "512", "--json"]


def test_doctor_reports_library_rows_and_verdict(
    doctor: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, doctor)
    assert found["ok"] is True
    assert found["problems"] == []
    assert Path(found["library"]["path"]).is_dir()
    assert found["library"]["version"] == "0.3.36"
    assert found["probe"]["status"] == "ok"
    assert found["rows_ms"].keys() >= {"1", "2", "4", "8", "16"}
    assert all(ms > 0 for ms in found["rows_ms"].values())
    used = "on" if found["flash_attention"] else "off"
    assert found["rows_ms"] == found["rows_ms_by_flash_attention"][used]
    assert set(found["rows_ms_by_flash_attention"]) == {"on", "off"}
    assert found["measured_s"] > 0.0
    assert (found["n_ctx"], found["cache_types"]) == (512, ["f16", "f16"])
    assert found["speculation"]["verdict"]


def test_the_rows_that_doctor_shows_are_those_it_decided_from_and_are_kept(
    doctor: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    command = [*doctor, "--cache-dir", str(tmp_path)]
    for off, on in ((10.0, 20.0), (20.0, 10.0)):
        timed = {
            flash: {count: ms + count for count in calibrate.row_counts(16)}
            for flash, ms in ((False, off), (True, on))
        }
        monkeypatch.setattr(
            calibrate, "time_rows", lambda *_, rows=timed, **__: calibrate.RowTiming(rows)
        )
        monkeypatch.setattr(
            calibrate, "time_drafter", lambda *_, **__: calibrate.DraftTiming({2: 1.0, 4: 1.0})
        )
        found = document(capsys, command)
        assert found["flash_attention"] is (on < off)
        assert found["rows_ms"] == {str(count): ms for count, ms in timed[on < off].items()}
    (kept,) = (tmp_path / "calibration").glob("*.json")
    assert json.loads(kept.read_text())["rows_ms"]["on"] == found["rows_ms"]


def test_a_quantised_cache_without_flash_attention_is_refused_before_anything_is_measured(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    more = ("-ctv", "q8_0", "-fa", "off", "--cache-dir", str(tmp_path), PROMPT)
    assert run_cli(arguments(*pair, *more)) == 2
    err = capsys.readouterr().err
    assert err.startswith("dspine: the value cache is q8_0") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert run_cli(["doctor", "-m", str(pair[0]), "-ctv", "q8_0", "-fa", "off"]) == 2
    assert "problem      the value cache is q8_0" in capsys.readouterr().out


def test_doctor_for_people_ends_with_the_verdict(
    doctor: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(doctor[:-1]) == 0
    out = capsys.readouterr().out
    assert "<- used" in out
    assert "speculation" in out
    assert out.rstrip().endswith("all works")


def test_doctor_says_in_a_sentence_with_numbers_that_speculation_does_not_pay(
    doctor: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Where two rows cost twice as much as one, and a draft half of one."""
    rows = {on: {count: 10.0 * count for count in calibrate.row_counts(16)} for on in (False, True)}
    monkeypatch.setattr(calibrate, "time_rows", lambda *_, **__: calibrate.RowTiming(rows))
    monkeypatch.setattr(
        calibrate, "time_drafter", lambda *_, **__: calibrate.DraftTiming({2: 5.0, 4: 5.0})
    )
    assert run_cli([*doctor[:-1], "--cache-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    (told,) = [line for line in out if line.startswith("speculation")]
    # The file says 0.9 of each draft, 0.95 where the text suits it: 1 + 0.95 + 0.95^2 + 0.95^3.
    assert told == (
        "speculation  this drafter does not pay here: on text that suits it, its best width of 4 "
        "would give 3.71 tokens a step at the cost of 4.50 plain ones"
    )
    assert any(line.startswith("measured     in ") for line in out)


def test_doctor_says_what_usual_text_lacks_where_some_text_may_pay(
    doctor: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Four rows with a draft cost 3.6 of one: more than 3.44 tokens, less than 3.71."""
    rows = {on: {1: 10.0, 2: 24.0, 4: 35.0, 16: 200.0} for on in (False, True)}
    monkeypatch.setattr(calibrate, "time_rows", lambda *_, **__: calibrate.RowTiming(rows))
    monkeypatch.setattr(
        calibrate, "time_drafter", lambda *_, **__: calibrate.DraftTiming({2: 1.0, 4: 1.0})
    )
    found = document(capsys, [*doctor, "--cache-dir", str(tmp_path)])["speculation"]
    assert (found["pays"], found["width"]) == (False, 1)
    assert found["verdict"] == (
        "drafting does not pay here on usual text, where the best width of 4 would give 3.44 "
        "tokens a step at the cost of 3.60 plain ones; it is tried where a text suits the drafter "
        "better"
    )


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[ProbeResult]:
    """The probe finds what the test puts into the list."""
    results: list[ProbeResult] = []
    monkeypatch.setattr(probe_module, "probe", lambda *_, **__: results[0])
    return results


def test_doctor_tells_the_cure_of_a_build_that_needs_a_detour(
    doctor: list[str], broken: list[ProbeResult], capsys: pytest.CaptureFixture[str]
) -> None:
    broken.append(ProbeResult(True, use_extra_buffers=False, reason="it crashed", cure=CURE))
    assert run_cli(doctor) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert "-fno-tree-dse" in found["problems"][0]
    assert found["rows_ms"]


def test_doctor_survives_a_build_that_crashes(
    doctor: list[str], broken: list[ProbeResult], capsys: pytest.CaptureFixture[str]
) -> None:
    broken.append(ProbeResult(False, use_extra_buffers=False, reason="it crashed", cure=CURE))
    assert run_cli(doctor) == 3
    found = json.loads(capsys.readouterr().out)
    assert "it crashed" in found["problems"][0]
    assert "-fno-tree-dse" in found["problems"][0]
    assert found["rows_ms"] is None


def test_run_falls_back_and_says_so_once(
    pair: tuple[Path, Path], broken: list[ProbeResult], capsys: pytest.CaptureFixture[str]
) -> None:
    broken.append(ProbeResult(True, use_extra_buffers=False, reason="it crashed", cure=CURE))
    assert run_cli(arguments(pair[0], None, PROMPT)) == 0
    assert capsys.readouterr().err.count("it crashed") == 1


def test_doctor_without_a_library_is_a_problem_and_not_an_abort(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "doctor", "--json", "--library", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    found = json.loads(done.stdout)
    assert found["library"] is None
    assert str(tmp_path) in found["problems"][0]


def test_inspect_knows_both_files_of_a_pair(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    roles = [document(capsys, ["inspect", "--json", str(path)])["role"] for path in pair]
    assert roles == ["target", "drafter"]
    assert run_cli(["inspect", str(pair[1])]) == 0
    shown = capsys.readouterr().out
    assert "transfer_rank" in shown
    assert re.search(r"^  taps +0, 1$", shown, re.MULTILINE)
