"""The repository's own helpers: set-up decisions and docs checks."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from dspine.settings import SETTINGS
from tools import check_docs, flag_table, readme_table, result_tables, setup_env

PLACE = f"\n{readme_table.BEGIN}\n{readme_table.END}\n"
"""Where the README's table goes, before there is a result."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "docs" / "flags.md").write_text(flag_table.render())
    (tmp_path / "docs" / "kernels.md").write_text("# Linked from the flags\n")
    return tmp_path


def test_a_true_repository_has_no_problems(repository: Path) -> None:
    (repository / "README.md").write_text(
        "# Top\n\n## It's here, isn't it?\n"
        "[a](docs/flags.md) [b](#its-here-isnt-it) [c](docs/flags.md#speed) [d](https://x.y/z)\n"
        "`[no](link.md)`\n\n```console\n[neither](this.md)\n```\n" + PLACE
    )
    assert check_docs.problems(repository) == []


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("docs/gone.md", "leads to no file"),
        ("docs/flags.md#nowhere", "names no heading of flags.md"),
        ("#nowhere", "names no heading of README.md"),
        ("../", "leads out of the repository"),
    ],
)
def test_a_broken_link_is_told_with_its_page(repository: Path, link: str, told: str) -> None:
    (repository / "README.md").write_text(f"# Top\n\n[text]({link})\n{PLACE}")
    found = check_docs.problems(repository)
    assert len(found) == 1
    assert found[0].startswith("README.md: link")
    assert told in found[0]


MEMORY = {
    "cases": {
        "small": {"peak_mib": 345.2, "measured_mib": 351.4, "error": -0.0176},
        "large": {"peak_mib": 1650.0, "measured_mib": 1642.0, "error": 0.0049},
    }
}


def test_a_measured_table_is_that_of_its_result(repository: Path) -> None:
    results = repository / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "plan_memory.json").write_text(json.dumps(MEMORY))
    page = repository / "docs" / "planner.md"
    page.write_text("before\n<!-- table: plan-memory -->\nold\n<!-- /table -->\nafter\n")
    (repository / "README.md").write_text(PLACE)
    assert check_docs.problems(repository) == [
        "planner.md: a table differs from its result: run `make docs`"
    ]
    page.write_text(result_tables.rewritten(page.read_text(), results))
    assert page.read_text() == (
        "before\n<!-- table: plan-memory -->\n"
        "| MiB | predicted | measured | error |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| small | 345 | 351 | -1.8 % |\n"
        "| large | 1650 | 1642 | +0.5 % |\n"
        "<!-- /table -->\nafter\n"
    )
    assert check_docs.problems(repository) == []
    page.write_text("<!-- table: none-such -->\n<!-- /table -->\n")
    with pytest.raises(KeyError, match="none-such"):
        check_docs.problems(repository)


def test_every_table_has_its_place_and_its_result() -> None:
    root = result_tables.ROOT
    text = "".join(page.read_text() for page in (root / "docs").glob("*.md"))
    placed = [match[1] for match in result_tables.PLACE.findall(text)]
    assert sorted(placed) == sorted(result_tables.TABLES)
    for table in result_tables.TABLES.values():
        result = json.loads((root / "benchmarks/results" / f"{table.result}.json").read_text())
        rows = table.rows(result)
        assert len(rows) > 1 and {len(row) for row in rows} == {len(rows[0])}


def test_a_long_file_is_told(repository: Path) -> None:
    (repository / "src" / "good.py").write_text("x = 1\n" * 500)
    (repository / "src" / "long.py").write_text("x = 1\n" * 501)
    assert check_docs.problems(repository) == ["src/long.py: 501 lines, more than 500: split it"]


def test_an_outdated_flag_table_is_told(repository: Path) -> None:
    page = repository / "docs" / "flags.md"
    page.write_text(page.read_text().replace("512", "513"))
    assert check_docs.problems(repository) == [
        "flags.md differs from the settings: run `make docs`"
    ]
    page.unlink()
    assert check_docs.problems(repository) == ["flags.md is missing: run `make docs`"]


def test_the_speeds_in_the_readme_need_their_result(repository: Path) -> None:
    readme = repository / "README.md"
    readme.write_text("# Top\n")
    (told,) = check_docs.problems(repository)
    assert told.startswith("README.md has no table between")
    readme.write_text(f"# Top\n{readme_table.BEGIN}\n| typed by hand |\n{readme_table.END}\n")
    assert check_docs.problems(repository) == [
        "demo_pair.json is missing: run benchmarks/demo_pair.py"
    ]


def test_the_flag_table_shows_the_default_of_a_command_that_has_its_own() -> None:
    (row,) = [line for line in flag_table.render().split("\n") if line.startswith("| `-m` ")]
    assert "| the default target; convert: none; export: none |" in row


def test_the_flag_table_has_a_row_for_every_flag_and_variable() -> None:
    rows = [line for line in flag_table.render().split("\n") if line.startswith("| `")]
    assert len(rows) == len(SETTINGS)
    for setting, line in zip(
        sorted(SETTINGS, key=lambda s: s.flags), sorted(rows, key=first_flags), strict=True
    ):
        assert all(f"`{flag}`" in line for flag in setting.flags)
        assert setting.env is None or f"`{setting.env}`" in line


def first_flags(line: str) -> tuple[str, ...]:
    return tuple(part.strip("`") for part in line.split("|")[1].split() if part.startswith("`"))


@pytest.mark.parametrize(
    ("line", "stage"),
    [
        ("  Building wheel for llama-cpp-python (pyproject.toml): started", "llama.cpp: 0 %"),
        ("  [172/193] /usr/bin/g++ -c x.cpp", "llama.cpp: 89 %"),
        ("[193/193] Linking", "llama.cpp: 100 %"),
        ("[ 45%] Building CXX object", "llama.cpp: 45 %"),
        ("Collecting torch==2.13.0", "fetching torch"),
        ("Collecting click<9,>=8.1 (from dspine==0.1.0)", "fetching click"),
        ("Installing collected packages: torch, numpy", "unpacking packages"),
        ("  -- Installing: x", "before"),
        ("", "before"),
    ],
)
def test_the_stage_of_set_up_is_read_from_what_pip_says(line: str, stage: str) -> None:
    assert setup_env.stage_of(line, "before").removeprefix("compiling ") == stage


def test_compiling_is_announced_once_with_its_length(capsys: pytest.CaptureFixture[str]) -> None:
    script = "echo '[1/2] one'; echo '[2/2] two'"
    setup_env.run_with_progress(["sh", "-c", script], {"PATH": "/bin:/usr/bin"}, len)
    assert capsys.readouterr().out == "  compiling llama.cpp, about 4 minutes on 2 cores\n"


def test_a_failing_pip_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\necho no matching distribution\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(setup_env.SetupError, match=r"(?s)`pip install x` failed.*no matching"):
        setup_env.pip(tmp_path, ["install", "x"], tmp_path / "log")


def test_a_changed_pyproject_installs_again_and_an_equal_one_does_not() -> None:
    key = setup_env.stamp_key(b"one")
    assert key == setup_env.stamp_key(b"one")
    assert setup_env.is_ready("test", key, {"test": key})
    assert not setup_env.is_ready("test", setup_env.stamp_key(b"two"), {"test": key})


def test_the_test_environment_serves_the_demo_but_not_the_other_way() -> None:
    assert setup_env.is_ready("demo", "k", {"test": "k"})
    assert not setup_env.is_ready("test", "k", {"demo": "k"})


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_damaged_stamps_count_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "stamps").write_text(content)
    assert setup_env.read_stamps(tmp_path / "stamps") == {}


def test_the_engine_is_recognised_by_its_version(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "llama_cpp_python-0.3.35.dist-info").mkdir(parents=True)
    assert not setup_env.has_engine(tmp_path)
    (packages / "llama_cpp_python-0.3.36.dist-info").mkdir()
    assert setup_env.has_engine(tmp_path)


def test_a_missing_compiler_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(setup_env.SetupError, match=r"no C compiler found .*build-essential"):
        setup_env.require_compilers()


def test_build_output_is_kept_and_the_exit_code_returned() -> None:
    kept: list[str] = []
    command = ["sh", "-c", "echo '[1/2] one'; echo two >&2; exit 3"]
    assert setup_env.run_with_progress(command, {"PATH": "/bin:/usr/bin"}, kept.append) == 3
    assert sorted(kept) == ["[1/2] one\n", "two\n"]


def test_packages_are_fetched_without_the_engine_that_is_compiled_beside() -> None:
    demo, test = setup_env.requirements("demo"), setup_env.requirements("test")
    assert not [name for name in test if name.startswith("llama")]
    assert {name.partition(">")[0] for name in demo} >= {"numpy", "gguf"}
    assert "torch==2.13.0" in set(test) - set(demo)
    assert setup_env.ENGINE in (setup_env.ROOT / "pyproject.toml").read_text()


def test_the_first_error_stops_what_runs_beside_it() -> None:
    def fails(stop: threading.Event) -> None:
        raise setup_env.SetupError("no network")

    def compiles(stop: threading.Event) -> None:
        # A child of pip's, as a compiler is.
        command = ["sh", "-c", "sh -c 'sleep 60; echo late'; true"]
        setup_env.run_with_progress(command, {"PATH": "/bin:/usr/bin"}, len, stop)

    began = time.monotonic()
    with pytest.raises(setup_env.SetupError, match="no network"):
        setup_env.side_by_side(compiles, fails)
    assert time.monotonic() - began < 30


def test_a_compiled_engine_serves_the_next_environment_with_the_same_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPINE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    kept = setup_env.kept_engine()
    assert not setup_env.restored(tmp_path / "wheels")
    kept.mkdir(parents=True)
    (kept / "llama_cpp_python-0.3.36-py3-none-any.whl").write_bytes(b"wheel")
    assert setup_env.restored(tmp_path / "wheels")
    assert [wheel.read_bytes() for wheel in (tmp_path / "wheels").iterdir()] == [b"wheel"]
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=ON")
    assert setup_env.kept_engine() != kept
    assert setup_env.cmake_args().endswith(" -DGGML_CUDA=ON")


def test_durations_read_like_a_clock() -> None:
    assert setup_env.duration(7.4) == "7 s"
    assert setup_env.duration(318) == "5 min 18 s"
