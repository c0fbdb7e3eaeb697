"""Does this drafter belong to this target? Facts from the target's file, and the comparison."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from dspine.architectures import NOT_TARGETS
from dspine.errors import FileError, PairError
from dspine.files.gguf_file import (
    GgufFile,
    GgufHeader,
    StoredTensor,
    find_tensor,
    read_header,
)
from dspine.files.mapped import printable
from dspine.files.schema import DrafterConfig, Pair
from dspine.files.sketch import Difference, Likeness, compare, read_sketch

_PART = re.compile(r"-\d{5}-of-\d{5}$")
_ENCODING = re.compile(r"[.-](?:(?:UD-)?I?Q\d\w*|MXFP4\w*|BF16|F16|F32)$", re.IGNORECASE)
_SAYS_NOTHING = re.compile(r"(?:sha256[-:])?[0-9a-f]{16,}|(?:ggml-)?model", re.IGNORECASE)

_ADAPT = (
    "`dspine eval` measures it, and `dspine train features` with `train fit --init-from` adapts "
    "the drafter"
)
_QUANTISED = (
    "{target} is another quantisation of {pair}, which this drafter was trained for ({now}, not "
    "{was}{far}), or a slight fine-tune: expect nearly as many accepted drafts; " + _ADAPT
)
_NEAR = (
    "{target} differs a little from {pair}, which this drafter was trained for ({now}{far}), as a "
    "slight fine-tune or another way of quantising does: expect nearly as many accepted drafts; "
    + _ADAPT
)
_TUNED = (
    "{target} is another version or a fine-tune of {pair}, which this drafter was trained for"
    "{far}: expect fewer accepted drafts; " + _ADAPT
)
_OTHER = (
    "{target} has the shape of {pair}, which this drafter was trained for, but is another model"
    "{far}: expect hardly any accepted drafts; " + _ADAPT
)

FINGERPRINT_TENSOR = "output_norm.weight"


def describe_target(path: Path) -> Pair:
    """What identifies a target model, read from its GGUF header and pieces of some tensors.

    Layers are those of the trunk: built-in next-token (MTP) layers are not counted. A file
    without a tokenizer gives an empty `vocab_hash`, one without `output_norm.weight` an empty
    `fingerprint`. Raises FileError when the file is not a language model.
    """
    gguf = GgufFile(path)
    header = gguf.header
    architecture = header.architecture
    if not architecture or not architecture.isprintable():
        raise FileError(
            f"{path} does not name its architecture: it is not a language model, name the "
            "target's own GGUF"
        )
    if architecture in NOT_TARGETS or metadata_text(header, "general.type") in (
        "adapter",
        "mmproj",
    ):
        what = NOT_TARGETS.get(architecture, "an adapter or projector")
        raise FileError(f"{path} is {what}, not a target: name the language model's own file")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    texts = tokens if isinstance(tokens, tuple) else ()
    layers = _count(header, f"{architecture}.block_count")
    extra = header.metadata.get(f"{architecture}.nextn_predict_layers", 0)
    trunk = layers - (extra if isinstance(extra, int) else 0)
    if trunk < 1:
        raise FileError(f"{path} holds next-token (MTP) layers only: name the model's own file")
    return Pair(
        name=_name(path, header),
        architecture=architecture,
        hidden_size=_count(header, f"{architecture}.embedding_length"),
        num_layers=trunk,
        vocab_size=len(texts) or _rows_of_embedding(header),
        vocab_hash=vocab_hash(texts) if texts else "",
        fingerprint=_fingerprint(gguf),
        sketch=read_sketch(gguf, trunk),
    )


def vocab_hash(token_texts: Iterable[str | bytes]) -> str:
    """sha256 (hex) over the token texts in id order: each one's length in bytes as 4 bytes,
    little endian, then its UTF-8 bytes (as they stand in the file)."""
    parts: list[bytes] = []
    for text in token_texts:
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
        parts += [struct.pack("<I", len(raw)), raw]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def check_pair(pair: Pair, target: Pair) -> list[str]:
    """Compare what a drafter was made for (`pair`) with the loaded target.

    Returns warnings for people: weights that differ mean another quantisation, a fine-tune or
    another model of the same shape, for which drafts are accepted less often. Raises PairError
    naming the field, expected and found, when drafts would be meaningless.
    """
    for field, what in (
        ("architecture", "architecture"),
        ("hidden_size", "hidden size"),
        ("num_layers", "number of layers"),
        ("vocab_size", "vocabulary size"),
    ):
        expected, found = getattr(pair, field), getattr(target, field)
        if expected != found:
            raise PairError(
                f"this drafter was trained for {pair.name}, whose {what} is {expected}, but "
                f"{target.name} has {found}: use the drafter made for this target"
            )
    warnings: list[str] = []
    if not pair.vocab_hash or not target.vocab_hash:
        warnings.append("the vocabulary cannot be compared: one side has no tokenizer recorded")
    elif pair.vocab_hash != target.vocab_hash:
        raise PairError(
            f"this drafter was trained for {pair.name}, whose vocabulary has hash "
            f"{pair.vocab_hash[:12]}, but that of {target.name} has {target.vocab_hash[:12]}: "
            f"the same token ids mean other texts, use the drafter made for this target"
        )
    warnings += _weights(pair, target)
    return warnings


def _weights(pair: Pair, target: Pair) -> list[str]:
    """What to expect of a target of the right shape whose weights are others."""
    if not pair.fingerprint or not target.fingerprint:
        return ["the weights cannot be compared: one side has no fingerprint recorded"]
    is_tuned = pair.fingerprint != target.fingerprint
    if pair.sketch is None or target.sketch is None:
        return [_told(_TUNED, pair, target)] if is_tuned else []
    found = compare(pair.sketch, target.sketch)
    if found is None:
        if is_tuned:
            return [_told(_TUNED, pair, target)]
        return [f"the weights of {target.name} and {pair.name} cannot be compared tensor by tensor"]
    if found.likeness is Likeness.OTHER:
        return [_told(_OTHER, pair, target, found)]
    if is_tuned or found.likeness is Likeness.CHANGED:
        return [_told(_TUNED, pair, target, found)]
    if found.likeness is Likeness.SAME:
        return []
    return [_told(_NEAR if len(set(found.types)) == 1 else _QUANTISED, pair, target, found)]


def _told(text: str, pair: Pair, target: Pair, found: Difference | None = None) -> str:
    """A warning with the names and, where it is known, the distance."""
    was, now = (kind.upper() for kind in found.types) if found else ("", "")
    far = f", weights {found.distance:.1%} apart" if found and found.distance else ""
    names = (target.name, pair.name)
    if target.name == pair.name:
        names = (f"this {target.name}", f"the {pair.name}")
    return text.format(target=names[0], pair=names[1], far=far, was=was, now=now)


def check_unpaired(
    label: str, config: DrafterConfig, target: Pair, rope_theta: float | None = None
) -> list[str]:
    """The same for a drafter whose file does not say its target: sizes are all there is to
    compare, and the target's rotary base (`rope_theta`, if it says one), which drafters share as a
    rule. Returns warnings; raises PairError when the sizes contradict each other.
    """
    check_fit(label, config, target)
    warning = (
        f"{label} does not say which target it was trained for: its sizes fit {target.name}, but "
        f"if few drafts are accepted, it belongs to another one"
    )
    if rope_theta is None or abs(config.rope_theta / rope_theta - 1.0) < 1e-3:
        return [warning]
    other_base = (
        f"{label} has a rotary base of {config.rope_theta:g} and {target.name} one of "
        f"{rope_theta:g}, which drafters share as a rule: if few drafts are accepted after long "
        f"prompts, it was converted wrongly, so convert its original anew (`dspine convert`)"
    )
    return [warning, other_base]


def rotary_base(path: Path) -> float | None:
    """The base of a target's rotary positions, None where its file does not say it."""
    header = read_header(path)
    value = header.metadata.get(f"{header.architecture}.rope.freq_base")
    return float(value) if isinstance(value, int | float) and value > 0 else None


def check_fit(label: str, config: DrafterConfig, pair: Pair) -> None:
    """Raise PairError when a drafter's own sizes contradict the target it is said to be for."""
    for what, expected, found in (
        ("target hidden size", config.target_hidden_size, pair.hidden_size),
        ("vocabulary size", config.vocab_size, pair.vocab_size),
    ):
        if expected != found:
            raise PairError(
                f"{label}: the drafter needs a {what} of {expected}, but {pair.name} has {found}: "
                f"name the target it belongs to"
            )
    if max(config.taps) >= pair.num_layers:
        raise PairError(
            f"{label}: the drafter reads target layer {max(config.taps)}, but {pair.name} has "
            f"layers 0 to {pair.num_layers - 1}: name the target it belongs to"
        )


def metadata_text(header: GgufHeader, key: str) -> str:
    """A text of the header, or an empty string when it is missing or no text."""
    value = header.metadata.get(key)
    return value if isinstance(value, str) else ""


def _name(path: Path, header: GgufHeader) -> str:
    """What people call the model: its file's name without the quantisation.

    `general.name` is often the name of a folder in which somebody trained, so it only stands in
    for file names that say nothing.
    """
    stem = _ENCODING.sub("", _PART.sub("", path.stem))
    if _SAYS_NOTHING.fullmatch(stem):
        stem = metadata_text(header, "general.name") or stem
    return printable(stem)


def _fingerprint(gguf: GgufFile) -> str:
    if FINGERPRINT_TENSOR in gguf.header.tensors:
        norm: StoredTensor | None = gguf.tensor(FINGERPRINT_TENSOR)
    else:
        norm = find_tensor(gguf.path, FINGERPRINT_TENSOR)
    if norm is None:
        return ""
    return hashlib.sha256(np.ascontiguousarray(norm.as_float32(), "<f4").tobytes()).hexdigest()


def _count(header: GgufHeader, key: str) -> int:
    value = header.metadata.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise FileError(
            f"{header.path} has no usable {key}: it is not a language model, name the target's "
            "own GGUF"
        )
    return value


def _rows_of_embedding(header: GgufHeader) -> int:
    info = header.tensors.get("token_embd.weight")
    if info is None or len(info.ne) != 2:
        raise FileError(
            f"{header.path} has neither tokens nor token_embd.weight: not a target, name the "
            "target's own GGUF"
        )
    return info.ne[1]
