"""tokenizer.json from a GGUF's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from dspine.cli.main import run_cli
from dspine.errors import FileError
from dspine.files.tokenizer_export import tokenizer_json


def metadata(**more: Any) -> dict[str, Any]:
    """Single bytes, the merge of " a", and a control token."""
    letters = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = ("<s>", *letters, "Ġa", "ab")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": ("Ġ a", "a b"),
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


def tokenizer(**more: Any) -> Any:
    return Tokenizer.from_str(json.dumps(tokenizer_json(Path("m.gguf"), metadata(**more))))


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "qwen2", "qwen35", "llama-bpe"])
def test_every_rule_makes_a_tokenizer_that_reads_its_own_text(rule: str) -> None:
    made = tokenizer(pre=rule)
    text = "it's ab 123, <s> a"
    encoded = made.encode(text, add_special_tokens=False)
    assert made.decode(encoded.ids, skip_special_tokens=False) == text
    assert "<s>" in encoded.tokens and "Ġa" in encoded.tokens


def test_the_begin_token_comes_where_the_model_wants_it() -> None:
    with_begin = tokenizer(bos_token_id=0, add_bos_token=True)
    assert with_begin.encode("ab").tokens == ["<s>", "ab"]
    assert tokenizer(bos_token_id=0, add_bos_token=False).encode("ab").tokens == ["ab"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": "llama"}, "kind 'llama'"),
        ({"pre": "poro-chat"}, "rule 'poro-chat'"),
        ({"tokens": None}, "is incomplete"),
        ({"merges": 5}, "is incomplete"),
    ],
)
def test_other_kinds_are_refused_with_what_is_possible(more: dict[str, Any], words: str) -> None:
    with pytest.raises(FileError, match=words):
        tokenizer_json(Path("m.gguf"), metadata(**more))


def test_the_command_never_overwrites_unasked(
    tmp_path: Path, default_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tokenizer.json"
    command = ["tokenizer", "export", "-m", str(default_target), "-o", str(tmp_path)]
    path.write_text("mine")
    assert run_cli(command) == 2
    assert path.read_text() == "mine" and "exists already" in capsys.readouterr().err
    assert run_cli([*command, "--force"]) == 0
    assert json.loads(path.read_text())["model"]["type"] == "BPE"
