"""Writes the tokenizer of a GGUF as `tokenizer.json`, for clients that count tokens themselves.

Byte-level BPE with the splitting rules that llama.cpp knows by name; the rules are those of the
models' own tokenizer.json files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspine.errors import FileError
from dspine.files.atomic import atomic_write
from dspine.files.gguf_file import GgufFile, MetadataValue

_CONTROL, _USER_DEFINED = 3, 4
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_MARKS}"
_LLAMA3 = rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}"
_QWEN35 = (
    rf"{_WORDS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS: Mapping[str, str] = {
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "llama3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "lfm2": _LLAMA3,
}
_GPT2_RULE = ("gpt-2", "smollm")
_COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen")
"""Their tokenizers compose characters (NFC) first."""
_WHOLE_WORDS_FIRST = ("llama3", "llama-bpe", "lfm2")
"""A word that is a token is not merged together from parts."""


def write_tokenizer(model: Path, path: Path, *, overwrite: bool = False) -> None:
    """Write `path` from the tokenizer of a GGUF. Raises FileError for kinds without a rule."""
    document = tokenizer_json(model, GgufFile(model).header.metadata)
    with atomic_write(path, overwrite=overwrite) as stream:
        stream.write(json.dumps(document, ensure_ascii=False, indent=1).encode() + b"\n")


def tokenizer_json(model: Path, metadata: Mapping[str, MetadataValue]) -> dict[str, Any]:
    """The document for Hugging Face's `tokenizers`. `model` names the file in errors."""
    kind, rule = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    known = (*_GPT2_RULE, *_PATTERNS)
    if kind != "gpt2" or rule not in known:
        raise FileError(
            f"{model} has a tokenizer of kind {kind!r} with rule {rule!r}: only byte-level BPE "
            f"(gpt2) with one of {', '.join(known)} can be exported"
        )
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not isinstance(tokens, tuple) or not isinstance(merges, tuple):
        raise FileError(
            f"{model} holds no tokens or no merges: its tokenizer is incomplete, name the model's "
            "complete file"
        )
    types = [int(number) for number in _numbers(metadata.get("tokenizer.ggml.token_type"))]
    types += [1] * (len(tokens) - len(types))
    added = [
        {
            "id": i,
            "content": str(text),
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[i] == _CONTROL,
        }
        for i, text in enumerate(tokens)
        if types[i] in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if rule in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _splitting(str(rule))},
        "post_processor": _begin_token(metadata, tokens),
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": rule in _WHOLE_WORDS_FIRST,
            "vocab": {str(text): i for i, text in enumerate(tokens)},
            "merges": [str(pair).split(" ", 1) for pair in merges],
        },
    }


def _splitting(rule: str) -> list[dict[str, Any]]:
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if rule in _GPT2_RULE:
        digits = [{"type": "Digits", "individual_digits": True}] if rule == "smollm" else []
        return [*digits, {**level, "use_regex": True}]
    pattern = {"Regex": _PATTERNS[rule]}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return [split, {**level, "use_regex": False}]


def _begin_token(metadata: Mapping[str, MetadataValue], tokens: tuple[Any, ...]) -> Any:
    """Where llama.cpp puts the begin token before a text, `tokenizers` does as well."""
    level = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": False,
        "use_regex": True,
    }
    number = metadata.get("tokenizer.ggml.bos_token_id")
    adds = metadata.get("tokenizer.ggml.add_bos_token", False)
    if not adds or not isinstance(number, int) or not 0 <= number < len(tokens):
        return level
    begin = str(tokens[number])
    first = {"SpecialToken": {"id": begin, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin: {"id": begin, "ids": [number], "tokens": [begin]}},
    }
    return {"type": "Sequence", "processors": [level, template]}


def _numbers(value: MetadataValue | None) -> list[Any]:
    return [] if value is None or isinstance(value, str | int | float | bool) else list(value)
