"""The systemd unit and the compose file of docs/server.md: commands, variables, times."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dspine.cli.options import Options
from dspine.cli.serve import command
from dspine.server.running import LAST_WORDS_SECONDS
from dspine.settings import settings_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
SETTINGS = {str(setting.env): setting for setting in settings_of("serve")}
OTHERS = {"PIP_CACHE_DIR"}
yaml = pytest.importorskip("yaml")


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def unit() -> list[tuple[str, str]]:
    """Key and value of every line; a key may occur several times."""
    lines = [line.partition("=") for line in block("ini").splitlines() if "=" in line]
    return [(key, value) for key, _, value in lines]


def compose() -> dict[str, Any]:
    (service,) = yaml.safe_load(block("yaml"))["services"].values()
    assert isinstance(service, dict)
    return service


def options_of(words: Sequence[str], variables: Mapping[str, str]) -> Options:
    """What `dspine serve` reads from this command line and these variables; all must exist."""
    assert {*variables} <= {*SETTINGS, *OTHERS}
    values = {
        setting.name: setting.parse(variables[name], name)
        for name, setting in SETTINGS.items()
        if name in variables
    }
    parsed = command.make_context("serve", [*words]).params
    return Options({**parsed, **values})


def test_the_unit_starts_a_server_that_ends_in_time() -> None:
    found = dict(unit())
    program, name, *words = shlex.split(found["ExecStart"])
    assert program.startswith("/") and Path(program).name == "dspine" and name == "serve"
    variables = dict(value.split("=", 1) for key, value in unit() if key == "Environment")
    options = options_of(words, variables)
    assert options.switch("warmup") and options.number("port") == 8080
    assert variables["DSPINE_CACHE_DIR"] == f"/var/cache/{found['CacheDirectory']}"
    assert int(found["TimeoutStopSec"]) > options.number("drain") + LAST_WORDS_SECONDS
    assert found["Restart"] == "on-failure"


def test_the_compose_file_installs_and_starts_a_server_that_hears_the_stop() -> None:
    service = compose()
    shell, flag, script = shlex.split(service["command"])
    assert (shell, flag) == ("sh", "-c")
    subprocess.run(["sh", "-n", "-c", script], check=True)
    install, _, start = script.partition("&&")
    assert install.split()[:2] == ["pip", "install"]
    extra = re.findall(r"dspine\[(\w+)\]", install)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extra and {*extra} <= {*project["optional-dependencies"]}
    first, program, name, *words = start.split()
    assert [first, program, name] == ["exec", "dspine", "serve"]
    options = options_of(words, service["environment"])
    assert options.choice("host") == "0.0.0.0"
    assert options.text("api_key"), "whoever opens it to others wants a key"
    assert [port.rpartition(":")[2] for port in service["ports"]] == [str(options.number("port"))]
    seconds = int(service["stop_grace_period"].removesuffix("s"))
    assert seconds > options.number("drain") + LAST_WORDS_SECONDS
    mounted = {volume.split(":")[1] for volume in service["volumes"]}
    for path in (options.path("model"), options.path("model_draft"), options.path("cache_dir")):
        assert path is not None and f"/{path.parts[1]}" in mounted


def test_the_image_has_a_python_that_the_package_runs_on() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = compose()["image"].removeprefix("python:")
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
