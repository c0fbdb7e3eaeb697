"""Models of the hub: names, the choice among files, download, cache, and what goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dspine.cli.main import run_cli
from dspine.errors import FileError, UsageError
from dspine.files.hub import HubName, choose_file, fetch, local_file, parse_path, parse_repo
from tests.support.fake_hub import FakeHub, fake_hub

pytest.importorskip("huggingface_hub")

FILES = {
    "me/model-GGUF": {
        "README.md": b"words",
        "mmproj-model-Q4_K_M.gguf": b"projector",
        "model-Q2_K.gguf": b"two",
        "model-Q4_K_M.gguf": b"four",
        "model-Q8_0.gguf": b"eight",
    },
    "me/split": {
        "big/m-Q4_K_M-00001-of-00002.gguf": b"first",
        "big/m-Q4_K_M-00002-of-00002.gguf": b"second",
    },
    "me/both": {
        "model.Q4_K_M.gguf": b"target",
        "model-dspine-q4_k_m.gguf": b"drafter",
        "model-dspine-q4_k_m.ngram.npz": b"table",
    },
    "me/empty": {"README.md": b"words"},
    "them/gated": {},
    "them/broken": {"x-Q4_K_M.gguf": bytes(100_000)},
}

CHILD = """
import json, sys
from pathlib import Path
from dspine.errors import DspineError
from dspine.files.hub import fetch, local_file, parse_repo
answers = []
for name, drafter in json.loads(sys.argv[1]):
    try:
        path = local_file(Path("hf:" + name), drafter=drafter)
        answers.append([str(path), path.read_text()])
    except DspineError as error:
        answers.append([type(error).__name__, str(error)])
print(json.dumps(answers))
"""


def ask(
    url: str, home: Path, *names: str, drafter: bool = False, **variables: str
) -> list[list[str]]:
    """[path, text] or [error, sentence] of each name; huggingface_hub reads its variables once."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(home), **variables}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "*"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps([[name, drafter] for name in names])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[list[str]] = json.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub(FILES) as made:
        yield made


def test_names() -> None:
    assert parse_repo("me/model-GGUF") == HubName("me/model-GGUF")
    assert parse_repo("me/m:Q8_0") == HubName("me/m", "Q8_0")
    assert parse_repo("me/m", "a.gguf") == HubName("me/m", file="a.gguf")
    assert parse_path("hf:me/m/sub/a.gguf") == HubName("me/m", file="sub/a.gguf")
    assert parse_path(Path("hf:me/m:Q8_0")) == HubName("me/m", "Q8_0")
    assert parse_path("me/m/a.gguf") is None
    assert local_file(Path("a.gguf")) == Path("a.gguf")
    for wrong in ("model", "a/b/c", "a/", "/b", "a/b:", "a/b:c:d", "a b/c", "../x", "a/b:c/d"):
        with pytest.raises(UsageError, match="names no hub repository"):
            parse_repo(wrong)
    for wrong in ("hf:a/b/c.bin", "hf:a/b/../c.gguf", "hf:a b/c/d.gguf"):
        with pytest.raises(UsageError, match="names no file of the hub"):
            parse_path(wrong)
    with pytest.raises(UsageError, match="leave one of them out"):
        parse_repo("a/b:Q8_0", "c.gguf")


@pytest.mark.parametrize(
    ("repo", "tag", "drafter", "expected"),
    [
        ("me/model-GGUF", "", False, "model-Q4_K_M.gguf"),
        ("me/model-GGUF", "q8_0", False, "model-Q8_0.gguf"),
        ("me/split", "", False, "big/m-Q4_K_M-00001-of-00002.gguf"),
        ("me/both", "", False, "model.Q4_K_M.gguf"),
        ("me/both", "", True, "model-dspine-q4_k_m.gguf"),
    ],
)
def test_the_quant_picks_the_file(repo: str, tag: str, drafter: bool, expected: str) -> None:
    found = choose_file(HubName(repo, tag), sorted(FILES[repo]), drafter=drafter)
    assert found == expected


def test_drafters_of_the_family() -> None:
    files = ["dflash-m-Q4_K_M.gguf", "dflash-m-Q8_0.gguf", "dspark-m.gguf", "m-Q8_0.gguf"]
    name = HubName("a/b")
    assert choose_file(name, files) == "m-Q8_0.gguf"
    assert choose_file(name, files, drafter=True) == "dflash-m-Q4_K_M.gguf"
    assert choose_file(HubName("a/b", "Q8_0"), files, drafter=True) == "dflash-m-Q8_0.gguf"
    with_ours = [*files, "m-dspine-Q6_K.gguf"]
    assert choose_file(name, with_ours, drafter=True) == "m-dspine-Q6_K.gguf"
    assert choose_file(name, with_ours) == "m-Q8_0.gguf"
    # A repository of drafters alone does not say so in every name.
    assert choose_file(name, ["x-Q8_0.gguf"], drafter=True) == "x-Q8_0.gguf"


def test_order_of_the_defaults() -> None:
    name = HubName("a/b")
    assert choose_file(name, ["x-F16.gguf", "x-Q8_0.gguf"]) == "x-Q8_0.gguf"
    assert choose_file(name, ["imatrix.gguf", "x-F16.gguf", "y.gguf"]) == "x-F16.gguf"
    with pytest.raises(FileError, match=r"no GGUF of quant Q3_K, only x-F16\.gguf"):
        choose_file(HubName("a/b", "Q3_K"), ["x-F16.gguf"])
    with pytest.raises(FileError, match="no GGUF model: name another"):
        choose_file(name, ["README.md", "x-Q4_K_M-00002-of-00002.gguf"])


def test_downloads_and_the_shared_cache(hub: FakeHub, tmp_path: Path) -> None:
    names = ("me/model-GGUF", "me/model-GGUF/MODEL-Q2_K.gguf", "me/split")
    got = ask(hub.url, tmp_path, *names)
    assert [text for _, text in got] == ["four", "two", "first"]
    assert all(Path(path).is_relative_to(tmp_path / "hub") for path, _ in got)
    assert Path(got[2][0]).with_name("m-Q4_K_M-00002-of-00002.gguf").read_text() == "second"
    # A second time the list is asked for, and no file is sent.
    hub.asked.clear()
    assert ask(hub.url, tmp_path, "me/model-GGUF") == got[:1]
    assert [path for method, path in hub.asked if method == "GET" and "/resolve/" in path] == []
    # Offline the cache alone answers; the newest choice among what is there.
    hub.asked.clear()
    offline = ask(hub.url, tmp_path, *names, "me/model-GGUF:Q8_0", "me/both", HF_HUB_OFFLINE="1")
    assert offline[:3] == got
    told = "HF_HUB_OFFLINE is set, and in the cache me/model-GGUF has no GGUF of quant Q8_0, only "
    assert offline[3][1].startswith(told)
    assert "me/both is not in the hub's cache and HF_HUB_OFFLINE is set" in offline[4][1]
    assert "name it with -m" in offline[4][1]
    assert hub.asked == []


def test_a_drafter_brings_its_table(hub: FakeHub, tmp_path: Path) -> None:
    [(path, content)] = ask(hub.url, tmp_path, "me/both", drafter=True)
    assert content == "drafter"
    assert Path(path).with_suffix(".ngram.npz").read_text() == "table"


def test_what_cannot_be_had_is_one_sentence(hub: FakeHub, tmp_path: Path) -> None:
    names = ("me/none", "me/model-GGUF/other.gguf", "me/empty", "them/gated")
    got = ask(hub.url, tmp_path, *names)
    assert [kind for kind, _ in got] == ["FileError"] * 4
    for (_, told), words in zip(
        got,
        (
            "no repository me/none",
            "has no file other.gguf, only model-Q2_K.gguf, model-Q4_K_M.gguf, model-Q8_0.gguf:",
            "no GGUF model",
            "asks for an agreement",
        ),
        strict=True,
    ):
        assert words in told
        assert "\n" not in told


def test_a_download_that_breaks_off_or_cannot_be_kept(hub: FakeHub, tmp_path: Path) -> None:
    [(kind, told)] = ask(hub.url, tmp_path, "them/broken")
    assert kind == "FileError"
    assert f"{hub.url} broke off while them/broken was on its way: run the same command" in told
    assert not list((tmp_path / "hub" / "models--them--broken").rglob("*.gguf"))
    (tmp_path / "file").write_text("")
    [(kind, told)] = ask(hub.url, tmp_path / "file", "me/both")
    assert kind == "FileError"
    assert "part of its path is a file" in told
    assert "HF_HUB_CACHE names another place" in told


def test_without_network_the_cache_or_a_file_is_named(hub: FakeHub, tmp_path: Path) -> None:
    before = ask(hub.url, tmp_path, "me/model-GGUF")
    nowhere = "http://127.0.0.1:9"
    after, (kind, told) = ask(nowhere, tmp_path, "me/model-GGUF", "me/both")
    assert after == before[0]
    assert kind == "FileError"
    assert f"{nowhere} is not reachable" in told
    assert "name it with -m" in told


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install 'dspine\[hub\]'.*name it with -m"):
        fetch(HubName("me/m"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-m", "a.gguf", "-hf", "a/b"], "--model and --hf-repo exclude each other"),
        (["-hff", "a.gguf"], "--hf-file needs --hf-repo"),
        (["-hf", "nonsense"], "names no hub repository"),
        (["-md", "a.gguf", "-hfd", "a/b"], "--model-draft and --hf-repo-draft exclude"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", *arguments, "hello"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [["inspect"], ["convert", "OUT"], ["quantize", "OUT"], ["export", "OUT"]],
    ids=lambda c: c[0],
)
def test_file_commands_know_the_hub(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """They ask for the file; without the package the sentence says what to do."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    rest = [str(tmp_path / part) for part in command[1:]]
    assert run_cli([command[0], "hf:me/m:Q8_0", *rest]) == 2
    assert "name it with -m" in capsys.readouterr().err
