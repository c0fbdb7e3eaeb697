"""Peak memory of converting and quantising a drafter of 4 GB, the size of the 27B one.

python benchmarks/convert_memory.py --folder FOLDER --type q8_0

FOLDER needs 13 GB of space; what is written there is removed. The weights are one random block
repeated, because what is in them changes neither the time nor the memory.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import common
import numpy as np
import numpy.typing as npt

from dspine.files.checkpoint import write_checkpoint
from dspine.files.safetensors_file import TensorStream
from dspine.files.schema import DSpineConfig, Pair, TrainingRecord, tensor_specs

LAYERS = 5
DRAFTER = DSpineConfig(
    hidden_size=5120,
    intermediate_size=17408,
    num_layers=LAYERS,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=248320,
    target_hidden_size=5120,
    block_size=16,
    taps=(1, 16, 31, 46, 61),
    mask_token_id=248070,
    windows=(8192,) * LAYERS,
    causal=(True,) * LAYERS,
    transfer_rank=1024,
    message_size=512,
    rope_theta=1e7,
    max_positions=262144,
)
TARGET = Pair("made up", "qwen35", 5120, 64, 248320, "ab" * 32, "cd" * 32)
CHILD = """
import json, resource, sys, time
from pathlib import Path
source, output, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
began = time.monotonic()
if source.suffix == output.suffix == ".gguf":
    from dspine.files.quantise import quantise_drafter
    from dspine.llama.library import find_library
    find_library()
    quantise_drafter(source, output, kind, threads=2)
else:
    from dspine.files.convert import convert_checkpoint
    convert_checkpoint(source, output, dtype=kind)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"peak_mib": round(peak / 1024), "seconds": round(time.monotonic() - began, 1)}))
"""


def main() -> None:
    """Folder to GGUF, quantised, and back to a folder, each in a child process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="where 13 GB may be written")
    parser.add_argument("--type", default="q4_k_m", help="type to quantise to")
    parser.add_argument("-o", "--output", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    steps: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_source(folder / "source")
        size = size_of(folder / "source")
        for step, source, output, kind in (
            ("folder to GGUF, bf16", "source", "b.gguf", "bf16"),
            (f"GGUF quantised, {arguments.type}", "b.gguf", "c.gguf", arguments.type),
            ("GGUF to folder, bf16", "b.gguf", "back", "bf16"),
        ):
            command = [sys.executable, "-c", CHILD, str(folder / source), str(folder / output)]
            done = subprocess.run([*command, kind], capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            found["gigabytes"] = round(size_of(folder / output) / 1e9, 3)
            steps[step] = found
            # After each step: the whole takes many minutes.
            document = {"source_gigabytes": round(size / 1e9, 3), "steps": steps}
            common.save("convert_memory", document, arguments.output)
    rows = [(step, *found.values()) for step, found in steps.items()]
    print(common.table(("step", "peak MiB", "s", "GB"), rows))
    print(json.dumps(document))


def write_source(folder: Path) -> None:
    """A BF16 checkpoint folder of the drafter."""
    values = np.random.default_rng(1).standard_normal(1 << 24, np.float32) * np.float32(0.02)
    block = (values.view(np.uint32) >> 16).astype(np.uint16)
    began = time.monotonic()
    tensors = {
        spec.torch_name: TensorStream("BF16", spec.shape, partial(repeated, block, spec.shape))
        for spec in tensor_specs(DRAFTER)
    }
    write_checkpoint(folder, DRAFTER, TARGET, TrainingRecord(), tensors)
    print(f"source: {size_of(folder) / 1e9:.2f} GB in {time.monotonic() - began:.0f} s", flush=True)


def repeated(block: npt.NDArray[np.uint16], shape: tuple[int, ...]) -> Iterator[memoryview]:
    """The block over and over, as many values as the shape has."""
    left = math.prod(shape)
    while left > 0:
        part = block[:left]
        yield part.data.cast("B")
        left -= len(part)


def size_of(path: Path) -> int:
    """Bytes of a file or of a folder's files."""
    return sum(p.stat().st_size for p in (path.iterdir() if path.is_dir() else (path,)))


if __name__ == "__main__":
    main()
