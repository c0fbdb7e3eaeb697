"""`dspine plan`: what it prints, its JSON, and its complaints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspine.cli.main import run_cli
from dspine.cli.plan_table import listed, wrapped
from dspine.cli.planning import machine_kernels
from dspine.machine import cpu_flags
from dspine.plan.packing import stock_kernels
from dspine.plan.presets import published_for
from tests.support.tiny_models import tiny_llama

CARD = ("plan", "--preset", "qwen3.8-27b", "--vram", "24G", "-ctk", "q8_0", "-ctv", "q8_0")


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_cli(list(arguments)) == 0
    return capsys.readouterr().out


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run_cli(["plan", *arguments]) == 2
    found = capsys.readouterr().err
    assert found.startswith("dspine: ") and found.count("\n") == 1
    return found


def test_the_table_of_a_card_fits_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, *CARD).splitlines()
    assert max(len(line) for line in lines) <= 100
    rows = {
        line[:29].strip(): line.split()[-1] for line in lines if line.endswith(tuple("0123456789"))
    }
    assert rows["DSpine, 15 drafts, snapshots"] == "64,000"
    assert rows["DSpine, 15 drafts, checkpoint"] == "125,440"
    assert any("24.00 GiB" in line and "1024 MiB" in line for line in lines)
    assert any("--rollback checkpoint" in line and "125,440" in line for line in lines)


def test_json_has_every_item(capsys: pytest.CaptureFixture[str]) -> None:
    memory = json.loads(output(capsys, *CARD, "--json", "-c", "32768"))["memory"]
    assert memory["target"]["state_bytes"] == 156_893_184
    for row in memory["rows"]:
        assert row["planned_context"] == 32768 and row["fits"]
        for device in ("gpu", "cpu"):
            items = [i["n_bytes"] for i in row["items"] if i["device"] == device]
            assert sum(items) == row[f"{device}_bytes"]
        assert row["gpu_bytes"] <= memory["budget"]["gpu"]


def test_a_file_is_planned_without_a_card(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    text = output(capsys, "plan", "-m", str(path), "--ram", "2G", "-np", "2")
    assert "m.gguf: 0.00 B parameters" in text
    assert "2 slots" in text and "main memory 2.00 GiB" in text
    assert "2,048 tokens are what the target was trained for" in text


def test_a_context_that_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *CARD, "-c", "131072")
    assert "DSpine, 15 drafts, snapshots: 131,072 tokens do not fit." in text
    assert "plain: 131,072" not in text


def test_speed_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tasks = tmp_path / "a.json"
    tasks.write_text('{"code": 7.66, "prose": 2.53}')
    text = output(capsys, "plan", "--device", "rtx-3090", "--acceptance", str(tasks))
    code = next(line for line in text.splitlines() if line.startswith("code")).split()
    assert code == ["code", "16", "7.66", "59.5", "128.7", "4.57", "128.7"]
    assert "target" not in text and "it pays from 1.68 tokens a step" in text
    assert "Widths 2 to 15 may be faster" in " ".join(text.split())
    document = json.loads(
        output(capsys, "plan", "--device", "rtx-3090", "--acceptance", str(tasks), "--json")
    )
    widths = document["speed"]["tasks"][0]["widths"]
    assert widths[-1]["known"] and widths[-1]["tokens_per_second"] == pytest.approx(
        128.74, abs=0.01
    )
    assert not widths[7]["known"] and len(widths[7]["tokens_per_second"]) == 2


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "plan", "--preset", "list")
    assert "qwen3.8-27b-dspine" in text and "config.json" in text


def test_what_cannot_be_planned_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / "x.gguf"
    broken.write_bytes(b"not a model")
    tasks = tmp_path / "a.json"
    tasks.write_text('{"code": 2.0}')
    dense = str(tiny_llama(tmp_path / "m.gguf"))
    for arguments, expected in (
        (("--preset", "qwen4"), "choose one of qwen3.8-27b"),
        (("--preset", "qwen3-8b", "--quant", "Q9"), "--quant is 'Q9'"),
        (("--preset", "qwen3-8b", "--vram", "24X"), "--vram is '24X'"),
        (("--preset", "qwen3.8-27b", "--vram", "8G"), "needs"),
        (("-m", str(broken)), "is not a GGUF file"),
        (("-m", dense, "--preset", "qwen3-8b"), "exclude each other"),
        (("-m", dense, "--preset-draft", "qwen3-8b-dspine"), "reads layers of 4096"),
        (("-m", dense, "-c", "9999"), "above the 2048 tokens"),
        (("-m", dense, "--draft-device", "gpu"), "--vram"),
        (("--acceptance", str(tasks)), "--device"),
        (("--device", "gtx"), "--device is 'gtx'"),
    ):
        assert expected in complaint(capsys, *arguments), arguments


def test_kernels_can_be_switched_off() -> None:
    assert machine_kernels({"DSPINE_KERNELS": "off"}) == stock_kernels(cpu_flags())


def test_runs_of_numbers_and_long_lines() -> None:
    assert listed([2, 3, 4, 8, 10, 11]) == "2 to 4, 8, 10 to 11"
    lines = list(wrapped("name  ", "word " * 40, 40))
    assert all(len(line) <= 40 for line in lines)
    assert lines[1].startswith("      word")


def test_published_drafters_of_a_targets_sizes() -> None:
    found = published_for("qwen35", 5120, 64, 248320)
    assert [name.partition(" ")[0] for name in found] == [
        "qwen3.8-27b-dflash2",
        "qwen3.8-27b-dspine",
    ]
    assert "tencent/Qwen3.8-27B-DSpine-b16" in found[1]
    assert published_for("qwen35", 5120, 65, 248320) == ()


def test_inspecting_a_target_tells_of_drafters_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_llama(tmp_path / "t.gguf")
    assert run_cli(["inspect", str(target), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["dspine"]["drafters"]
    assert told == ["none known for these sizes: `dspine train` makes one"]
