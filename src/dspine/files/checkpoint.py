"""Checkpoint folders in SpecForge's layout, which SGLang and vLLM load: read and write.

A folder holds config.json, model.safetensors (all tensors; for DSpine the transfer codes and the
flag `transfer_ready` too) and, from us, dspine.json with what those formats have no place for: the
pair, the training record and the reduced head. DSpine's reference layout (codes in
transfer.safetensors, config under `config`) is read too.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dspine.errors import FileError
from dspine.files import checkpoint_config
from dspine.files.atomic import atomic_write, reason, refuse_existing
from dspine.files.checkpoint_layers import FULL, SLIDING
from dspine.files.drafter_file import check_draft_vocab, check_names, check_shape
from dspine.files.dtypes import Array, encode
from dspine.files.gguf_writer import Progress
from dspine.files.mapped import printable
from dspine.files.pairing import check_fit
from dspine.files.safetensors_file import (
    SafeTensor,
    TensorStream,
    read_safetensors,
    write_safetensors,
)
from dspine.files.schema import (
    SINK_TENSORS,
    DrafterConfig,
    DSpineConfig,
    Pair,
    Sketch,
    TensorSpec,
    TrainingRecord,
    tensor_specs,
)
from dspine.files.sketch import check_sketch
from dspine.files.typed_keys import checked_curve, provenance_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SIDE_FILE = "dspine.json"
TRANSFER_FILE = "transfer.safetensors"
READY = "transfer_ready"
MASK_FILE = "mask_embedding.pt"
"""A trained embedding of the mask token, which some DFlash drafters have beside their weights."""
_SINKS = re.compile(
    r"layers\.(\d{1,4})\.self_attn\.(?:attention_sink_bias|sinks)(?:\.weight)?", re.ASCII
)
"""Names under which engines look for a layer's attention sinks."""
_TORCH_DTYPES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_DTYPES: Mapping[str, str] = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
_MAX_JSON = 64 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A drafter read from a folder; arrays are mapped from the file until they are used."""

    folder: Path
    config: DrafterConfig
    pair: Pair | None
    """None in folders that other programs wrote: they do not say which target they are for."""
    record: TrainingRecord
    tensors: Mapping[str, Array]
    """By torch name, as stored: float32, float16 or bfloat16 bits in uint16."""
    draft_vocab: npt.NDArray[np.int32] | None


def write_checkpoint(
    folder: Path,
    config: DrafterConfig,
    pair: Pair,
    record: TrainingRecord,
    tensors: Mapping[str, Array | TensorStream],
    draft_vocab: Sequence[int] | npt.NDArray[np.integer] | None = None,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint folder that SpecForge loads strictly.

    `tensors` maps torch names to float32, float16 or bfloat16-bit (uint16) arrays; `dtype` (f32,
    f16, bf16) converts them, None keeps each as it is; streams are written as they come. Every
    file is written atomically, and config.json last, so an interrupted write leaves no folder that
    looks complete. Raises FileError for wrong tensors, an existing checkpoint without `overwrite`,
    or failed writes.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise FileError(f"unknown checkpoint dtype {dtype!r}: choose one of {', '.join(_DTYPES)}")
    vocab = check_draft_vocab(config, draft_vocab)
    check_fit(str(folder), config, pair)
    specs = tensor_specs(config)
    check_names(f"checkpoint for {folder}", [s.torch_name for s in specs], list(tensors))
    for spec in specs:
        check_shape(
            "checkpoint", spec.torch_name, spec.shape, tuple(tensors[spec.torch_name].shape)
        )
    stored: dict[str, SafeTensor | TensorStream] = {
        s.torch_name: _stored(s, tensors[s.torch_name], dtype) for s in specs
    }
    main = _TORCH_DTYPES[stored["fc.weight"].dtype]
    values = checkpoint_config.to_json(config, pair.num_layers, main)
    side = {
        "format": 1,
        "pair": pair_values(pair),
        "acceptance_curve": list(checked_curve(config, record)),
        "training": json.loads(provenance_json(record)),
        "draft_vocab": None if vocab is None else vocab.tolist(),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (WEIGHTS_FILE, SIDE_FILE, CONFIG_FILE):
            refuse_existing(folder / name, overwrite)
        # Engines load every weights file of a folder.
        others = {path.name for path in folder.glob("*.safetensors*")} - {WEIGHTS_FILE}
    except OSError as error:
        raise FileError(f"cannot write {folder}: {reason(error)}") from error
    if others:
        raise FileError(
            f"{folder} holds other weights ({', '.join(sorted(others)[:3])}), which would be "
            f"loaded beside the new ones: choose another folder"
        )
    if isinstance(config, DSpineConfig):
        stored[READY] = SafeTensor("BOOL", np.array(True))
    with _hidden(folder / CONFIG_FILE):
        write_safetensors(
            folder / WEIGHTS_FILE,
            stored,
            {"format": "pt"},
            overwrite=overwrite,
            progress=progress,
        )
    _write_json(folder / SIDE_FILE, side, overwrite)
    _write_json(folder / CONFIG_FILE, values, overwrite)


@contextmanager
def _hidden(path: Path) -> Iterator[None]:
    """Take an old file away while the block runs; it comes back when the block fails."""
    try:
        before = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(f"cannot write {path}: {reason(error)}") from error
    try:
        yield
    except BaseException:
        if before is not None:
            with suppress(OSError):
                path.write_bytes(before)
        raise


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint folder; raises FileError naming what is missing or does not fit."""
    if not folder.is_dir():
        raise FileError(f"{folder} is not a folder: name the folder that holds {CONFIG_FILE}")
    values = _read_json(folder / CONFIG_FILE)
    tensors = _read_tensors(folder)
    if (folder / TRANSFER_FILE).exists():
        values = _reference_config(values, tensors)
        _add_reference_codes(folder, tensors)
    side = _read_json(folder / SIDE_FILE) if (folder / SIDE_FILE).exists() else None
    pair, record, vocab = _side(folder / SIDE_FILE, side)
    size = None if vocab is None else len(vocab)
    sinks = _name_sinks(folder, tensors)
    config = checkpoint_config.from_json(str(folder / CONFIG_FILE), values, size, sinks)
    if isinstance(config, DSpineConfig):
        _check_ready(folder, tensors.pop(READY, None))
    if (folder / MASK_FILE).exists():
        raise FileError(
            f"{folder} has its own embedding of the mask token ({MASK_FILE}), for which this "
            f"layout has no place: convert it with llama.cpp's convert_hf_to_gguf.py, dspine runs "
            f"that GGUF"
        )
    specs = tensor_specs(config)
    check_names(str(folder), [s.torch_name for s in specs], list(tensors))
    for spec in specs:
        tensor = tensors[spec.torch_name]
        check_shape(str(folder), spec.torch_name, spec.shape, tensor.shape)
        if tensor.dtype not in _TORCH_DTYPES:
            raise FileError(
                f"{folder}: tensor {spec.torch_name} has dtype {tensor.dtype}, expected BF16, F16 "
                f"or F32"
            )
    if pair is not None:
        check_fit(str(folder), config, pair)
    try:
        draft_vocab = check_draft_vocab(config, vocab)
        checked_curve(config, record)
    except FileError as error:
        raise FileError(f"{folder / SIDE_FILE}: {error}") from error
    arrays = {s.torch_name: tensors[s.torch_name].data for s in specs}
    return Checkpoint(folder, config, pair, record, arrays, draft_vocab)


def _stored(
    spec: TensorSpec, array: Array | TensorStream, dtype: str | None
) -> SafeTensor | TensorStream:
    if isinstance(array, TensorStream):
        return array
    if dtype is None:
        names = {"float32": "F32", "float16": "F16", "uint16": "BF16"}
        if array.dtype.name not in names:
            raise FileError(
                f"tensor {spec.torch_name} has dtype {array.dtype}: weights are float32, float16 "
                f"or bfloat16 bits in uint16"
            )
        return SafeTensor(names[array.dtype.name], array)
    return TensorStream(_DTYPES[dtype], spec.shape, partial(encode, array, dtype, spec.torch_name))


def _read_tensors(folder: Path) -> dict[str, SafeTensor]:
    index = folder / INDEX_FILE
    if (folder / WEIGHTS_FILE).exists() or not index.exists():
        return dict(read_safetensors(folder / WEIGHTS_FILE).tensors)
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(v, str) for v in places.values()):
        raise FileError(
            f"{index} is damaged: it has no weight_map from tensors to files, copy or download "
            "the folder again"
        )
    tensors: dict[str, SafeTensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise FileError(
                f"{index} names {name!r}, which is not a file beside it: copy or download the "
                "folder again"
            )
        found = read_safetensors(folder / name).tensors
        check_names(str(folder / name), [t for t, p in places.items() if p == name], list(found))
        tensors.update(found)
    return tensors


def _name_sinks(folder: Path, tensors: dict[str, SafeTensor]) -> tuple[int, ...]:
    """Give attention sinks the name that tensor_specs has; the layers that have them."""
    layers: list[int] = []
    for name in list(tensors):
        if (found := _SINKS.fullmatch(name)) is not None:
            layers.append(int(found[1]))
            ours = f"layers.{layers[-1]}.{SINK_TENSORS.torch_name}"
            if ours != name and ours in tensors:
                raise FileError(f"{folder} has attention sinks twice: {ours} and {name}")
            tensors[ours] = tensors.pop(name)
    return tuple(sorted(layers))


def _check_ready(folder: Path, ready: SafeTensor | None) -> None:
    if ready is None or ready.dtype != "BOOL" or ready.data.size != 1:
        raise FileError(
            f"{folder} has no flag {READY}: it is no complete DSpine checkpoint, copy or download "
            "it again"
        )
    if not bool(ready.data.reshape(-1)[0]):
        raise FileError(
            f"{folder}: {READY} is false, so its transfer codes were never made: initialise them "
            f"from the target's head and save again"
        )


def _reference_config(
    values: Mapping[str, Any], tensors: Mapping[str, SafeTensor]
) -> Mapping[str, Any]:
    """The reference layout's config completed by what that implementation has built in.

    Block 16, full attention and top_k 16, where the config does not state its own; rank and
    message size follow from the tensors (as SpecForge's converter does it).
    """
    inner = values.get("config", values)
    if not isinstance(inner, dict):
        raise FileError(
            f"{CONFIG_FILE} has no table under 'config': it is damaged, copy or download the "
            "folder again"
        )
    message = tensors.get("injection.message.weight")
    if message is None or len(message.shape) != 2:
        raise FileError(
            "injection.message.weight is missing: this is no DSpine checkpoint, name another folder"
        )
    dflash = inner.get("dflash_config", {})
    stated = inner.get("dspine_config", {})
    if not isinstance(dflash, dict) or not isinstance(stated, dict):
        raise FileError(f"{CONFIG_FILE}: dflash_config and dspine_config must be tables")
    taps = dflash.get("target_layer_ids") or inner.get("target_layer_ids")
    if not taps:
        raise FileError(f"{CONFIG_FILE} must name dflash_config.target_layer_ids")
    layers = checkpoint_config.layer_count(inner)
    built_in: dict[str, Any] = {"layer_types": [FULL] * layers}
    if "block_size" not in dflash:
        built_in["block_size"] = 16
    if inner.get("sliding_window") and inner.get("use_sliding_window") is True:
        built_in["layer_types"] = [SLIDING] * layers
    own = {k: v for k, v in inner.items() if k != "target_layer_ids" and v is not None}
    return {
        **built_in,
        **own,
        "architectures": [checkpoint_config.ARCHITECTURE_NAME],
        "dflash_config": {**dflash, "target_layer_ids": taps},
        "dspine_config": {
            "top_k": 16,
            **stated,
            "message_size": message.shape[0],
            "transfer_rank": message.shape[1],
        },
    }


def _add_reference_codes(folder: Path, tensors: dict[str, SafeTensor]) -> None:
    codes = read_safetensors(folder / TRANSFER_FILE).tensors.get("codes")
    if codes is None:
        raise FileError(f"{folder / TRANSFER_FILE} has no tensor codes: copy the folder again")
    if "transfer_codes" in tensors:
        raise FileError(
            f"{folder} has transfer codes in {TRANSFER_FILE} and beside the other weights: remove "
            f"the file that does not belong to it"
        )
    tensors["transfer_codes"] = codes
    tensors[READY] = SafeTensor("BOOL", np.array(True))


def _side(
    path: Path, side: Mapping[str, Any] | None
) -> tuple[Pair | None, TrainingRecord, list[int] | None]:
    if side is None:
        return None, TrainingRecord(), None
    known = {"format", "pair", "acceptance_curve", "training", "draft_vocab"}
    if side.get("format") != 1 or set(side) != known:
        raise FileError(
            f"{path} has format {side.get('format')!r} and keys {sorted(side)}, expected format 1 "
            f"with {sorted(known)}"
        )
    curve, training, vocab = side["acceptance_curve"], side["training"], side["draft_vocab"]
    if not isinstance(curve, list) or not all(type(p) in (int, float) for p in curve):
        raise FileError(f"{path}: acceptance_curve must be a list of numbers")
    if not isinstance(training, dict):
        raise FileError(f"{path}: training must be a table")
    if vocab is not None and not (isinstance(vocab, list) and all(type(i) is int for i in vocab)):
        raise FileError(f"{path}: draft_vocab must be null or a list of token ids")
    record = TrainingRecord(tuple(float(p) for p in curve), training)
    return _pair(path, side["pair"]), record, vocab


def pair_values(pair: Pair) -> dict[str, Any]:
    """A pair as JSON has it; the sketch's bytes as base64."""
    values = {f.name: getattr(pair, f.name) for f in fields(Pair) if f.name != "sketch"}
    if pair.sketch is None:
        return values
    text = b64encode(pair.sketch.data).decode("ascii")
    return {**values, "sketch": {**asdict(pair.sketch), "data": text}}


def _sketch(path: Path, values: object) -> Sketch:
    """The sketch of pair.sketch."""
    problem = "a table with names, types, sizes and data"
    if isinstance(values, dict) and set(values) == {f.name for f in fields(Sketch)}:
        lists = [values[name] for name in ("names", "types", "sizes")]
        kinds = (str, str, int)
        if all(
            isinstance(found, list) and all(type(one) is kind for one in found)
            for found, kind in zip(lists, kinds, strict=True)
        ):
            try:
                data = b64decode(values["data"], validate=True)
            except (ValueError, TypeError):
                data = b""
            names, types, sizes = lists
            sketch = Sketch(tuple(map(printable, names)), tuple(types), tuple(sizes), data)
            found_problem = check_sketch(sketch)
            if found_problem is None:
                return sketch
            problem = found_problem
    raise FileError(f"{path}: pair.sketch is damaged, expected {problem}: copy the folder again")


def _pair(path: Path, values: object) -> Pair:
    types = {f.name: type(getattr(_EXAMPLE, f.name)) for f in fields(Pair) if f.name != "sketch"}
    sketch = None
    if isinstance(values, dict) and "sketch" in values:
        sketch = _sketch(path, values["sketch"])
        values = {name: value for name, value in values.items() if name != "sketch"}
    if not isinstance(values, dict) or set(values) != set(types):
        raise FileError(f"{path}: pair must be a table with {', '.join(types)}")
    for name, expected in types.items():
        if type(values[name]) is not expected:
            raise FileError(
                f"{path}: pair.{name} is {values[name]!r}, expected {expected.__name__}"
            )
    return Pair(**{**values, "name": printable(values["name"])}, sketch=sketch)


_EXAMPLE = Pair("", "", 0, 0, 0, "", "", False)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON:
            raise FileError(f"{path} is larger than any configuration: it is another file")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileError(f"{path} does not exist: name a complete checkpoint folder") from error
    except OSError as error:
        raise FileError(f"cannot read {path}: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path} is not valid JSON: copy or download it again") from error
    if not isinstance(value, dict):
        raise FileError(f"{path} is not a table of settings: copy or download it again")
    return value


def _write_json(path: Path, value: Mapping[str, Any], overwrite: bool) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with atomic_write(path, overwrite=overwrite) as stream:
        stream.write(text.encode("utf-8"))
