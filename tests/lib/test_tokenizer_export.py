"""The exported tokenizer against the library's own, token for token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from dspine.bench.prompts import TASK_SETS, named_tasks
from dspine.files.gguf_file import GgufFile
from dspine.files.tokenizer_export import tokenizer_json
from dspine.llama.model import Model

ODD = (
    "  leading and   many    blanks\n\n\nlines\t\ttabs\r\n",
    "numbers 1234567890 3.14159 1,000,000 ½ ² Ⅷ",
    "Grüße, naïve façade, Ελληνικά, русский, 漢字かな交じり, 한국어, العربية",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 ✨ and e\u0301 against é",
    "it's we'll I'M THEY'RE can't 'tis",
    "<|im_start|>user\nHello<|im_end|> <|not a token|>",
    "code: def f(x):\n    return {k: v for k, v in x.items() if v != 0}  # ok",
    "\u00a0\u2003\u200bodd blanks\u2028end",
)


def test_every_prompt_and_odd_text_has_the_same_tokens(default_target: Path) -> None:
    document = tokenizer_json(default_target, GgufFile(default_target).header.metadata)
    exported = Tokenizer.from_str(json.dumps(document))
    texts = [*ODD, *(str(prompt.prompt) for prompt in named_tasks(TASK_SETS, 60))]
    with Model.load(default_target) as model:
        for text in texts:
            own = model.tokenizer.encode(text, parse_special=True)
            assert exported.encode(text, add_special_tokens=False).ids == own, text[:80]


@pytest.mark.parametrize("text", ["", " ", "\n"])
def test_texts_of_nothing(default_target: Path, text: str) -> None:
    document = tokenizer_json(default_target, GgufFile(default_target).header.metadata)
    exported = Tokenizer.from_str(json.dumps(document))
    with Model.load(default_target) as model:
        assert exported.encode(text).ids == model.tokenizer.encode(text)
