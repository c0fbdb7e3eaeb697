"""A copy of a target with its weights in 16 or 32 bits, for work where prefill speed counts."""

from __future__ import annotations

import ctypes
from pathlib import Path

from dspine.errors import FileError, UsageError
from dspine.llama.checks import require_count
from dspine.llama.library import find_library, native_functions
from dspine.llama.log import capture
from dspine.llama.model import check_file

_FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32}
WEIGHT_TYPES = tuple(_FILE_TYPES)


def convert_weights(source: Path, output: Path, weight_type: str, *, n_threads: int = 1) -> None:
    """Write `source` to `output` with every matrix as `weight_type` (f32, f16 or bf16).

    The copy holds the dequantised values of the source, so it is the same model up to the
    rounding of that type. It appears under its name only when it is complete.
    """
    if weight_type not in _FILE_TYPES:
        raise UsageError(
            f"weight type {weight_type!r} is unknown: choose {', '.join(WEIGHT_TYPES)}"
        )
    require_count("n_threads", n_threads)
    check_file(source)
    if source.resolve() == output.resolve():
        raise UsageError(f"{output} is the source itself: name another file for the copy")
    find_library()
    api = native_functions().api
    partial = output.with_name(f".{output.name}.partial")
    params = api.llama_model_quantize_default_params()
    params.nthread = n_threads
    params.ftype = _FILE_TYPES[weight_type]
    params.allow_requantize = True
    mark = capture.count
    try:
        code = api.llama_model_quantize(
            str(source).encode(), str(partial).encode(), ctypes.byref(params)
        )
        if code:
            raise FileError(
                f"{source} cannot be copied to {output} as {weight_type}: {capture.reason(mark)}"
            )
        partial.replace(output)
    except OSError as error:
        raise FileError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
