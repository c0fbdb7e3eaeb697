"""Whether the texts of programs can be compared to the byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def rows_are_invariant(cache: Path) -> bool:
    """Whether programs with this cache compute with the CPU kernels: then a row does not depend on
    its batch. Elsewhere a near-tie may part two texts.
    """
    script = "from dspine.llama.library import find_library; print(find_library().kernels.active)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "DSPINE_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip() == "True"
