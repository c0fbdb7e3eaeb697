"""What is this file? Facts of any GGUF, safetensors file or checkpoint folder, as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from dspine.architectures import NOT_TARGETS
from dspine.errors import FileError
from dspine.files import foreign, verdict
from dspine.files.checkpoint import CONFIG_FILE, read_checkpoint
from dspine.files.checkpoint_config import ARCHITECTURE_NAME, ARCHITECTURES, RELATIVES
from dspine.files.drafter_file import read_drafter
from dspine.files.gguf_file import GgufHeader, MetadataValue, is_gguf, read_header, split_files
from dspine.files.groups import by_group
from dspine.files.pairing import describe_target, metadata_text
from dspine.files.run_folder import choose_checkpoint
from dspine.files.safetensors_file import SafeTensor, read_safetensors
from dspine.files.schema import (
    ARCHITECTURE,
    DFLASH_ARCHITECTURE,
    VARIATIONS,
    DrafterConfig,
    Pair,
    TrainingRecord,
)

Facts = dict[str, object]

_GEOMETRY_KEYS = (
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.sliding_window",
    "rope.freq_base",
    "expert_count",
    "expert_used_count",
)

_RECURRENT = ("ssm", "wkv", "shortconv", "kda", "token_shift")
"""Beginnings of keys that only recurrent layers have."""


def inspect_path(path: Path) -> Facts:
    """Facts about a file or checkpoint folder, ready for JSON or a table.

    Always present: path, format, kind (a short name), role ("drafter", "target" or "other"),
    note (one sentence), tensors. Depending on the kind: geometry, pair, training, tokenizer,
    dspine (what dspine does with it) and foreign (names that could be mapped to ours).
    Raises FileError when it is none of these formats, or damaged.
    """
    if path.is_dir():
        return _folder_facts(choose_checkpoint(path))
    if path.suffix == ".safetensors" and not is_gguf(path):
        return _safetensors_facts(path)
    header = read_header(path)
    if header.architecture in (ARCHITECTURE, DFLASH_ARCHITECTURE):
        return _drafter_facts(path, header)
    return _foreign_facts(path, header) or _target_facts(path, header)


def _drafter_facts(path: Path, header: GgufHeader) -> Facts:
    try:
        drafter = read_drafter(path)
    except FileError as error:
        return _refused_drafter(path, header, error)
    pair, kind = drafter.pair, f"{drafter.config.kind} drafter"
    note = f"Drafts for {pair.name}." if pair else "It does not say which target it is for."
    tensors = _gguf_tensors([header])
    return {
        **_base(path, "gguf", kind, "drafter", note),
        "name": metadata_text(header, "general.name"),
        "architecture": header.architecture,
        "dspine": verdict.of_drafter(
            path, drafter.config, pair, drafter.record, _types(tensors), folder=False
        ),
        "geometry": _geometry(drafter.config),
        "pair": _pair(pair) if pair else None,
        "training": _training(drafter.record),
        "tensors": tensors,
    }


def _pair(pair: Pair) -> Facts:
    """What a drafter says of its target; of the sketch the tensors."""
    facts = {f.name: getattr(pair, f.name) for f in fields(pair)}
    return {**facts, "sketch": list(pair.sketch.names) if pair.sketch else None}


def _refused_drafter(path: Path, header: GgufHeader, error: FileError) -> Facts:
    """A drafter that dspine cannot run: relatives, damaged files and foreign layouts."""
    facts = _foreign_facts(path, header) if header.architecture != ARCHITECTURE else None
    if facts is None:
        facts = {
            **_base(path, "gguf", "DSpine drafter", "other", ""),
            "name": metadata_text(header, "general.name"),
            "architecture": header.architecture,
            "geometry": _known_keys(header),
            "tensors": _gguf_tensors([header]),
        }
    facts = {**facts, "note": f"{error}.", "dspine": verdict.refused(error)}
    if header.architecture == ARCHITECTURE or foreign.is_like_dspine(header.tensors):
        facts["foreign"] = _foreign_names(header)
    return facts


def _foreign_names(header: GgufHeader) -> Facts:
    shapes = {name: info.shape for name, info in header.tensors.items()}
    return {"tensors": foreign.tensor_table(shapes), "keys": foreign.key_table(header)}


def _folder_facts(path: Path) -> Facts:
    names = _folder_architectures(path)
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        kind = next((RELATIVES[n][0].partition(" ")[2] for n in names if n in RELATIVES), "")
        note = (
            f"{kind} in Hugging Face's layout, which dspine does not run."
            if kind
            else f"Hugging Face folder of {', '.join(names) or 'an unnamed model'}; a target must "
            f"be converted to GGUF first."
        )
        return {
            **_base(path, "safetensors", kind or "model folder", "other", note),
            "architecture": ", ".join(names),
            "tensors": _safetensors_summary(_stored(path)),
        }
    try:
        checkpoint = read_checkpoint(path)
    except FileError as error:
        return _refused_folder(path, names, error)
    dtypes = {"uint16": "BF16", "float16": "F16", "float32": "F32"}
    pair = checkpoint.pair
    note = (
        f"Drafts for {pair.name}; convert it to GGUF to run it."
        if pair
        else "It does not say which target it is for; name the target to convert it to GGUF."
    )
    tensors = _summary(
        (name, dtypes[array.dtype.name], array.size, array.nbytes)
        for name, array in checkpoint.tensors.items()
    )
    return {
        **_base(path, "safetensors", f"{checkpoint.config.kind} checkpoint", "drafter", note),
        "architecture": ", ".join(names),
        "dspine": verdict.of_drafter(
            path, checkpoint.config, pair, checkpoint.record, _types(tensors), folder=True
        ),
        "geometry": _geometry(checkpoint.config),
        "pair": _pair(pair) if pair else None,
        "training": _training(checkpoint.record),
        "tensors": tensors,
    }


def _refused_folder(path: Path, names: list[str], error: FileError) -> Facts:
    """A folder that says it is a drafter and cannot be read as one."""
    tensors = _stored(path)
    return {
        **_base(path, "safetensors", "drafter folder", "other", f"{error}."),
        "architecture": ", ".join(names),
        "tensors": _safetensors_summary(tensors),
        "dspine": verdict.refused(error),
        "foreign": {"tensors": foreign.tensor_table(_shapes(tensors))},
    }


def _stored(path: Path) -> dict[str, SafeTensor]:
    """All tensors of a folder's safetensors files."""
    found: dict[str, SafeTensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= read_safetensors(file).tensors
    return found


def _safetensors_summary(tensors: Mapping[str, SafeTensor]) -> Facts:
    return _summary((n, t.dtype, t.data.size, t.data.nbytes) for n, t in tensors.items())


def _safetensors_facts(path: Path) -> Facts:
    file = read_safetensors(path)
    note = "Tensors only; a drafter is a folder with config.json, so name the folder."
    return {
        **_base(path, "safetensors", "safetensors file", "other", note),
        "metadata": dict(file.metadata),
        "tensors": _safetensors_summary(file.tensors),
        **(
            {"foreign": {"tensors": foreign.tensor_table(_shapes(file.tensors))}}
            if foreign.is_like_dspine(file.tensors)
            else {}
        ),
    }


def _shapes(tensors: Mapping[str, SafeTensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _foreign_facts(path: Path, header: GgufHeader) -> Facts | None:
    """Facts of files that accompany a model; None for a language model."""
    architecture = header.architecture
    kind, note = "", ""
    if architecture == "dflash":
        kind = _dflash_kind(header)
        note = f"{kind} in llama.cpp's format; it does not record which target it is for."
    elif architecture == "eagle3":
        kind, note = "EAGLE-3 drafter", "EAGLE-3 drafter in llama.cpp's format; use llama.cpp."
    elif architecture in NOT_TARGETS:
        kind = NOT_TARGETS[architecture].removeprefix("a ")
        note = f"This is {NOT_TARGETS[architecture]}, neither a target nor a DSpine drafter."
    elif metadata_text(header, "general.type") in ("adapter", "imatrix", "mmproj"):
        kind = metadata_text(header, "general.type")
        note = f"This is an {kind} file for {architecture or 'a model'}, not a model."
    elif _mtp_layers(header) and _mtp_layers(header) == _number(header, "block_count"):
        kind = "MTP heads"
        note = f"Next-token (MTP) layers of a {architecture} model, without the model itself."
    elif not architecture:
        kind, note = "GGUF without architecture", "It does not say what it is."
    if not kind and foreign.is_like_dspine(header.tensors):
        kind = "drafter of a foreign layout"
        note = "Its tensors are named like those of a DSpine drafter, in another program's layout."
        facts = _other_facts(path, header, kind, note)
        return {**facts, "dspine": verdict.refused(note), "foreign": _foreign_names(header)}
    return _other_facts(path, header, kind, note) if kind else None


def _other_facts(path: Path, header: GgufHeader, kind: str, note: str) -> Facts:
    architecture = header.architecture
    return {
        **_base(path, "gguf", kind, "other", note),
        "name": metadata_text(header, "general.name"),
        "architecture": architecture,
        "geometry": _known_keys(header),
        "tensors": _gguf_tensors([header]),
    }


def _target_facts(path: Path, header: GgufHeader) -> Facts:
    pair = describe_target(path)
    parts = [header, *(read_header(part) for part in split_files(path)[1:])]
    mtp = _mtp_layers(header)
    hybrid = any(
        key.startswith(f"{header.architecture}.{part}.")
        for key in header.metadata
        for part in _RECURRENT
    )
    note = "Language model, usable as a target."
    if mtp:
        note += f" Its {mtp} built-in next-token (MTP) layers are not used."
    return {
        **_base(path, "gguf", "language model", "target", note),
        "name": pair.name,
        "architecture": pair.architecture,
        "geometry": {"layers": pair.num_layers, **_known_keys(header), "recurrent": hybrid},
        "pair": {
            "vocab_size": pair.vocab_size,
            "vocab_hash": pair.vocab_hash,
            "fingerprint": pair.fingerprint,
            "sketch": list(pair.sketch.names) if pair.sketch else None,
        },
        "tokenizer": _tokenizer(header),
        "files": len(parts),
        "tensors": _gguf_tensors(parts),
    }


def _base(path: Path, form: str, kind: str, role: str, note: str) -> Facts:
    return {"path": str(path), "format": form, "kind": kind, "role": role, "note": note}


def _geometry(config: DrafterConfig) -> Facts:
    facts: Facts = asdict(config)
    facts["taps"] = list(config.taps)
    facts["windows"] = list(config.windows)
    facts["causal"] = list(config.causal)
    facts["sink_layers"] = list(config.sink_layers)
    return {k: v for k, v in facts.items() if k not in VARIATIONS or k in config.variations}


def _training(record: TrainingRecord) -> Facts:
    return {
        "acceptance_curve": list(record.acceptance_curve),
        "provenance": dict(record.provenance),
    }


def _gguf_tensors(headers: Iterable[GgufHeader]) -> Facts:
    return _summary(
        (name, info.type.name.upper(), info.n_elements, info.n_bytes)
        for header in headers
        for name, info in header.tensors.items()
    )


def _summary(entries: Iterable[tuple[str, str, int, int]]) -> Facts:
    """Count, parameters and bytes of (name, type, values, bytes) entries: in total, by type and
    by part of the model."""
    listed = [(name, kind, int(values), int(n_bytes)) for name, kind, values, n_bytes in entries]
    by_type: dict[str, dict[str, int]] = {}
    for _, kind, values, n_bytes in listed:
        row = by_type.setdefault(kind, {"count": 0, "parameters": 0, "bytes": 0})
        row["count"] += 1
        row["parameters"] += values
        row["bytes"] += n_bytes
    total = {
        key: sum(row[key] for row in by_type.values()) for key in ("count", "parameters", "bytes")
    }
    largest_first = sorted(by_type.items(), key=lambda item: -item[1]["bytes"])
    return {**total, "by_type": dict(largest_first), "by_part": by_group(listed)}


def _types(tensors: Facts) -> Iterable[str]:
    by_type = tensors["by_type"]
    return by_type if isinstance(by_type, dict) else ()


def _tokenizer(header: GgufHeader) -> Facts:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    facts: Facts = {
        "model": metadata_text(header, "tokenizer.ggml.model"),
        "pre": metadata_text(header, "tokenizer.ggml.pre"),
        "tokens": len(tokens) if isinstance(tokens, tuple) else 0,
        "chat_template": bool(metadata_text(header, "tokenizer.chat_template")),
    }
    for name in ("bos", "eos"):
        value = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        facts[name] = value if isinstance(value, int) else None
    return facts


def _dflash_kind(header: GgufHeader) -> str:
    if "markov_w1.weight" in header.tensors:
        return "DSpark drafter"
    if "selector_hidden.weight" in header.tensors or _number(header, "selector_top_k"):
        return "DFlash2 drafter"
    return "DFlash drafter"


def _mtp_layers(header: GgufHeader) -> int:
    return _number(header, "nextn_predict_layers")


def _number(header: GgufHeader, key: str) -> int:
    value = header.metadata.get(f"{header.architecture}.{key}", 0)
    return value if isinstance(value, int) else 0


def _known_keys(header: GgufHeader) -> Facts:
    """The usual geometry keys that this file has, plus those of drafters."""
    keys = (*_GEOMETRY_KEYS, "block_count", "block_size", "target_layers")
    return {
        key: _plain(header.metadata[f"{header.architecture}.{key}"])
        for key in keys
        if f"{header.architecture}.{key}" in header.metadata
    }


def _plain(value: MetadataValue) -> object:
    """A metadata value as JSON-ready data; per-layer lists that all agree become one value."""
    if isinstance(value, np.ndarray):
        items = value.tolist()
        return items[0] if items and len(items) > 1 and len(set(items)) == 1 else items
    return list(value) if isinstance(value, tuple) else value


def _folder_architectures(path: Path) -> list[str]:
    """`architectures` of the folder's config.json (also under `config`), as texts."""
    try:
        values = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileError(
            f"{path} holds no {CONFIG_FILE}: name a model file or a checkpoint folder"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path / CONFIG_FILE} cannot be read as JSON: copy it again") from error
    inner = values.get("config", values) if isinstance(values, dict) else {}
    if (path / "transfer.safetensors").exists():
        return [ARCHITECTURE_NAME]
    names = inner.get("architectures") if isinstance(inner, dict) else None
    return [str(n) for n in names] if isinstance(names, list) else []
